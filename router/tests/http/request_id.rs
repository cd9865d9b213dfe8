//! Every response carries the id of its request.

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::config::ApiKeys;
use serde_json::json;

use crate::model::IM_END;
use crate::server::{Answer, Server, whole};

async fn with_id(server: &Server, method: &str, path: &str, id: &str) -> Answer {
    let request = server.request(method, path).header("x-request-id", id).header("content-type", "application/json");
    let body = if method == "POST" { json!({"inputs": "Hi"}).to_string() } else { String::new() };
    whole(server.send(request, &body).await).await
}

#[tokio::test]
async fn every_response_has_the_request_s_id() {
    let server = Server::answering(&[IM_END]).await;
    for (method, path, status) in [
        ("GET", "/health", StatusCode::OK),
        ("POST", "/generate", StatusCode::OK),
        ("POST", "/generate_stream", StatusCode::OK),
        ("GET", "/nowhere", StatusCode::NOT_FOUND),
        ("GET", "/v1/nowhere", StatusCode::NOT_FOUND),
        ("GET", "/generate", StatusCode::METHOD_NOT_ALLOWED),
        ("POST", "/v1/completions", StatusCode::BAD_REQUEST),
        ("OPTIONS", "/generate", StatusCode::OK),
    ] {
        let answer = with_id(&server, method, path, "mine-1").await;
        assert_eq!(answer.status, status, "{method} {path}");
        assert_eq!(answer.header("x-request-id"), "mine-1", "{method} {path}");
    }
    let keys = |config: &mut Config| config.api_keys = ApiKeys::new(["key".to_owned()]);
    let server = Server::start(|_| panic!("unlucky"), keys).await;
    let answer = with_id(&server, "POST", "/generate", "mine-2").await;
    assert_eq!((answer.status, answer.header("x-request-id")), (StatusCode::UNAUTHORIZED, "mine-2"));
    let request = server.request("POST", "/generate").header("authorization", "Bearer key");
    let request = request.header("content-type", "application/json").header("x-request-id", "mine-3");
    let answer = whole(server.send(request, r#"{"inputs": "Hi"}"#).await).await;
    assert_eq!((answer.status, answer.header("x-request-id")), (StatusCode::INTERNAL_SERVER_ERROR, "mine-3"));
}

#[tokio::test]
async fn an_id_that_cannot_be_logged_is_replaced() {
    let server = Server::answering(&[IM_END]).await;
    let longest = "x".repeat(128);
    assert_eq!(with_id(&server, "GET", "/health", &longest).await.header("x-request-id"), longest);
    let mut made = Vec::new();
    for id in ["", "a b", &"x".repeat(129)] {
        let answer = with_id(&server, "GET", "/health", id).await;
        let id = answer.header("x-request-id").to_owned();
        assert!(id.len() == 32 && id.bytes().all(|byte| byte.is_ascii_hexdigit()), "{id}");
        made.push(id);
    }
    made.push(server.get("/health").await.header("x-request-id").to_owned());
    made.sort_unstable();
    made.dedup();
    assert_eq!(made.len(), 4, "every request has an id of its own");
}
