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

/// Bodies with the fields that their schemas do not have.
macro_rules! request_bodies {
    ($($body:ty $(=> $further:ident)?),* $(,)?) => {
        $(impl RequestBody for $body {
            fn known_fields() -> &'static KnownFields {
                static FIELDS: LazyLock<KnownFields> = LazyLock::new(|| {
                    let fields = KnownFields::of::<$body>();
                    $(let fields = $further(fields);)?
                    fields
                });
                &FIELDS
            }
        })*
    };
}

request_bodies!(
    ChatRequest => of_chat,
    CompletionRequest => of_completion,
    CountTokensRequest => of_messages,
    DetokenizeRequest,
    DocumentsRequest,
    EmbeddingRequest,
    EmbedRequest,
    GenerateRequest,
    LoadAdapter,
    MessagesRequest => of_messages,
    RerankRequest,
    ResponsesRequest => of_responses,
    TokenizeChat => of_chat,
    TokenizePrompt,
    UnloadAdapter,
    VertexRequest => of_vertex,
);

/// Messages and tools may have further fields, which the template sees. `cache_control` has no effect: every prompt is cached.
fn of_chat(fields: KnownFields) -> KnownFields {
    let of_template = [
        "name",
        "tool_calls",
        "tool_call_id",
        "tool_name",
        "function_call",
        "reasoning",
        "reasoning_content",
        "refusal",
        "audio",
        "annotations",
    ];
    fields
        .with("messages", &of_template)
        .with("messages.content", &["cache_control", "prompt_cache_breakpoint"])
        .open("tools")
        .open("tools.function")
        .with("tools.function", &["description", "arguments", "strict"])
        .with("tool_choice", &["type"])
        .with("tool_choice.allowed_tools.tools", &["type"])
}

fn of_completion(fields: KnownFields) -> KnownFields {
    fields.with("", &["prompt_token_ids"])
}

/// Blocks and tools have fields without effect. Blocks that are read as a whole, and tools that Anthropic describes, may have any
/// field.
fn of_messages(fields: KnownFields) -> KnownFields {
    let read_whole = [
        "server_tool_use",
        "mcp_tool_use",
        "web_search_tool_result",
        "web_fetch_tool_result",
        "code_execution_tool_result",
        "bash_code_execution_tool_result",
        "text_editor_code_execution_tool_result",
        "tool_search_tool_result",
        "advisor_tool_result",
        "mcp_tool_result",
        "redacted_thinking",
        "compaction",
        "fallback",
    ];
    let of_block = ["cache_control", "caller", "citations", "is_error", "signature", "toolset_name"];
    let of_tool =
        ["allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples", "strict"];
    fields
        .except_types("messages.content", &read_whole)
        .with("messages.content", &of_block)
        .with("messages.content.content", &of_block)
        .with("messages.content.source", &["media_type"])
        .with("system", &of_block)
        .with("tools", &of_tool)
        .only_types("tools", &["custom"])
}

/// Items, their parts and tools have fields without effect. Tools that this server does not execute, and items that tell what such
/// tools did, may have any field.
fn of_responses(fields: KnownFields) -> KnownFields {
    let of_item = ["async", "caller", "created_by", "phase", "status"];
    let of_part = ["annotations", "file_id", "logprobs", "prompt_cache_breakpoint"];
    let of_tool = ["allowed_callers", "async", "defer_loading", "output_schema", "strict"];
    let callable = ["function", "custom", "namespace"];
    let described = [
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "item_reference",
        "compaction",
    ];
    fields
        .with("input", &of_item)
        .with("input.content", &of_part)
        .with("input.summary", &of_part)
        .with("input.output", &of_part)
        .only_types("input", &described)
        .with("tools", &of_tool)
        .with("tools.tools", &of_tool)
        .only_types("tools", &callable)
        .with("tool_choice.tools", &["type"])
        .only("stream_options", &["include_obfuscation"])
}

fn of_vertex(fields: KnownFields) -> KnownFields {
    fields.with_items("instances", [GenerateRequest::known_fields(), ChatRequest::known_fields()].map(Clone::clone))
}

#[cfg(test)]
#[path = "request_body_tests.rs"]
mod tests;
