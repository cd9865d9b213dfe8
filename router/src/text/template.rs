//! Chat templates, rendered as `transformers.apply_chat_template` renders them. All of minijinja is in this folder.
//!
//! INVARIANT: rendering ends, whatever the template and the conversation are: by its fuel at the latest.

mod compiled;
mod content;
mod continuation;
mod filter;
mod method;
mod python_str;
mod source;
mod trial;

use serde_json::{Map, Value};

use compiled::Compiled;

/// Why a conversation could not be made into a prompt.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TemplateError {
    #[error("the model has no chat template; use a completion route, or a model that has one")]
    Missing,
    #[error("{0}")]
    Invalid(String),
    #[error("template too expensive: it takes more than {} operations for this conversation", compiled::MAX_OPERATIONS)]
    TooExpensive,
    #[error("the last message cannot be continued: the template does not write the assistant's text as it is")]
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

/// What a prompt is made of. Messages and tools are as OpenAI's clients send them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ChatInputs {
    pub(crate) messages: Vec<Value>,
    /// `None`: no tools are offered. Some templates tell that from an empty list.
    pub(crate) tools: Option<Vec<Value>>,
    pub(crate) documents: Option<Value>,
    /// Whether the prompt ends where the assistant's answer begins; `None`: yes, unless a message is continued.
    pub(crate) add_generation_prompt: Option<bool>,
    /// Whether the prompt ends within the last message. COMPAT: `None` for this and for `add_generation_prompt`:
    /// only if the assistant wrote it, as in TGI.
    pub(crate) continue_final_message: Option<bool>,
    /// Variables for the template (`chat_template_kwargs`). They go before special tokens, and before nothing else.
    pub(crate) kwargs: Map<String, Value>,
}

/// The sources of a model's templates, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct TemplateSources {
    pub(super) default: Option<String>,
    /// Goes before `default` where tools are offered.
    pub(super) tool_use: Option<String>,
}

impl TemplateSources {
    pub(super) fn only(source: String) -> Self {
        Self { default: Some(source), tool_use: None }
    }
}

/// A model's templates. A broken one fails the chats that need it, and nothing else.
pub(super) struct ChatTemplate {
    default: Result<Compiled, TemplateError>,
    tool_use: Option<Result<Compiled, TemplateError>>,
}

impl ChatTemplate {
    /// `special_tokens`: `bos_token` and so on, which templates may write.
    pub(super) fn new(sources: TemplateSources, special_tokens: &Map<String, Value>) -> Self {
        let compile = |source: String| Compiled::new(&source, special_tokens.clone(), jiff::Zoned::now);
        Self {
            default: sources.default.map_or(Err(TemplateError::Missing), compile),
            tool_use: sources.tool_use.map(compile),
        }
    }

    pub(super) fn render(&self, mut inputs: ChatInputs) -> Result<String, TemplateError> {
        let template = self.choose(inputs.tools.is_some())?;
        inputs.messages = inputs.messages.into_iter().map(|message| template.habits().adapt(message)).collect();
        template.render(inputs)
    }

    /// Whether the template shows offered tools to the model. If not, the caller has to write them into a message.
    pub(super) fn uses_tools(&self) -> bool {
        self.choose(true).is_ok_and(Compiled::uses_tools)
    }

    fn choose(&self, with_tools: bool) -> Result<&Compiled, TemplateError> {
        let template = self.tool_use.as_ref().filter(|_| with_tools).unwrap_or(&self.default);
        template.as_ref().map_err(TemplateError::clone)
    }
}

#[cfg(test)]
#[path = "template/tests.rs"]
mod tests;

#[cfg(test)]
#[path = "template/differential_tests.rs"]
mod differential_tests;
