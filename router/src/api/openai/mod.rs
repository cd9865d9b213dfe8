//! OpenAI's requests and answers. Optional fields tolerate `null`; the order of an answer's fields is TGI's.

mod chat;
mod completion;
mod value;

use serde::Serialize;

use crate::text::Ending;

pub(crate) use chat::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatLogprobs, ChatRequest, Delta, OutputMessage,
};
pub(crate) use completion::{Completion, CompletionChoice, CompletionChunk, CompletionRequest, Prompt};

/// Tokens read and written.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Usage {
    pub(crate) prompt_tokens: usize,
    pub(crate) completion_tokens: usize,
    pub(crate) total_tokens: usize,
}

impl Usage {
    pub(crate) fn new(prompt_tokens: usize, completion_tokens: usize) -> Self {
        Self { prompt_tokens, completion_tokens, total_tokens: prompt_tokens + completion_tokens }
    }
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    Stop,
    Length,
}

impl From<Ending> for FinishReason {
    fn from(ending: Ending) -> Self {
        match ending {
            Ending::Length => Self::Length,
            Ending::EosToken | Ending::StopString => Self::Stop,
        }
    }
}

/// What every answer and every chunk of one request says first.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Envelope {
    pub(crate) object: &'static str,
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: &'static str,
}

#[derive(Debug, Serialize)]
pub(crate) struct ModelList {
    pub(crate) object: &'static str,
    pub(crate) data: Vec<Model>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Model {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    pub(crate) created: u64,
    pub(crate) owned_by: String,
}
