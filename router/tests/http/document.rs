//! Compares the OpenAPI document with the server that it describes.

use std::collections::BTreeSet;
use std::fmt::Write;

use axum::http::{StatusCode, header};
use penstock_router::config::ApiKeys;
use serde_json::Value;

use crate::model::IM_END;
use crate::server::{Server, whole};

const DOCUMENT: &str = "/api-doc/openapi.json";

/// Path as a client requests it, method and operation.
fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let mut all = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            all.push((path.replace("{id}", "test%2Fmodel"), method.to_uppercase(), operation.clone()));
        }
    }
    all
}

fn statuses(operation: &Value) -> BTreeSet<&str> {
    operation["responses"].as_object().unwrap().keys().map(String::as_str).collect()
}

#[tokio::test]
async fn every_route_lists_its_statuses() {
    let server = Server::answering(&[IM_END]).await;
    let document = server.get(DOCUMENT).await.json();
    let mut lines = String::new();
    for (path, method, operation) in operations(&document) {
        let statuses: Vec<_> = statuses(&operation).into_iter().collect();
        writeln!(lines, "{method} {path}: {}", statuses.join(" ")).unwrap();
    }
    insta::assert_snapshot!(lines, @r"
    GET /: 200 431 500 503
    POST /: 200 400 401 408 413 415 422 424 429 431 500 503 504
    POST /generate: 200 400 401 408 413 415 422 424 429 431 500 503 504
    POST /generate_stream: 200 400 401 408 413 415 422 424 429 431 500 503 504
    POST /tokenize: 200 400 401 404 408 413 415 422 429 431 500 503
    POST /detokenize: 200 400 401 404 408 413 415 429 431 500 503
    POST /chat_tokenize: 200 400 401 404 408 413 415 422 429 431 500 503
    POST /v1/chat/completions: 200 400 401 404 408 413 415 429 431 500 503 504
    POST /v1/completions: 200 400 401 404 408 413 415 429 431 500 503 504
    POST /v1/chat/completions/render: 200 400 401 404 408 413 415 429 431 500 503 504
    POST /v1/completions/render: 200 400 401 404 408 413 415 429 431 500 503 504
    POST /v1/embeddings: 200 400 401 404 408 413 415 429 431 500 503 504
    POST /embed: 200 400 401 408 413 415 422 424 429 431 500 503 504
    POST /rerank: 200 400 401 408 413 415 422 424 429 431 500 503 504
    POST /v1/rerank: 200 400 401 404 408 413 415 429 431 500 503 504
    POST /v1/responses: 200 400 401 404 408 413 415 429 431 500 503 504
    POST /v1/responses/input_tokens: 200 400 401 404 408 413 415 429 431 500 503
    POST /v1/responses/compact: 200 400 401 404 408 413 415 429 431 500 503 504
    GET /v1/responses/test%2Fmodel: 200 400 401 404 431 500
    DELETE /v1/responses/test%2Fmodel: 200 400 401 404 431 500
    GET /v1/responses/test%2Fmodel/input_items: 200 400 401 404 431 500
    POST /v1/responses/test%2Fmodel/cancel: 400 401 404 408 413 415 431 500
    POST /v1/messages: 200 400 401 404 408 413 415 429 431 500 503 504
    POST /v1/messages/count_tokens: 200 400 401 404 408 413 415 429 431 500 503
    POST /v1/load_lora_adapter: 200 400 401 404 408 413 415 429 431 500 503
    POST /v1/unload_lora_adapter: 200 400 401 404 408 413 415 431 500
    GET /v1/models: 200 431 500
    GET /v1/models/test%2Fmodel: 200 404 431 500
    POST /invocations: 200 400 401 404 408 413 415 422 424 429 431 500 503 504
    POST /vertex: 200 400 401 404 408 413 415 422 431 500
    GET /info: 200 431 500
    GET /version: 200 431 500
    GET /health: 200 431 500 503
    GET /health/live: 200 431 500 503
    GET /health/ready: 200 431 500 503
    GET /ping: 200 431 500 503
    GET /metrics: 200 431 500
    ");
}

#[tokio::test]
async fn exactly_the_documented_methods_are_served() {
    let server = Server::answering(&[IM_END]).await;
    let document = server.get(DOCUMENT).await.json();
    let operations = operations(&document);
    for (path, ..) in &operations {
        for asked in ["GET", "POST", "PUT", "DELETE", "PATCH"] {
            let answer = whole(server.send(server.request(asked, path), "").await).await;
            let operation = operations.iter().find(|(other, method, _)| other == path && method == asked);
            match operation {
                Some((_, _, operation)) => {
                    let status = answer.status.as_u16().to_string();
                    assert!(statuses(operation).contains(status.as_str()), "{asked} {path}: {status}");
                    // No response is stored.
                    assert!(status != "404" || path.starts_with("/v1/responses/"), "{asked} {path}");
                }
                None => assert_eq!(answer.status, StatusCode::METHOD_NOT_ALLOWED, "{asked} {path}"),
            }
        }
    }
}

#[tokio::test]
async fn exactly_the_documented_routes_need_a_key() {
    let keys = |config: &mut penstock_router::Config| config.api_keys = ApiKeys::new(["secret".to_owned()]);
    let server = Server::start(|sequence| sequence.answer(&[IM_END]), keys).await;
    let document = server.get(DOCUMENT).await.json();
    for (path, method, operation) in operations(&document) {
        let answer = whole(server.send(server.request(&method, &path), "").await).await;
        let needs_key = answer.status == StatusCode::UNAUTHORIZED;
        assert_eq!(operation.get("security").is_some(), needs_key, "{method} {path}");
        assert_eq!(statuses(&operation).contains("401"), needs_key, "{method} {path}");
        if needs_key {
            let has_body = operation["responses"]["401"].get("content").is_some();
            assert_eq!(!answer.body.is_empty(), has_body, "{method} {path}");
        }
    }
}

#[tokio::test]
async fn references_resolve() {
    fn collect<'a>(value: &'a Value, references: &mut BTreeSet<&'a str>) {
        match value {
            Value::Object(fields) => {
                references.extend(fields.get("$ref").and_then(Value::as_str));
                fields.values().for_each(|value| collect(value, references));
            }
            Value::Array(items) => items.iter().for_each(|value| collect(value, references)),
            _ => {}
        }
    }
    let server = Server::answering(&[IM_END]).await;
    let document = server.get(DOCUMENT).await.json();
    let mut references = BTreeSet::new();
    collect(&document, &mut references);
    let schemas = document["components"]["schemas"].as_object().unwrap().keys();
    let schemas: Vec<_> = schemas.map(|name| format!("#/components/schemas/{name}")).collect();
    assert_eq!(references, schemas.iter().map(String::as_str).collect(), "left: used, right: described");
}

#[tokio::test]
async fn swagger_ui_shows_the_document() {
    let server = Server::answering(&[IM_END]).await;
    let redirect = server.get("/docs").await;
    assert_eq!((redirect.status, redirect.header("location")), (StatusCode::SEE_OTHER, "/docs/"));
    let page = server.get("/docs/").await;
    assert_eq!(page.status, StatusCode::OK);
    assert!(page.header(header::CONTENT_TYPE.as_str()).starts_with("text/html"), "{:?}", page.headers);
    assert!(page.body.contains("swagger-ui-bundle.js"), "{}", page.body);
    assert!(server.get("/docs/swagger-initializer.js").await.body.contains(DOCUMENT));
    assert_eq!(server.get("/docs/nothing").await.status, StatusCode::NOT_FOUND);
}
