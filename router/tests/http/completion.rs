//! `/v1/completions`.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::model::{IM_END, bytes, word};
use crate::server::Server;

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn a_text_is_completed() {
    let server = Server::answering(&[word(" world"), word("END"), word(" and more"), IM_END]).await;
    let answer = server.post(PATH, json!({"prompt": "Hello", "stop": "END"})).await;
    let mut body = answer.json();
    assert!(body["id"].as_str().unwrap().starts_with("cmpl-"));
    body["id"] = "ID".into();
    body["created"] = 0.into();
    insta::assert_snapshot!(body.to_string(), @r#"{"object":"text_completion","id":"ID","created":0,"model":"test/model","system_fingerprint":"0.1.0-native","choices":[{"index":0,"text":" world","logprobs":null,"finish_reason":"stop"}],"usage":{"prompt_tokens":5,"completion_tokens":2,"total_tokens":7}}"#);
    assert_eq!(server.last_request().prompt_token_ids, bytes("Hello"));
}

#[tokio::test]
async fn several_prompts_are_answered_in_their_order() {
    let server = Server::scripted(|sequence| {
        let prompt = sequence.request.prompt_token_ids.clone();
        sequence.answer(&[prompt, vec![IM_END]].concat());
    })
    .await;
    for prompt in [json!(["ab", "c", "def"]), json!([[97, 98], [99], [100, 101, 102]])] {
        let answer = server.post(PATH, json!({"prompt": prompt})).await.json();
        let texts: Vec<_> = answer["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
        assert_eq!(texts, ["ab", "c", "def"]);
        assert_eq!(answer["usage"], json!({"prompt_tokens": 6, "completion_tokens": 9, "total_tokens": 15}));

        let fields = json!({"prompt": prompt, "stream": true, "stream_options": {"include_usage": true}});
        let events = server.post(PATH, fields).await.events();
        assert_eq!(events.last().unwrap(), "[DONE]");
        let chunks: Vec<Value> = events.iter().filter_map(|event| serde_json::from_str(event).ok()).collect();
        let mut texts = vec![String::new(); 3];
        for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
            let index = usize::try_from(choice["index"].as_u64().unwrap()).unwrap();
            texts[index].push_str(choice["text"].as_str().unwrap());
        }
        assert_eq!(texts, ["ab", "c", "def"]);
        assert_eq!(chunks.last().unwrap()["usage"]["total_tokens"], 15);
    }
}

#[tokio::test]
async fn refusals_are_openai_s_error_objects() {
    let server = Server::answering(&[IM_END]).await;
    let cases = [
        (json!({"prompt": "a", "suffix": "b"}), "suffix not supported", "suffix is not supported"),
        (json!({"prompt": ["a", "b", "c", "d", "e"]}), "batch size exceeded", "5 prompts were given, at most 4"),
        (json!({"prompt": []}), "validation", "`inputs` cannot be empty"),
        (json!({"prompt": ""}), "validation", "`inputs` cannot be empty"),
        (json!({"prompt": [5000]}), "validation", "token ids must be < 264. Given: 5000"),
        (json!({"prompt": "a", "echo": true}), "validation", "`echo` is not supported yet"),
        (json!({"prompt": "a", "logprobs": 0}), "validation", "`logprobs` is not supported yet"),
        (json!({"prompt": "a", "best_of": 3}), "validation", "`best_of` is not supported yet"),
        (json!({"prompt": {"a": 1}}), "malformed_request", "a string, a list of strings"),
        (json!({}), "malformed_request", "missing field `prompt`"),
    ];
    for (body, code, message) in cases {
        let answer = server.post(PATH, body.clone()).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}");
        let error = answer.json()["error"].clone();
        assert_eq!(error["code"], code, "{body}");
        assert_eq!(error["type"], "invalid_request_error");
        assert!(error["message"].as_str().unwrap().contains(message), "{error}");
    }
}
