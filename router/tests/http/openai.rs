//! Rules of OpenAI's API that both routes follow.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::fold::with;
use crate::model::{IM_END, word};
use crate::server::Server;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn chat(fields: Value) -> Value {
    with(json!({"messages": [{"role": "user", "content": "Hi"}]}), fields)
}

fn completion(fields: Value) -> Value {
    with(json!({"prompt": "Hi"}), fields)
}

/// The error object of a refused request.
async fn refusal(server: &Server, path: &str, body: Value) -> Value {
    let answer = server.post(path, body.clone()).await;
    assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{body}: {}", answer.body);
    answer.json()["error"].clone()
}

#[tokio::test]
async fn a_completion_has_sixteen_tokens_by_default_and_fewer_where_the_context_ends() {
    let server = Server::answering(&[word("Hello"); 300]).await;
    for (prompt, expected) in [("Hi".to_owned(), 16), ("x".repeat(200), 16), ("x".repeat(100), 16)] {
        let answer = server.post(COMPLETIONS, json!({"prompt": prompt})).await.json();
        assert_eq!(answer["usage"]["completion_tokens"], expected);
    }
    let narrow = |config: &mut penstock_router::Config| config.limits.max_total_tokens = 10;
    let server = Server::start(|sequence| sequence.answer(&[word("Hello"); 300]), narrow).await;
    let answer = server.post(COMPLETIONS, json!({"prompt": "Hi"})).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 8);
}

#[tokio::test]
async fn completion_chunks_have_usage_only_on_request() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let chunks = |answer: crate::server::Answer| -> Vec<Value> {
        answer.events().iter().filter_map(|event| serde_json::from_str(event).ok()).collect()
    };
    let plain = chunks(server.post(COMPLETIONS, completion(json!({"stream": true}))).await);
    assert!(plain.iter().all(|chunk| chunk.get("usage").is_none()), "{plain:?}");
    let fields = json!({"stream": true, "stream_options": {"include_usage": true}});
    let mut asked = chunks(server.post(COMPLETIONS, completion(fields)).await);
    let last = asked.pop().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["total_tokens"]), (&json!([]), &json!(4)));
    assert!(asked.iter().all(|chunk| chunk.get("usage") == Some(&Value::Null)), "{asked:?}");
}

#[tokio::test]
async fn stream_options_need_a_stream() {
    let server = Server::answering(&[IM_END]).await;
    let fields = json!({"stream_options": {"include_usage": true}});
    for (path, body) in [(CHAT, chat(fields.clone())), (COMPLETIONS, completion(fields))] {
        let error = refusal(&server, path, body).await;
        assert_eq!((&error["param"], &error["code"]), (&json!("stream_options"), &json!("validation")));
    }
}

#[tokio::test]
async fn a_prompt_that_exceeds_the_context_has_openai_s_code_and_names() {
    let server = Server::answering(&[IM_END]).await;
    let long = "x".repeat(201);
    let cases = [
        (CHAT, json!({"messages": [{"role": "user", "content": long}]}), "messages", "`messages` must have at most"),
        (COMPLETIONS, json!({"prompt": long}), "prompt", "`prompt` must have at most 200 tokens. Given: 201"),
        (CHAT, chat(json!({"max_tokens": 250})), "messages", "`messages` tokens + `max_tokens` must be <= 256"),
        (COMPLETIONS, completion(json!({"max_tokens": 255})), "prompt", "`prompt` tokens + `max_tokens` must be"),
    ];
    for (path, body, param, message) in cases {
        let error = refusal(&server, path, body).await;
        assert_eq!((&error["code"], &error["param"]), (&json!("context_length_exceeded"), &json!(param)), "{error}");
        assert!(error["message"].as_str().unwrap().starts_with(message), "{error}");
    }
}

#[tokio::test]
async fn errors_name_openai_s_fields() {
    let server = Server::answering(&[IM_END]).await;
    let cases = [
        (json!({"max_tokens": 0}), "max_tokens", "`max_tokens` must be"),
        (json!({"top_logprobs": 21, "logprobs": true}), "top_logprobs", "`top_logprobs` must be"),
        (json!({"top_p": 1.5}), "top_p", "`top_p` must be >= 0.0 and <= 1.0"),
        (json!({"temperature": -1}), "temperature", "`temperature` must be >= 0.0"),
        (json!({"temperature": "hot"}), "temperature", ""),
        (json!({"stop_token_ids": [1, -1]}), "stop_token_ids", ""),
        (json!({"max_tokens": 2.5}), "max_tokens", ""),
        (json!({"stream": "yes"}), "stream", ""),
        (json!({"messages": [{"content": "Hi"}]}), "messages", ""),
    ];
    for (fields, param, message) in cases {
        let error = refusal(&server, CHAT, chat(fields)).await;
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().starts_with(message), "{error}");
    }
    assert_eq!(refusal(&server, CHAT, json!({})).await["param"], "messages");
    assert_eq!(refusal(&server, COMPLETIONS, json!({})).await["param"], "prompt");
}

#[tokio::test]
async fn whole_numbers_may_be_written_as_floats() {
    let server = Server::answering(&[word("Hello"); 9]).await;
    let fields = json!({"max_tokens": 2.0, "n": 1.0, "seed": 3.0, "top_k": 4.0});
    for (path, body) in [(CHAT, chat(fields.clone())), (COMPLETIONS, completion(fields))] {
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
        assert_eq!(answer.json()["usage"]["completion_tokens"], 2);
        let sampling = server.last_request().sampling;
        assert_eq!((sampling.seed, sampling.top_k), (3, 4));
    }
}

#[tokio::test]
async fn top_p_zero_is_greedy() {
    let server = Server::answering(&[IM_END]).await;
    let answer = server.post(CHAT, chat(json!({"top_p": 0, "temperature": 0.7}))).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    let sampling = server.last_request().sampling;
    assert_eq!((sampling.do_sample, sampling.top_p, sampling.temperature), (false, 1.0, 1.0));
}

#[tokio::test]
async fn fields_that_clients_always_send_are_accepted() {
    let server = Server::answering(&[IM_END]).await;
    let fields = json!({
        "user": "me", "service_tier": "auto", "store": false, "metadata": {"a": "b"}, "safety_identifier": "x",
        "prompt_cache_key": "y", "verbosity": "low",
    });
    for (path, body) in [(CHAT, chat(fields.clone())), (COMPLETIONS, completion(fields))] {
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    }
}
