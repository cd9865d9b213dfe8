//! Chat templates, rendered as `transformers.apply_chat_template` renders them. All of minijinja is in this folder.
//!
//! INVARIANT: a rendering ends within a bounded time and in bounded memory, for any template and any conversation.

mod compiled;
mod content;
mod continuation;
mod filter;
mod method;
mod process;
mod python_str;
mod renderer;
mod source;
mod trial;

use std::io;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

pub use process::RENDERER_ARGUMENT;
use process::{Renderer, Start};
pub use renderer::run_chat_renderer;

/// Why a conversation could not be made into a prompt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub(crate) enum TemplateError {
    #[error("the model has no chat template; use a completion route, or a model that has one")]
    Missing,
    #[error("{0}")]
    Invalid(String),
    #[error("template too expensive: it takes more than {} operations for this conversation", compiled::MAX_OPERATIONS)]
    TooExpensive,
    #[error("template too slow: rendering takes more than {} seconds", process::RENDER_DEADLINE.as_secs())]
    TooSlow,
    #[error(
        "template too large: rendering takes more than {} MiB of memory, or recurses too deeply",
        process::MAX_MEMORY_BYTES >> 20
    )]
    TooLarge,
    #[error("template too large: it writes a prompt of more than {} MiB", process::MAX_PROMPT_BYTES >> 20)]
    TooLong,
    #[error("the process that renders chat templates failed: {0}")]
    Renderer(String),
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

/// What a prompt is made of. Messages and tools are as OpenAI's clients send them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
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

/// One rendering that runs into its deadline must not hold up all others.
const MIN_CONCURRENT_RENDERINGS: usize = 2;

/// A model's templates. A broken one fails the chats that need it and nothing else.
pub(super) struct ChatTemplate {
    default: Result<Arc<Renderer>, TemplateError>,
    /// Takes the place of `default` where tools are offered.
    tool_use: Option<Result<Arc<Renderer>, TemplateError>>,
    /// Renderings that may run at the same time.
    permits: Arc<Semaphore>,
}

impl ChatTemplate {
    /// Compiles the templates, each in a process of its own. `program`: what these processes run.
    /// `special_tokens`: `bos_token` and so on, which templates may write.
    pub(super) fn new(
        sources: TemplateSources,
        special_tokens: &Map<String, Value>,
        program: &Path,
        num_threads: usize,
    ) -> io::Result<Self> {
        let start = |source: String| {
            let renderer = Renderer::start(program, Start { source, special_tokens: special_tokens.clone() })?;
            Ok::<_, io::Error>(renderer.map(Arc::new))
        };
        Ok(Self {
            default: sources.default.map(start).transpose()?.unwrap_or(Err(TemplateError::Missing)),
            tool_use: sources.tool_use.map(start).transpose()?,
            permits: Arc::new(Semaphore::new(num_threads.max(MIN_CONCURRENT_RENDERINGS))),
        })
    }

    pub(super) async fn render(&self, inputs: ChatInputs) -> Result<String, TemplateError> {
        let renderer = Arc::clone(self.choose(inputs.tools.is_some())?);
        let failed = |error: &dyn std::error::Error| TemplateError::Renderer(error.to_string());
        // The permit moves into the thread: a client that disconnects does not free the process that is still rendering.
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(|error| failed(&error))?;
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            renderer.render(&inputs)
        });
        task.await.unwrap_or_else(|error| Err(failed(&error)))
    }

    /// Whether the template shows offered tools to the model. If not, the caller has to write them into a message.
    pub(super) fn uses_tools(&self) -> bool {
        self.choose(true).is_ok_and(|renderer| renderer.uses_tools())
    }

    fn choose(&self, with_tools: bool) -> Result<&Arc<Renderer>, TemplateError> {
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
