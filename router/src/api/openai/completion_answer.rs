//! The answer of `/v1/completions`, plain and in chunks.

use serde::Serialize;
use utoipa::ToSchema;

use super::{CompletionLogprobs, Envelope, FinishReason, PromptLogprobs, Usage};
use crate::api::prediction::VerifiedDraft;

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Completion {
    #[serde(flatten)]
    pub(crate) envelope: Envelope,
    pub(crate) choices: Vec<CompletionChoice>,
    pub(crate) usage: Usage,
}

/// A choice, or the addition of one chunk to it.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct CompletionChoice {
    /// The position of the prompt times the choices per prompt, plus the position of the choice.
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<FinishReason>,
    /// Ids of the generated tokens. Only with `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) token_ids: Option<Vec<u32>>,
    /// Only with `return_drafts`; left out if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) drafts: Vec<VerifiedDraft>,
    /// Only with `return_token_ids`, in a stream in the choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_token_ids: Option<Vec<u32>>,
    /// Only with `prompt_logprobs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_logprobs: Option<PromptLogprobs>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CompletionChunk<'a> {
    #[serde(flatten)]
    pub(crate) envelope: &'a Envelope,
    /// Empty in the chunk with the request's usage.
    pub(crate) choices: Vec<CompletionChoice>,
    /// Only with `include_usage`: the request's usage in the last chunk, null in the others. With `continuous_usage_stats`,
    /// the usage so far in every chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub(crate) usage: Option<Option<Usage>>,
}
