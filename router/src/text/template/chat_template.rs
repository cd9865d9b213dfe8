//! The templates of one model, and which of them renders a conversation.

use std::io;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use super::error::TemplateError;
use super::input::ChatInputs;
use super::probe::TemplateTraits;
use super::process::{Renderer, Start};

/// The source texts of a model's templates.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::text) struct TemplateSources {
    pub(in crate::text) default: Option<String>,
    /// Replaces `default` in requests with tools.
    pub(in crate::text) tool_use: Option<String>,
}

impl TemplateSources {
    pub(in crate::text) fn only(source: String) -> Self {
        Self { default: Some(source), tool_use: None }
    }
}

/// A rendering that runs into its deadline must not block all others.
const MIN_CONCURRENT_RENDERINGS: usize = 2;

/// A model's templates. A broken template fails the chats that need it and nothing else.
pub(in crate::text) struct ChatTemplate {
    default: Result<Arc<Renderer>, TemplateError>,
    /// Replaces `default` in requests with tools.
    tool_use: Option<Result<Arc<Renderer>, TemplateError>>,
    /// One permit for each rendering that may run concurrently.
    permits: Arc<Semaphore>,
}

impl ChatTemplate {
    /// Compiles each template in a renderer process of its own. `special_tokens`: variables such as `bos_token`.
    /// `program`: the executable of the renderer processes. Fails only if a process cannot be started.
    pub(in crate::text) fn new(
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

    pub(in crate::text) async fn render(&self, inputs: ChatInputs) -> Result<String, TemplateError> {
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

    /// What the template for requests with or without tools writes; nothing if it is unusable.
    pub(in crate::text) fn traits(&self, with_tools: bool) -> TemplateTraits {
        self.choose(with_tools).map(|renderer| renderer.traits().clone()).unwrap_or_default()
    }

    fn choose(&self, with_tools: bool) -> Result<&Arc<Renderer>, TemplateError> {
        let template = self.tool_use.as_ref().filter(|_| with_tools).unwrap_or(&self.default);
        template.as_ref().map_err(TemplateError::clone)
    }
}
