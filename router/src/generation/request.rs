//! A request in the form that all dialects share.

use std::sync::Arc;

use super::chat::Chat;
use super::parameter::Parameters;
use super::text_stream::StopText;

/// What to generate.
#[derive(Debug)]
pub(crate) struct GenerationRequest {
    /// At least one. Each is generated from `n` (or `best_of`) times.
    pub(crate) prompts: Vec<Prompt>,
    /// The same for all prompts; not checked yet.
    pub(crate) parameters: Parameters,
    pub(crate) stop_text: StopText,
    /// The answer is a stream. Where the server has a queue timeout, `start` then returns only after all generations
    /// have left the queue: a stream cannot change its status after its first byte.
    pub(crate) streams: bool,
}

/// What a generation continues from.
#[derive(Debug)]
pub(crate) enum Prompt {
    /// Plain text; the tokenizer adds its special tokens.
    Text(Arc<str>),
    TokenIds(Vec<u32>),
    /// A conversation; the chat template writes the prompt, special tokens included.
    Chat(Box<Chat>),
}
