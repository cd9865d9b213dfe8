//! `/v1/completions`: the answer, whole and in chunks.

use serde::Serialize;
use utoipa::ToSchema;

use super::{CompletionLogprobs, Envelope, FinishReason, Usage};

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Completion {
    #[serde(flatten)]
    pub(crate) envelope: Envelope,
    pub(crate) choices: Vec<CompletionChoice>,
    pub(crate) usage: Usage,
}

/// A choice, or what a chunk adds to it.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct CompletionChoice {
    /// The prompt's, times the choices of each prompt, plus the choice's.
    pub(crate) index: usize,
    pub(crate) text: String,
    pub(crate) logprobs: Option<CompletionLogprobs>,
    pub(crate) finish_reason: Option<FinishReason>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CompletionChunk<'a> {
    #[serde(flatten)]
    pub(crate) envelope: &'a Envelope,
    /// Empty in the chunk that carries the whole request's usage.
    pub(crate) choices: Vec<CompletionChoice>,
    /// COMPAT: where no such chunk was asked for, the last chunk of each choice carries its own, as in TGI.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
}
