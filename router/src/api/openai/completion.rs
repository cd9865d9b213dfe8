//! `/v1/completions`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::value::{OneOrMany, SamplingFields, StreamOptions, says_something};
use super::{Envelope, FinishReason, Usage};
use crate::api::parameter::{Parameters, ValidationError};
use crate::api::tgi::or_default;

#[derive(Debug, Deserialize)]
pub(crate) struct CompletionRequest {
    prompt: Prompts,
    #[serde(flatten)]
    sampling: SamplingFields,
    max_tokens: Option<u32>,
    stop: Option<OneOrMany>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) stream: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) stream_options: StreamOptions,
    suffix: Option<String>,
    best_of: Option<u32>,
    echo: Option<Value>,
    logprobs: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a string, a list of strings, a list of token ids, or a list of such lists")]
enum Prompts {
    Texts(OneOrMany),
    TokenIds(Vec<u32>),
    TokenIdLists(Vec<Vec<u32>>),
}

/// What to go on from.
#[derive(Debug)]
pub(crate) enum Prompt {
    Text(String),
    TokenIds(Vec<u32>),
}

impl CompletionRequest {
    pub(crate) fn has_suffix(&self) -> bool {
        self.suffix.is_some()
    }

    /// At least one.
    pub(crate) fn prompts(&mut self) -> Result<Vec<Prompt>, ValidationError> {
        let given = std::mem::replace(&mut self.prompt, Prompts::TokenIds(Vec::new()));
        let prompts: Vec<_> = match given {
            Prompts::Texts(texts) => texts.into_vec().into_iter().map(Prompt::Text).collect(),
            Prompts::TokenIds(ids) => vec![Prompt::TokenIds(ids)],
            Prompts::TokenIdLists(lists) => lists.into_iter().map(Prompt::TokenIds).collect(),
        };
        if prompts.is_empty() { Err(ValidationError::EmptyInput) } else { Ok(prompts) }
    }

    pub(crate) fn parameters(&mut self) -> Result<Parameters, ValidationError> {
        let mut parameters = self.sampling.parameters()?;
        parameters.max_new_tokens = self.max_tokens;
        parameters.stop = self.stop.take().map(OneOrMany::into_vec).unwrap_or_default();
        Ok(parameters)
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct Completion {
    #[serde(flatten)]
    pub(crate) envelope: Envelope,
    pub(crate) choices: Vec<CompletionChoice>,
    pub(crate) usage: Usage,
}

#[derive(Debug, Serialize)]
pub(crate) struct CompletionChoice {
    /// Of the prompt.
    pub(crate) index: usize,
    pub(crate) text: String,
    /// Always null: `logprobs` is refused.
    pub(crate) logprobs: Option<()>,
    pub(crate) finish_reason: Option<FinishReason>,
}

#[derive(Debug, Serialize)]
pub(crate) struct CompletionChunk<'a> {
    #[serde(flatten)]
    pub(crate) envelope: &'a Envelope,
    /// Empty in the chunk that carries the whole request's usage.
    pub(crate) choices: Vec<CompletionChoice>,
    /// COMPAT: as in TGI the last chunk of each prompt carries that prompt's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) usage: Option<Usage>,
}
