//! How a sequence's tokens are chosen.

use std::sync::Arc;

/// How tokens are chosen; same meaning and neutral values as `Sampling` in proto/worker.proto.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    pub do_sample: bool,
    pub seed: u64,
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub typical_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    /// Each token once, and what is added to its logit.
    pub logit_bias: Vec<(u32, f32)>,
    /// The sequence ends after one of these: the model's end-of-sequence tokens, and the client's.
    pub stop_token_ids: Arc<[u32]>,
    /// None of `stop_token_ids` is sampled before so many tokens were.
    pub min_new_tokens: u32,
    pub watermark: bool,
    /// Alternatives with every token.
    pub top_n: u32,
    /// Logprobs of the prompt's tokens are wanted too.
    pub prompt_logprobs: bool,
    pub logprob_source: LogprobSource,
    /// Compiled before (`Generator::compile_grammar`).
    pub grammar: Option<Grammar>,
}

/// Of which distribution logprobs tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogprobSource {
    /// What was sampled from: after penalties, masks, temperature and truncation (TGI).
    Processed,
    /// The model's own (OpenAI).
    Model,
}

impl Default for Sampling {
    /// Greedy, everything off.
    fn default() -> Self {
        Self {
            do_sample: false,
            seed: 0,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            typical_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            logit_bias: Vec::new(),
            stop_token_ids: Arc::new([]),
            min_new_tokens: 0,
            watermark: false,
            top_n: 0,
            prompt_logprobs: false,
            logprob_source: LogprobSource::Processed,
            grammar: None,
        }
    }
}

/// What a generation must match as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// The schema as JSON text.
    JsonSchema(String),
    /// A regular expression.
    Regex(String),
    /// Lark as llguidance reads it: `%json {…}`, `<special_token>` and the rest.
    Lark(String),
}

/// Why a grammar cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The grammar is at fault; the message is for the client.
    #[error("{0}")]
    Invalid(String),
    /// The workers stopped, or do not answer.
    #[error("the model workers stopped: {0}")]
    Worker(String),
}
