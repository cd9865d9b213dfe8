//! The vocabulary of one generation: what a request asks the engine for, and the events that it gets back. Token ids only.
//!
//! The engine, the worker client and everything above them use these types; this module uses none of them.

mod adapter;
mod grammar;
mod image;
mod pooling;
mod sampling;
mod timeline;

use std::sync::Arc;

pub use penstock_scheduler::{ContentSalt, FinishReason};

pub(crate) use adapter::ServerAdapters;
pub use adapter::{Adapter, AdapterError, AdapterHash};
pub use grammar::{Grammar, GrammarError, LimitedThoughts, ThoughtLimit};
pub(crate) use image::groups as image_groups;
pub use image::{EncodedImage, Image, ImageError, ImageInput, ImageSpan};
pub use pooling::{Matryoshka, Pooling, Task};
pub use sampling::{BadWord, LogitBias, Sampling, greedy};
pub use timeline::Timeline;
pub(crate) use timeline::{End, History, Interruption, InterruptionCause, PhaseSteps, StepShare};

/// One sequence to generate, already checked against the server's limits.
#[derive(Clone, Debug)]
pub struct SequenceRequest {
    /// Prompt token ids; not empty.
    pub prompt_token_ids: Vec<u32>,
    /// Tokens that another server has generated and sent before; fewer than `max_new_tokens`.
    pub generated_token_ids: Vec<u32>,
    /// The first `num_source_tokens` prompt tokens are the encoder's input; 0 for a decoder-only model, all of them for an
    /// encoder alone.
    pub num_source_tokens: u32,
    /// Most tokens to generate, `generated_token_ids` included; at least 1.
    pub max_new_tokens: u32,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// What the generation must match; compiled before (`Generator::compile_grammar`).
    pub grammar: Option<Grammar>,
    /// What the model is changed by; loaded before (`Generator::load_adapter`).
    pub adapter: Option<Adapter>,
    /// The same of an engine on another server, which loads it itself.
    pub adapter_hash: Option<AdapterHash>,
    /// Images among the prompt tokens, in the order of their offsets; encoded before (`Generator::encode_images`).
    pub images: Arc<[ImageSpan]>,
    /// The last prompt tokens that have token type 1; all others have type 0.
    pub num_second_text_tokens: u32,
    /// Whether the model must run over all prompt tokens, even cached ones, besides for prompt logprobs.
    pub needs_prompt_outputs: bool,
    /// Queued sequences with a higher priority start first; the default is 0.
    pub priority: i32,
    /// Sequences of one group have the same prompt and share its KV blocks, even without prefix caching.
    pub group: Option<u64>,
    /// Cached prefixes are shared only among sequences with the same salt.
    pub cache_salt: Option<u64>,
    /// The beginnings of images in the prompt. Prefixes are shared up to the first difference.
    pub content_salts: Arc<[ContentSalt]>,
    /// A record of what happens to the sequence; `None`: its request is not traced.
    pub timeline: Option<Timeline>,
}

/// What the worker is told of a sequence besides its tokens and blocks: the same in every residency.
#[derive(Clone, Debug)]
pub(crate) struct Constants {
    pub(crate) sampling: Sampling,
    pub(crate) grammar: Option<Grammar>,
    pub(crate) adapter: Option<Adapter>,
    pub(crate) adapter_hash: Option<AdapterHash>,
    pub(crate) images: Arc<[ImageSpan]>,
    pub(crate) num_second_text_tokens: u32,
    pub(crate) cache_salt: Option<u64>,
}

/// What happens to a sequence. Every stream ends in exactly one `Finished` or `Failed`.
#[derive(Clone, Debug, PartialEq)]
pub enum SequenceEvent {
    /// The sequence left the queue and is in a step for the first time.
    Started {
        /// Prompt tokens that were found in the prefix cache.
        num_cached_tokens: usize,
    },
    /// The next prompt tokens, from the second one on, when their logprobs were asked for. All come before any `Token`.
    PromptTokens(Vec<Token>),
    /// Draft tokens that the step of the next tokens verified. Steps without drafts send none.
    Drafts(DraftCount),
    /// The next generated token.
    Token(Token),
    /// The one result of a sequence that is pooled.
    Vector(Vec<f32>),
    /// Terminal: the sequence is complete.
    Finished(FinishReason),
    /// Terminal: the sequence cannot be completed.
    Failed(SequenceFailure),
}

/// Draft tokens of a sequence (`--speculate`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCount {
    /// Draft tokens that steps computed and compared with the tokens they sampled.
    pub num_verified: u32,
    /// Draft tokens that were right, and so became tokens.
    pub num_right: u32,
}

impl std::ops::AddAssign for DraftCount {
    fn add_assign(&mut self, other: Self) {
        self.num_verified += other.num_verified;
        self.num_right += other.num_right;
    }
}

/// A token and its logprobs.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Token id.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The most probable tokens at this position, best first.
    pub top: Vec<TopToken>,
}

/// An alternative to a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TopToken {
    /// Token id.
    pub id: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
}

/// Why a sequence failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SequenceFailure {
    /// The worker could not continue this sequence.
    #[error("{0}")]
    Sequence(String),
    /// The request itself makes it impossible to continue; the message is for the client.
    #[error("{0}")]
    Request(String),
    /// The workers stopped and are not restarted any more.
    #[error("the model workers stopped: {0}")]
    Worker(String),
    /// The server is shutting down and the grace period is over.
    #[error("the server is shutting down")]
    ShuttingDown,
}
