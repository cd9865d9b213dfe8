use std::collections::BTreeSet;

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::api::anthropic::{CountTokensRequest, MessagesRequest};
use crate::api::grammar::GrammarField;
use crate::api::openai::{ChatRequest, CompletionRequest, EmbeddingRequest};
use crate::api::rerank::DocumentsRequest;
use crate::api::responses::ResponsesRequest;
use crate::api::tei::{EmbedRequest, RerankRequest};
use crate::api::tgi::GenerateRequest;
use crate::api::vertex::VertexRequest;

fn document() -> Value {
    serde_json::to_value(crate::http::routes(false).1).unwrap()
}

fn schema<'a>(document: &'a Value, name: &str) -> &'a Value {
    let schema = &document["components"]["schemas"][name];
    assert!(schema.is_object(), "{name}");
    schema
}

/// The schema's fields, including those of schemas that it references.
fn fields<'a>(document: &'a Value, schema: &'a Value) -> BTreeSet<&'a str> {
    let own = schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name.as_str());
    let parts = schema["allOf"].as_array().into_iter().flatten();
    let of_parts = parts.flat_map(|part| match part["$ref"].as_str() {
        Some(reference) => fields(document, document.pointer(&reference[1..]).unwrap()),
        None => fields(document, part),
    });
    own.chain(of_parts).collect()
}

/// The names in the first column of the tables under a heading.
fn names_under<'a>(page: &'a str, heading: &str) -> BTreeSet<&'a str> {
    let (_, rest) = page.split_once(&format!("\n## {heading}\n")).unwrap_or_else(|| panic!("no heading {heading}"));
    let section = rest.split("\n## ").next().unwrap_or_default();
    let first_cells = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    first_cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect()
}

#[test]
fn the_compatibility_pages_list_exactly_the_requests_fields() {
    let document = document();
    let tgi = include_str!("../../../../docs/tgi-compatibility.md");
    let openai = include_str!("../../../../docs/openai-compatibility.md");
    let responses = include_str!("../../../../docs/responses-compatibility.md");
    let anthropic = include_str!("../../../../docs/anthropic-compatibility.md");
    let embeddings = include_str!("../../../../docs/embeddings.md");
    for (page, headings, request) in [
        (tgi, &["Parameters"][..], "GenerateParameters"),
        (openai, &["Both routes", "Chat"], "ChatRequest"),
        (openai, &["Both routes", "Completions"], "CompletionRequest"),
        (responses, &["Request"], "ResponsesRequest"),
        (anthropic, &["Conversation"], "AnthropicConversation"),
        (anthropic, &["Conversation", "Messages"], "AnthropicMessagesRequest"),
        (embeddings, &["`/v1/embeddings`"], "EmbeddingRequest"),
        (embeddings, &["`/embed`"], "EmbedRequest"),
        (embeddings, &["`/rerank`"], "RerankRequest"),
        (embeddings, &["`/v1/rerank`"], "DocumentsRequest"),
    ] {
        let named: BTreeSet<_> = headings.iter().flat_map(|heading| names_under(page, heading)).collect();
        assert_eq!(named, fields(&document, schema(&document, request)), "left: {headings:?}, right: {request}");
    }
}

#[test]
fn examples_are_valid_requests() {
    fn check<T: DeserializeOwned>(document: &Value, name: &str) {
        let schema = schema(document, name);
        let several = schema["examples"].as_array().into_iter().flatten();
        let examples: Vec<_> = schema.get("example").into_iter().chain(several).collect();
        assert!(!examples.is_empty(), "{name}");
        for example in examples {
            if let Err(error) = T::deserialize(example) {
                panic!("{name}: {error}: {example}");
            }
        }
    }
    let document = document();
    check::<GenerateRequest>(&document, "GenerateRequest");
    check::<ChatRequest>(&document, "ChatRequest");
    check::<CompletionRequest>(&document, "CompletionRequest");
    check::<ResponsesRequest>(&document, "ResponsesRequest");
    check::<MessagesRequest>(&document, "AnthropicMessagesRequest");
    check::<CountTokensRequest>(&document, "AnthropicCountTokensRequest");
    check::<VertexRequest>(&document, "VertexRequest");
    check::<GrammarField>(&document, "Grammar");
    check::<EmbeddingRequest>(&document, "EmbeddingRequest");
    check::<EmbedRequest>(&document, "EmbedRequest");
    check::<RerankRequest>(&document, "RerankRequest");
    check::<DocumentsRequest>(&document, "DocumentsRequest");
}

/// `ExtensionFields` is part of every generating request.
#[test]
fn every_request_has_the_extension_fields() {
    let document = document();
    let extension = fields(&document, schema(&document, "ExtensionFields"));
    assert!(extension.contains("min_p"));
    for request in ["GenerateParameters", "ChatRequest", "CompletionRequest"] {
        assert!(extension.is_subset(&fields(&document, schema(&document, request))), "{request}");
    }
}
