//! A prompt before the queue: rendered, encoded and checked, its queue space reserved and its grammar compiled, in the order of TGI's checks.

use std::sync::Arc;

use super::admission::QueueReservation;
use super::chat::{Chat, ChatAnswer};
use super::context::Context;
use super::deadline::Deadlines;
use super::error::GenerationError;
use super::image::{self, GivenImage};
use super::parameter::{Checked, ReasoningBudget};
use super::request::Prompt;
use super::running::StartedPrompt;
use super::validation::ValidationError;
use crate::sequence::{ImageSpan, ThoughtLimit};
use crate::telemetry::{RequestRecord, Warnings};
use crate::text::{AnswerParser, ThoughtMarkers};

/// A checked and encoded prompt, with queue space reserved for each of its generations.
pub(super) struct Prepared {
    pub(super) prompt: StartedPrompt,
    pub(super) images: Arc<[ImageSpan]>,
    pub(super) max_new_tokens: u32,
    pub(super) checked: Checked,
    pub(super) shown_token_ids: Arc<[u32]>,
    /// One for each generation; empty unless the prompt is a chat.
    pub(super) parsers: Vec<AnswerParser>,
    /// One for each generation.
    pub(super) reservations: Vec<QueueReservation>,
}

/// Prepares the prompts of one request.
pub(super) struct Preparation<'a> {
    pub(super) context: &'a Context,
    pub(super) deadlines: Deadlines,
    pub(super) record: &'a RequestRecord,
}

/// A prompt before it is encoded; not empty.
struct Unencoded {
    content: Content,
    images: Vec<GivenImage>,
    /// `None` unless the prompt is a chat.
    answer: Option<ChatAnswer>,
}

enum Content {
    Text {
        text: Arc<str>,
        /// The text has the special tokens of its frame around images already.
        is_framed: bool,
    },
    TokenIds(Vec<u32>),
}

impl Preparation<'_> {
    pub(super) async fn prepare(&self, prompt: Prompt, mut checked: Checked) -> Result<Prepared, GenerationError> {
        let Context { config, text: model, admission, .. } = self.context;
        let Unencoded { content, images, answer } = self.read(prompt, &mut checked).await?;
        checked.check_truncate(&config.limits)?;
        let (text, token_ids) = self.encode(content, answer.is_some(), &checked).await?;
        let (mut token_ids, images) = self.context.place_images(token_ids, images, &checked, self.deadlines).await?;
        if text.is_some() {
            self.context.check_tokens_of_text(&token_ids)?;
        }
        let max_new_tokens = checked.fit(&mut token_ids, &config.limits)?;
        checked.check_token_ids(model.vocabulary_size())?;
        let bad_words = model.encode_bad_words(&checked.bad_words);
        let bad_words = self.in_time(async { Ok(bad_words.await?) }).await?;
        if checked.grammar.is_some() && !config.grammar_support {
            return Err(ValidationError::GrammarDisabled.into());
        }
        if let Some(answer) = &answer
            && let Some(limit) = self.in_time(self.thought_limit(&checked, answer)).await?
        {
            checked.limit_thoughts(limit);
        }
        checked.restrict(bad_words);
        let num_tokens = token_ids.len() as u64 + u64::from(max_new_tokens);
        let reservations = admission.reserve(checked.num_generations, num_tokens)?;
        self.compile_grammar(&checked, answer.as_ref()).await?;
        let parsers = answer.iter().flat_map(|answer| (0..checked.num_generations).map(|_| answer.parser())).collect();
        let shown_token_ids = answer.as_ref().map(ChatAnswer::shown_token_ids).unwrap_or_default();
        let tool_call_ids = answer.as_ref().and_then(ChatAnswer::tool_call_ids);
        let prompt = StartedPrompt { text, token_ids, tool_call_ids };
        Ok(Prepared { prompt, images, max_new_tokens, checked, shown_token_ids, parsers, reservations })
    }

    /// Reads the images of a prompt and renders a chat, whose tools may constrain the answer.
    async fn read(&self, prompt: Prompt, checked: &mut Checked) -> Result<Unencoded, GenerationError> {
        let unencoded = match prompt {
            Prompt::Text(text) => {
                Unencoded { content: Content::Text { text, is_framed: false }, images: Vec::new(), answer: None }
            }
            Prompt::Illustrated(text, sources) => {
                let images = self.context.read_images(&sources)?;
                let framed = self.context.image_input().and_then(|input| image::framed(&text, input));
                let is_framed = framed.is_some();
                let content = Content::Text { text: framed.unwrap_or(text), is_framed };
                Unencoded { content, images, answer: None }
            }
            Prompt::TokenIds(ids) => Unencoded { content: Content::TokenIds(ids), images: Vec::new(), answer: None },
            Prompt::Chat(chat) => self.render(*chat, checked).await?,
        };
        let is_empty = match &unencoded.content {
            Content::Text { text, .. } => text.is_empty(),
            Content::TokenIds(ids) => ids.is_empty(),
        };
        if is_empty { Err(ValidationError::EmptyInput.into()) } else { Ok(unencoded) }
    }

    async fn render(&self, chat: Chat, checked: &mut Checked) -> Result<Unencoded, GenerationError> {
        let Context { config, text: model, .. } = self.context;
        let image_input = self.context.image_input();
        let images = self.context.read_images(&chat.images)?;
        let chat = self.in_time(chat.render(model, image_input)).await?;
        let mut text = Arc::clone(&chat.prompt);
        if let Some(input) = image_input.filter(|_| !images.is_empty()) {
            text = image::place_in_template(text, input);
        }
        let answer = ChatAnswer::new(chat);
        self.record.warn(answer.constrain(checked, config.grammar_support)?.into_iter().collect());
        Ok(Unencoded { content: Content::Text { text, is_framed: false }, images, answer: Some(answer) })
    }

    /// Returns the text, if the prompt is one, and the tokens.
    async fn encode(
        &self,
        content: Content,
        is_chat: bool,
        checked: &Checked,
    ) -> Result<(Option<Arc<str>>, Vec<u32>), GenerationError> {
        let model = &self.context.text;
        match content {
            Content::Text { text, is_framed } => {
                let adds_special_tokens = !is_framed && checked.add_special_tokens.unwrap_or(!is_chat);
                let encode = model.encode(Arc::clone(&text), adds_special_tokens);
                let token_ids = self.in_time(async { Ok(encode.await?) }).await?;
                Ok((Some(text), token_ids))
            }
            Content::TokenIds(ids) => {
                let vocabulary = model.vocabulary_size();
                match ids.iter().find(|&&id| id >= vocabulary) {
                    Some(&given) => Err(ValidationError::TokenId { field: "prompt", vocabulary, given }.into()),
                    None => Ok((None, ids)),
                }
            }
        }
    }

    /// The limit of the thoughts of an answer, if it has any. A budget without effect is a warning.
    async fn thought_limit(
        &self,
        checked: &Checked,
        answer: &ChatAnswer,
    ) -> Result<Option<ThoughtLimit>, GenerationError> {
        let given = checked.reasoning_budget;
        if let Some(ReasoningBudget { field, .. }) = given.filter(|_| !answer.has_thoughts()) {
            let mut warnings = Warnings::default();
            warnings.push(format!("`{field}` has no effect: the model's chat template has no markers of thoughts"));
            self.record.warn(warnings);
        }
        let max_tokens = given.map(|budget| budget.max_tokens).or(self.context.config.reasoning_budget);
        let (Some(max_tokens), Some(markers)) = (max_tokens, answer.thought_markers()) else { return Ok(None) };
        let ThoughtMarkers { open, close, end, reopens } = markers;
        let end_ids = self.context.text.encode(end.into(), false).await?;
        Ok(Some(ThoughtLimit { max_tokens, open, close: close.to_owned(), end_ids, reopens }))
    }

    async fn compile_grammar(&self, checked: &Checked, answer: Option<&ChatAnswer>) -> Result<(), GenerationError> {
        let Some(grammar) = &checked.grammar else { return Ok(()) };
        let compiled = self.context.generator.compile_grammar(grammar);
        let compiled = self.in_time(async { Ok(compiled.await?) }).await;
        compiled.map_err(|error| match answer {
            Some(answer) => answer.grammar_error(error, grammar),
            None => error,
        })
    }

    async fn in_time<T>(&self, future: impl Future<Output = Result<T, GenerationError>>) -> Result<T, GenerationError> {
        self.context.in_time(self.deadlines, future).await
    }
}
