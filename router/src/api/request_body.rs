//! The requests of all routes, with the fields that they may have.

use std::sync::LazyLock;

use serde::de::DeserializeOwned;

use super::adapter::{LoadAdapter, UnloadAdapter};
use super::anthropic::{CountTokensRequest, MessagesRequest};
use super::known_field::KnownFields;
use super::openai::{
    ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest, TokenizeChat, TokenizePrompt,
};
use super::rerank::DocumentsRequest;
use super::responses::ResponsesRequest;
use super::tei::{EmbedRequest, RerankRequest};
use super::tgi::GenerateRequest;
use super::vertex::VertexRequest;

/// A request that is the body of a route.
pub(crate) trait RequestBody: DeserializeOwned {
    /// The fields that it may have.
    fn known_fields() -> &'static KnownFields;
}

macro_rules! request_bodies {
    ($($body:ty),* $(,)?) => {
        $(impl RequestBody for $body {
            fn known_fields() -> &'static KnownFields {
                static FIELDS: LazyLock<KnownFields> = LazyLock::new(|| KnownFields::of::<$body>(&[]));
                &FIELDS
            }
        })*
    };
}

request_bodies!(
    ChatRequest,
    CountTokensRequest,
    DetokenizeRequest,
    DocumentsRequest,
    EmbeddingRequest,
    EmbedRequest,
    GenerateRequest,
    LoadAdapter,
    MessagesRequest,
    RerankRequest,
    ResponsesRequest,
    TokenizeChat,
    TokenizePrompt,
    UnloadAdapter,
);

impl RequestBody for CompletionRequest {
    fn known_fields() -> &'static KnownFields {
        static FIELDS: LazyLock<KnownFields> =
            LazyLock::new(|| KnownFields::of::<CompletionRequest>(&["prompt_token_ids"]));
        &FIELDS
    }
}

impl RequestBody for VertexRequest {
    fn known_fields() -> &'static KnownFields {
        static FIELDS: LazyLock<KnownFields> = LazyLock::new(|| {
            let instances = [GenerateRequest::known_fields(), ChatRequest::known_fields()].map(Clone::clone);
            KnownFields::of::<VertexRequest>(&[]).with_values("instances", instances)
        });
        &FIELDS
    }
}

#[cfg(test)]
#[path = "request_body_tests.rs"]
mod tests;
