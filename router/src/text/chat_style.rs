//! How chats become prompts and answers are read: the model's own templates, or one that a request brings.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use super::answer::AnswerFormat;
use super::template::{ChatInputs, ChatTemplate, TemplateError, TemplateSources};

/// Templates of requests that are kept, the most recently used ones. Each keeps a few processes.
const MAX_KEPT: usize = 8;
/// Templates of requests that are tried out at a time.
const MAX_STARTING: usize = 2;
/// Processes that render one request's template at a time.
const NUM_RENDERERS: usize = 2;

/// Templates and the formats of answers to the prompts that they render.
pub(crate) struct ChatStyle {
    template: ChatTemplate,
    answer_format: AnswerFormat,
    /// Format of the answers to requests with tools, if the model has a separate template for them.
    tool_answer_format: Option<AnswerFormat>,
    /// The token that ends the assistant's turn, if no EOS token does; with either template.
    turn_end: Option<u32>,
    tool_turn_end: Option<u32>,
}

/// What styles are made with.
pub(super) struct StyleFactory {
    pub(super) special_tokens: Map<String, Value>,
    /// Ids of the tokens that the tokenizer adds to its vocabulary.
    pub(super) added_tokens: HashMap<String, u32>,
    /// The special ones of them.
    pub(super) control_tokens: HashMap<String, u32>,
    pub(super) eos_token_ids: Vec<u32>,
    /// The executable of the renderer processes.
    pub(super) program: PathBuf,
}

impl StyleFactory {
    /// Blocks while the templates are tried out. Fails only if a process cannot be started.
    pub(super) fn style(&self, sources: &TemplateSources, num_threads: usize) -> io::Result<ChatStyle> {
        let template = ChatTemplate::new(sources.clone(), &self.special_tokens, &self.program, num_threads)?;
        let added_token_id = |text: &str| self.added_tokens.get(text).copied();
        let format = |source: &str, with_tools| AnswerFormat::new(source, template.traits(with_tools), added_token_id);
        let turn_end =
            |with_tools| template.traits(with_tools).after_answer.turn_end(&self.control_tokens, &self.eos_token_ids);
        Ok(ChatStyle {
            turn_end: turn_end(false),
            tool_turn_end: turn_end(true),
            answer_format: format(sources.default.as_deref().unwrap_or_default(), false),
            tool_answer_format: sources.tool_use.as_deref().map(|source| format(source, true)),
            template,
        })
    }
}

impl ChatStyle {
    /// Renders a conversation into a prompt, in a process of its own with limits of time and memory.
    pub(crate) async fn render(&self, inputs: ChatInputs) -> Result<String, TemplateError> {
        self.template.render(inputs).await
    }

    /// The format of answers to requests with or without tools.
    pub(crate) fn answer_format(&self, with_tools: bool) -> &AnswerFormat {
        self.tool_answer_format.as_ref().filter(|_| with_tools).unwrap_or(&self.answer_format)
    }

    /// The token that ends answers to requests with or without tools, if no EOS token does.
    pub(crate) fn turn_end(&self, with_tools: bool) -> Option<u32> {
        if with_tools { self.tool_turn_end } else { self.turn_end }
    }
}

/// The styles of requests that bring a template.
pub(super) struct RequestStyles {
    factory: Arc<StyleFactory>,
    /// The most recently used one last.
    kept: Mutex<Vec<(String, Arc<ChatStyle>)>>,
    starting: Semaphore,
}

impl RequestStyles {
    pub(super) fn new(factory: StyleFactory) -> Self {
        Self { factory: Arc::new(factory), kept: Mutex::default(), starting: Semaphore::new(MAX_STARTING) }
    }

    /// The style of a template.
    pub(super) async fn of(&self, source: String) -> Result<Arc<ChatStyle>, TemplateError> {
        if let Some(style) = self.kept(&source) {
            return Ok(style);
        }
        let failed = |error: &dyn std::error::Error| TemplateError::Renderer(error.to_string());
        let _permit = self.starting.acquire().await.map_err(|error| failed(&error))?;
        if let Some(style) = self.kept(&source) {
            return Ok(style);
        }
        let factory = Arc::clone(&self.factory);
        let sources = TemplateSources::only(source.clone());
        let style = tokio::task::spawn_blocking(move || factory.style(&sources, NUM_RENDERERS)).await;
        let style = style.map_err(|error| failed(&error))?.map_err(|error| failed(&error))?;
        let style = Arc::new(style);
        let mut kept = self.lock();
        kept.push((source, Arc::clone(&style)));
        if kept.len() > MAX_KEPT {
            kept.remove(0);
        }
        Ok(style)
    }

    fn kept(&self, source: &str) -> Option<Arc<ChatStyle>> {
        let mut kept = self.lock();
        let index = kept.iter().position(|(known, _)| known == source)?;
        kept[index..].rotate_left(1);
        kept.last().map(|(_, style)| Arc::clone(style))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(String, Arc<ChatStyle>)>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
