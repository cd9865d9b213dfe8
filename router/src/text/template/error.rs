//! Why a conversation cannot be rendered.

use serde::{Deserialize, Serialize};

use super::limit;

/// Why a conversation could not be made into a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub(crate) enum TemplateError {
    #[error("the model has no chat template; use a completion route, or a model that has one")]
    Missing,
    /// The template is malformed, failed, or refused the conversation with `raise_exception`.
    #[error("{0}")]
    Invalid(String),
    #[error("template too expensive: this conversation takes more than {} operations", limit::MAX_OPERATIONS)]
    TooExpensive,
    #[error("template too slow: rendering takes more than {} seconds", limit::RENDER_DEADLINE.as_secs())]
    TooSlow,
    #[error(
        "template too large: rendering takes more than {} MiB of memory, or recurses too deeply",
        limit::MAX_MEMORY_BYTES >> 20
    )]
    TooLarge,
    #[error("template too large: it writes a prompt of more than {} MiB", limit::MAX_PROMPT_BYTES >> 20)]
    TooLong,
    #[error("the process that renders chat templates failed: {0}")]
    Renderer(String),
    /// The template drops messages of a role. The text names it, and those that it writes.
    #[error("the model's chat template writes no messages of the role {0}")]
    Role(String),
    /// The rendered prompt does not contain the text of the last message.
    #[error("the last message cannot be continued: the template does not write the assistant's text unchanged")]
    NotContinuable,
    #[error("the last message cannot be continued: it has no text")]
    NothingToContinue,
    #[error("continue_final_message and add_generation_prompt cannot both be true")]
    TwoEndings,
    #[error("documents must be a list of objects with \"title\" and \"text\"")]
    Documents,
    #[error("chat_template_kwargs must not hold \"{0}\"; send it as a field of the request")]
    ReservedKwarg(String),
}

impl From<minijinja::Error> for TemplateError {
    fn from(error: minijinja::Error) -> Self {
        match error.kind() {
            minijinja::ErrorKind::OutOfFuel => Self::TooExpensive,
            _ => Self::Invalid(error.to_string()),
        }
    }
}
