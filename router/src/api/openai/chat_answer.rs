//! `/v1/chat/completions`: the answer, whole and in chunks.

use serde::Serialize;
use utoipa::ToSchema;

use super::{ChatLogprobs, Envelope, FinishReason, Usage};

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatCompletion {
    #[serde(flatten)]
    pub(crate) envelope: Envelope,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: OutputMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<FinishReason>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutputMessage {
    pub(crate) role: &'static str,
    /// Null where there are only tool calls.
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    /// A call's deltas, added up, are the call.
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "whole_calls")]
    #[schema(value_type = Vec<ToolCall>)]
    pub(crate) tool_calls: Vec<ToolCallDelta>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ChatCompletionChunk)]
pub(crate) struct ChatChunk<'a> {
    #[serde(flatten)]
    pub(crate) envelope: &'a Envelope,
    /// Empty in the chunk that carries the usage.
    pub(crate) choices: Vec<ChatChunkChoice>,
    /// Always there, mostly null.
    pub(crate) usage: Option<Usage>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<FinishReason>,
}

/// What one chunk adds to the message.
#[derive(Debug, Default, PartialEq, Serialize, ToSchema)]
pub(crate) struct Delta {
    /// Only in the first chunk: clients that add deltas up would repeat it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    /// One at most: clients put those with a new index into their list as they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool_calls: Option<[ToolCallDelta; 1]>,
}

/// What one chunk adds to a tool call; all but the arguments in the call's first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct ToolCallDelta {
    pub(crate) index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(crate) kind: Option<&'static str>,
    pub(crate) function: FunctionDelta,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct FunctionDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) name: Option<String>,
    /// JSON, as a text.
    pub(crate) arguments: String,
}

/// A call in a whole message: it has no index.
#[derive(Serialize, ToSchema)]
struct ToolCall<'a> {
    id: Option<&'a str>,
    #[serde(rename = "type")]
    kind: Option<&'static str>,
    function: &'a FunctionDelta,
}

fn whole_calls<S: serde::Serializer>(calls: &[ToolCallDelta], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(calls.iter().map(|call| ToolCall {
        id: call.id.as_deref(),
        kind: call.kind,
        function: &call.function,
    }))
}
