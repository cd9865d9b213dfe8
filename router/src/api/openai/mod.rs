//! OpenAI's requests and answers. Optional fields accept `null`; fields of answers have TGI's order.

mod chat;
mod chat_answer;
mod completion;
mod completion_answer;
mod constraint;
mod embedding;
mod logprob;
mod message;
mod refused;
mod tokenize;
mod tool;
mod value;
mod vllm;

use serde::Serialize;
use utoipa::ToSchema;

use crate::api::prediction::PredictionTokens;
use crate::generation;
use crate::telemetry::RequestSummary;

pub(crate) use chat::{ChatRequest, MAX_TOP_LOGPROBS};
pub(crate) use chat_answer::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatPrompt, Delta, FunctionDelta, OutputMessage,
    ToolCallDelta,
};
pub(crate) use completion::CompletionRequest;
pub(crate) use completion_answer::{Completion, CompletionChoice, CompletionChunk};
pub(crate) use embedding::{EmbeddingList, EmbeddingRequest, EmbeddingUsage};
pub(crate) use tokenize::{DetokenizeRequest, Detokenized, Rendered, TokenizeChat, TokenizePrompt, Tokenized};
pub(crate) use value::StreamOptions;
pub(super) use value::{OneOrMany, SamplingFields};

pub(crate) use logprob::{
    ChatLogprobs, CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob, TopTokens,
};

/// Number of tokens in the prompt and the answer.
#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
pub(crate) struct Usage {
    prompt_tokens: usize,
    completion_tokens: usize,
    total_tokens: usize,
    prompt_tokens_details: PromptTokensDetails,
    completion_tokens_details: CompletionTokensDetails,
}

#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
struct PromptTokensDetails {
    /// Prompt tokens found in the prefix cache.
    cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, Default, Serialize, ToSchema)]
struct CompletionTokensDetails {
    /// Generated tokens that are reasoning.
    reasoning_tokens: usize,
    #[serde(flatten)]
    predictions: PredictionTokens,
}

impl Usage {
    pub(crate) fn new(summary: &RequestSummary, reasoning_tokens: usize) -> Self {
        Self {
            prompt_tokens: summary.num_prompt_tokens,
            completion_tokens: summary.num_generated_tokens,
            total_tokens: summary.num_prompt_tokens + summary.num_generated_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: summary.num_cached_tokens },
            completion_tokens_details: CompletionTokensDetails { reasoning_tokens, predictions: summary.drafts.into() },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = OpenAiFinishReason)]
pub(crate) enum FinishReason {
    Stop,
    Length,
    ToolCalls,
}

impl From<generation::FinishReason> for FinishReason {
    fn from(reason: generation::FinishReason) -> Self {
        match reason {
            generation::FinishReason::Length => Self::Length,
            generation::FinishReason::StopToken | generation::FinishReason::StopString(_) => Self::Stop,
        }
    }
}

/// The fields that every answer and every chunk of one request begins with.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct Envelope {
    pub(crate) object: &'static str,
    pub(crate) id: String,
    /// Unix time in seconds.
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) system_fingerprint: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ModelList {
    pub(crate) object: &'static str,
    pub(crate) data: Vec<Model>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Model {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    /// When the server started, as Unix time in seconds.
    pub(crate) created: u64,
    pub(crate) owned_by: String,
    /// The model's id, where `id` is another name of it.
    pub(crate) root: String,
    /// Name of the model that a LoRA adapter changes.
    pub(crate) parent: Option<String>,
    /// Most tokens of a prompt and its answer together.
    pub(crate) max_model_len: usize,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Version {
    pub(crate) version: &'static str,
}
