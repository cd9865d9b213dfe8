//! A request in the form that all dialects share.

use std::sync::Arc;

use super::chat::Chat;
use super::image::ImageSource;
use super::parameter::Parameters;
use super::text_stream::StopText;
use crate::telemetry::{Operation, RequestParameters};

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
    /// A text with images, and with the model's placeholder in the place of each.
    Illustrated(Arc<str>, Vec<ImageSource>),
    TokenIds(Vec<u32>),
    /// A conversation; the chat template writes the prompt, special tokens included.
    Chat(Box<Chat>),
}

impl GenerationRequest {
    /// What the request asks for, for its trace.
    pub(super) fn described(&self) -> RequestParameters {
        let is_chat = self.prompts.iter().any(|prompt| matches!(prompt, Prompt::Chat(_)));
        let operation = if is_chat { Operation::Chat } else { Operation::TextCompletion };
        self.parameters.described(operation, self.streams)
    }
}
