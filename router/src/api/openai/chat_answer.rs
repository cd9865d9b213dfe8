//! The answer of `/v1/chat/completions`, plain and in chunks.

use serde::Serialize;
use utoipa::ToSchema;

use super::{ChatLogprobs, Envelope, FinishReason, PromptLogprobs, Usage};
use crate::api::prediction::VerifiedDraft;

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatCompletion {
    #[serde(flatten)]
    pub(crate) envelope: Envelope,
    pub(crate) choices: Vec<ChatChoice>,
    pub(crate) usage: Usage,
    /// Only with `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
    /// Only with `prompt_logprobs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChoice {
    pub(crate) index: usize,
    pub(crate) message: OutputMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<FinishReason>,
    /// Ids of the generated tokens. Only with `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
    /// Only with `return_drafts`; left out if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) drafts: Vec<VerifiedDraft>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct OutputMessage {
    pub(crate) role: &'static str,
    /// Null if the answer consists of tool calls.
    pub(crate) content: Option<String>,
    /// Always null: a model's refusal is part of its content.
    pub(crate) refusal: Option<String>,
    /// Always empty.
    #[schema(value_type = Vec<Object>)]
    pub(crate) annotations: [(); 0],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    /// The same as `reasoning_content`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning: Option<String>,
    /// Each call is the sum of its deltas.
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "whole_calls")]
    #[schema(value_type = Vec<ToolCall>)]
    pub(crate) tool_calls: Vec<ToolCallDelta>,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ChatCompletionChunk)]
pub(crate) struct ChatChunk<'a> {
    #[serde(flatten)]
    pub(crate) envelope: &'a Envelope,
    /// Empty in the chunk with the usage.
    pub(crate) choices: Vec<ChatChunkChoice>,
    /// Null except in the chunk with the usage, or with `continuous_usage_stats`.
    pub(crate) usage: Option<Usage>,
    /// Only with `return_token_ids`, in the first chunk of each choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
}

/// What an answer says of its prompt.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChatPrompt {
    pub(crate) token_ids: Option<Vec<u32>>,
    pub(crate) logprobs: Option<PromptLogprobs>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: usize,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<FinishReason>,
    /// Ids of the tokens since the last chunk. Only with `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
    /// Drafts of the tokens since the last chunk. Only with `return_drafts`; left out if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) drafts: Vec<VerifiedDraft>,
    /// What the choice's first chunk says of the prompt, which the chunk writes outside of its choices.
    #[serde(skip)]
    pub(crate) prompt: Option<ChatPrompt>,
}

/// The addition of one chunk to the message.
#[derive(Debug, Default, PartialEq, Serialize, ToSchema)]
pub(crate) struct Delta {
    /// Only in the first chunk, because clients add up deltas.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning_content: Option<String>,
    /// The same as `reasoning_content`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reasoning: Option<String>,
    /// At most one: clients append a delta with a new index to their list unchanged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) tool_calls: Option<[ToolCallDelta; 1]>,
}

/// The addition of one chunk to a tool call. Only `arguments` follow in later chunks.
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
    /// JSON text.
    pub(crate) arguments: String,
}

/// A call in a plain answer, which has no index.
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
