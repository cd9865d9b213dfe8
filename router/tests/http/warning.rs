//! Fields that the server does not know: a warning in a header of the answer, or, on a strict server, an error.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::model::{IM_END, word};
use crate::server::{Answer, Server};

const HEADER: &str = "x-penstock-warning";
const MISSPELLED: &str = "unknown field `tempreature`; did you mean `temperature`?";

/// Requests of each dialect, each with a misspelled field; TGI's in `parameters`.
fn requests() -> [(&'static str, Value); 9] {
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let generate = json!({"inputs": "Hi", "parameters": {"tempreature": 0.5}});
    let chat = json!({"messages": messages, "max_tokens": 2, "tempreature": 0.5});
    [
        ("/generate", generate.clone()),
        ("/generate_stream", generate.clone()),
        ("/", generate.clone()),
        ("/invocations", generate),
        ("/v1/chat/completions", chat.clone()),
        ("/invocations", chat),
        ("/v1/completions", json!({"prompt": "Hi", "tempreature": 0.5})),
        ("/v1/messages", json!({"model": "tgi", "max_tokens": 2, "messages": messages, "tempreature": 0.5})),
        ("/v1/responses", json!({"model": "tgi", "input": "Hi", "tempreature": 0.5})),
    ]
}

#[tokio::test]
async fn the_answer_names_an_unknown_field_and_its_near_miss() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let assert_warned = |path: &str, answer: Answer| {
        assert_eq!(answer.status, StatusCode::OK, "{path}: {}", answer.body);
        let expected = if path == "/v1/chat/completions" || !answer.header(HEADER).contains("parameters") {
            MISSPELLED.to_owned()
        } else {
            MISSPELLED.replace("`temp", "`parameters.temp")
        };
        assert_eq!(answer.header(HEADER), expected, "{path}");
    };
    for (path, body) in requests() {
        assert_warned(path, server.post(path, body.clone()).await);
        let mut streamed = body;
        streamed["stream"] = true.into();
        assert_warned(path, server.post(path, streamed).await);
    }
}

#[tokio::test]
async fn a_request_without_unknown_fields_has_no_warning() {
    let server = Server::answering(&[word("Hello"), IM_END]).await;
    let body =
        json!({"messages": [{"role": "user", "content": "Hi", "mood": "fine"}], "temperature": 0.5, "unknown": null});
    let answer = server.post("/v1/chat/completions", body).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert!(!answer.headers.contains_key(HEADER));
}

#[tokio::test]
async fn a_strict_server_refuses_an_unknown_field_by_name() {
    let strict = |config: &mut penstock_router::Config| config.strict_requests = true;
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), strict).await;
    for (path, body) in requests() {
        let status =
            if body.get("inputs").is_some() { StatusCode::UNPROCESSABLE_ENTITY } else { StatusCode::BAD_REQUEST };
        let answer = server.post(path, body).await;
        assert_eq!(answer.status, status, "{path}: {}", answer.body);
        assert!(answer.body.contains("tempreature`; did you mean `"), "{}", answer.body);
    }
    let chat = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
    assert_eq!(server.post("/v1/chat/completions", chat).await.status, StatusCode::OK);
}
