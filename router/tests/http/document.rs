//! The OpenAPI document against the server that it describes.

use std::collections::BTreeSet;

use axum::http::StatusCode;
use penstock_router::config::ApiKeys;
use serde_json::{Value, json};

use crate::model::IM_END;
use crate::server::{Server, whole};

const DOCUMENT: &str = "/api-doc/openapi.json";

#[tokio::test]
async fn dump() {
    let server = Server::answering(&[IM_END]).await;
    std::fs::write("/tmp/openapi.json", server.get(DOCUMENT).await.body).unwrap();
}
