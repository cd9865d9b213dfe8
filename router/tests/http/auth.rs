//! API keys: protected routes, open routes, and the refusal in each dialect.

use axum::http::StatusCode;
use penstock_router::Config;
use penstock_router::config::ApiKeys;
use serde_json::json;

use crate::model::IM_END;
use crate::server::{Answer, Server, whole};

const PROTECTED: [&str; 6] =
    ["/", "/generate", "/generate_stream", "/tokenize", "/v1/chat/completions", "/v1/completions"];
const OPEN: [&str; 7] = ["/", "/health", "/ping", "/info", "/metrics", "/v1/models", "/v1/models/test/model"];

async fn locked() -> Server {
    let keys = |config: &mut Config| config.api_keys = ApiKeys::new(["one".to_owned(), "Two".to_owned()]);
    Server::start(|sequence| sequence.answer(&[IM_END]), keys).await
}

async fn ask(server: &Server, path: &str, authorization: Option<&str>) -> Answer {
    let mut request = server.request("POST", path).header("content-type", "application/json");
    if let Some(authorization) = authorization {
        request = request.header("authorization", authorization);
    }
    let body = json!({"inputs": "Hi", "prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}]});
    whole(server.send(request, &body.to_string()).await).await
}

#[tokio::test]
async fn protected_routes_need_a_key() {
    let server = locked().await;
    for path in PROTECTED {
        for authorization in [None, Some("Bearer three"), Some("Bearer ONE"), Some("one"), Some("Bearer one,Two")] {
            let answer = ask(&server, path, authorization).await;
            assert_eq!(answer.status, StatusCode::UNAUTHORIZED, "{path} with {authorization:?}");
            assert_eq!(answer.header("www-authenticate"), "Bearer");
        }
        for authorization in ["Bearer one", "bearer one", "Bearer Two"] {
            let answer = ask(&server, path, Some(authorization)).await;
            assert_eq!(answer.status, StatusCode::OK, "{path} with {authorization}: {}", answer.body);
        }
    }
    let admitted = server.engine.requests.lock().unwrap().len();
    assert_eq!(admitted, (PROTECTED.len() - 1) * 3, "only requests with a key reach the engine");
}

#[tokio::test]
async fn health_metrics_and_model_routes_need_no_key() {
    let server = locked().await;
    for path in OPEN {
        assert_eq!(server.get(path).await.status, StatusCode::OK, "{path}");
    }
    assert_eq!(server.get("/nowhere").await.status, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn without_configured_keys_any_key_is_accepted() {
    let server = Server::answering(&[IM_END]).await;
    assert_eq!(ask(&server, "/generate", Some("Bearer whatever")).await.status, StatusCode::OK);
}

#[tokio::test]
async fn a_refusal_has_the_dialect_of_its_route() {
    let server = locked().await;
    assert_eq!(ask(&server, "/generate", None).await.body, "");
    insta::assert_snapshot!(ask(&server, "/v1/completions", None).await.body, @r#"{"error":{"message":"no API key was given; send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}"#);
    insta::assert_snapshot!(ask(&server, "/v1/completions", Some("Bearer x")).await.body, @r#"{"error":{"message":"the given API key is not one of this server's","type":"invalid_request_error","param":null,"code":"invalid_api_key"}}"#);
}
