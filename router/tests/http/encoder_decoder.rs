//! Encoder–decoder models: the encoder reads the input, and the answer is a text of its own.

use axum::http::StatusCode;
use penstock_router::Config;
use serde_json::{Value, json};

use crate::model::{self, IM_END, IM_START, bytes, word};
use crate::server::{Sequence, Server};

const PREFIX: [u32; 2] = [IM_START, 3];

fn has_encoder(config: &mut Config) {
    config.decoder_prefix = PREFIX.into();
    config.pipeline_tag = Some("text2text-generation".to_owned());
    (config.limits.max_total_tokens, config.limits.max_new_tokens) = (250, Some(50));
}

async fn serve(script: impl Fn(Sequence) + Send + Sync + 'static) -> Server {
    Server::start(script, has_encoder).await
}

async fn answering(token_ids: &[u32]) -> Server {
    let token_ids = token_ids.to_vec();
    serve(move |sequence| sequence.answer(&token_ids)).await
}

#[tokio::test]
async fn the_decoder_s_prefix_follows_every_source_and_is_not_counted() {
    let server = answering(&[word("Hello"), IM_END]).await;
    let source = bytes("Hi");
    let submitted = |server: &Server| {
        let request = server.last_request();
        (request.prompt_token_ids, request.num_source_tokens, request.max_new_tokens)
    };
    let parameters = json!({"details": true, "max_new_tokens": 7});
    let answer = server.post("/generate", json!({"inputs": "Hi", "parameters": parameters})).await;
    assert_eq!(submitted(&server), ([&source[..], &PREFIX].concat(), 2, 7));
    assert_eq!(answer.header("x-prompt-tokens"), "2");
    assert_eq!((&answer.json()["generated_text"], &answer.json()["details"]["prefill"]), (&json!("Hello"), &json!([])));

    let stream = server.post("/generate_stream", json!({"inputs": "Hi", "parameters": parameters})).await;
    let last: Value = serde_json::from_str(stream.events().last().unwrap()).unwrap();
    assert_eq!((&last["generated_text"], &last["details"]["input_length"]), (&json!("Hello"), &json!(2)));

    for prompt in [json!("Hi"), json!(source)] {
        let answer = server.post("/v1/completions", json!({"prompt": prompt})).await.json();
        assert_eq!(submitted(&server), ([&source[..], &PREFIX].concat(), 2, 16));
        assert_eq!((&answer["choices"][0]["text"], &answer["usage"]["total_tokens"]), (&json!("Hello"), &json!(4)));
    }
}

#[tokio::test]
async fn truncation_applies_to_the_source() {
    let server = answering(&[IM_END]).await;
    server.post("/generate", json!({"inputs": "Hello", "parameters": {"truncate": 2}})).await;
    assert_eq!(server.last_request().prompt_token_ids, [&bytes("lo")[..], &PREFIX].concat());
    assert_eq!(server.last_request().num_source_tokens, 2);
}

#[tokio::test]
async fn prefill_is_the_decoder_s_prefix() {
    let server = answering(&[IM_END]).await;
    let body = json!({"inputs": "Hi", "parameters": {"decoder_input_details": true}});
    let details = &server.post("/generate", body).await.json()["details"];
    insta::assert_snapshot!(details["prefill"].to_string(), @r#"[{"id":256,"text":"<|im_start|>","logprob":null},{"id":3,"text":"\u0003","logprob":null}]"#);
    assert!(!server.last_request().sampling.prompt_logprobs, "the worker has none to tell");
}

#[tokio::test]
async fn an_answer_begins_a_new_text() {
    // A leading space belongs to its word, and the first word of a text has none.
    let spaces = |config: &mut Config| {
        let path = config.model_folder.join("tokenizer.json");
        let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        tokenizer["decoder"] =
            json!({"type": "Metaspace", "replacement": "Ġ", "prepend_scheme": "always", "split": true});
        std::fs::write(path, tokenizer.to_string()).unwrap();
    };
    for (encoder, expected) in [(true, "world world"), (false, " world world")] {
        let adjust = |config: &mut Config| {
            spaces(config);
            if encoder {
                has_encoder(config);
            }
        };
        let script = |sequence: Sequence| sequence.answer(&[word(" world"), word(" world"), IM_END]);
        let server = Server::start(script, adjust).await;
        let answer = server.post("/generate", json!({"inputs": "Hi"})).await.json();
        assert_eq!(answer["generated_text"], expected);
    }
}

#[tokio::test]
async fn source_and_answer_have_limits_of_their_own() {
    let server = answering(&[IM_END]).await;
    for (inputs, parameters, told) in [
        ("Hi", json!({"max_new_tokens": 51}), "`max_new_tokens` must be <= 50. Given: 51"),
        (&"a".repeat(201), json!({}), "`inputs` must have at most 200 tokens. Given: 201"),
        (
            &"a".repeat(210),
            json!({"max_new_tokens": 50}),
            "`inputs` tokens + `max_new_tokens` must be <= 250. Given: 210 `inputs` tokens and 50 `max_new_tokens`",
        ),
        ("", json!({}), "`inputs` cannot be empty"),
    ] {
        let answer = server.post("/generate", json!({"inputs": inputs, "parameters": parameters})).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY);
        assert_eq!(answer.json()["error"], format!("Input validation error: {told}"));
    }
    let answer = server.post("/v1/completions", json!({"prompt": "Hi", "max_tokens": 51})).await;
    assert_eq!((answer.status, &answer.json()["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("max_tokens")));
    // After the longest source the rest of the total is below the answer's own limit.
    server.post("/generate", json!({"inputs": "a".repeat(200)})).await;
    assert_eq!(server.last_request().max_new_tokens, 50);
    assert_eq!(server.engine.requests.lock().unwrap().len(), 1, "no refused request was submitted");
}

#[tokio::test]
async fn no_answer_continues_its_prompt() {
    let server = answering(&[word("Hello"), IM_END]).await;
    for logprobs in [json!(null), json!(1)] {
        let body = json!({"prompt": "Hi", "echo": true, "logprobs": logprobs});
        let answer = server.post("/v1/completions", body).await;
        assert_eq!((answer.status, &answer.json()["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("echo")));
        assert!(answer.body.contains("the model is an encoder–decoder"), "{}", answer.body);
    }
    let answer = server.post("/", json!({"inputs": "Hi"})).await;
    assert_eq!(answer.body, r#"[{"generated_text":"Hello"}]"#);
    let asked = server.post("/", json!({"inputs": "Hi", "parameters": {"return_full_text": true}})).await;
    assert_eq!(asked.body, r#"[{"generated_text":"HiHello"}]"#);
    assert_eq!(server.get("/info").await.json()["model_pipeline_tag"], "text2text-generation");
}

#[tokio::test]
async fn without_a_template_a_chat_is_refused_as_with_any_model() {
    let untaught = |config: &mut Config| {
        has_encoder(config);
        model::write_with_template(&config.model_folder, &json!(null));
    };
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), untaught).await;
    let answer = server.post("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "Hi"}]})).await;
    assert_eq!((answer.status, &answer.json()["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("template_error")));
}
