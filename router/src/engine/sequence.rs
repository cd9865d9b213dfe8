//! What a request asks of the engine, and what it gets back. Token ids only.

use std::sync::Arc;

/// One sequence to generate, already validated against the limits.
#[derive(Clone, Debug)]
pub struct SequenceRequest {
    /// Not empty.
    pub prompt_token_ids: Vec<u32>,
    /// At least 1.
    pub max_new_tokens: u32,
    /// The sequence ends after one of these: the model's end-of-sequence tokens, and the client's.
    pub stop_token_ids: Arc<[u32]>,
    pub sampling: Sampling,
}

/// How tokens are chosen; same meaning and neutral values as `Sampling` in proto/worker.proto.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    pub do_sample: bool,
    pub seed: u64,
    pub temperature: f32,
    pub top_k: u32,
    pub top_p: f32,
    pub repetition_penalty: f32,
}

impl Default for Sampling {
    /// Greedy, everything off.
    fn default() -> Self {
        Self { do_sample: false, seed: 0, temperature: 1.0, top_k: 0, top_p: 1.0, repetition_penalty: 1.0 }
    }
}

/// What a generation must match as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// The schema as JSON text.
    JsonSchema(String),
    Regex(String),
    /// Lark as llguidance reads it: `%json {…}`, `<special_token>` and the rest.
    Lark(String),
}

#[derive(Clone, Debug, PartialEq)]
pub enum SequenceEvent {
    /// The sequence left the queue: it is in a step for the first time.
    Started,
    Token(Token),
    /// Terminal.
    Finished(FinishReason),
    /// Terminal.
    Failed(SequenceFailure),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    pub id: u32,
    /// Natural logarithm.
    pub logprob: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    Length,
    /// One of `stop_token_ids`.
    StopToken,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SequenceFailure {
    /// The worker could not go on with this sequence.
    #[error("{0}")]
    Sequence(String),
    /// The workers are gone.
    #[error("the model workers stopped: {0}")]
    Worker(String),
    /// The server is shutting down and the grace period is over.
    #[error("the server is shutting down")]
    ShuttingDown,
}
