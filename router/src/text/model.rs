//! The text side of a model: its tokenizer, its chat template and its end-of-sequence tokens.

use std::path::Path;
use std::sync::Arc;

use tokenizers::Tokenizer;
use tokio::sync::Semaphore;

use super::answer::AnswerFormat;
use super::detokenizer::Detokenizer;
pub use super::model_file::LoadError;
use super::model_file::{TokenizerConfig, read_eos_token_ids};
use super::template::{ChatInputs, ChatTemplate, TemplateError, TemplateSources};
use super::token_bytes::ByteEncoding;

/// Shorter texts are tokenized on the calling thread in well under a millisecond, longer texts on a blocking thread.
const MAX_INLINE_BYTES: usize = 1024;

/// The tokenizer, chat templates and answer format of one model. Cheap to clone.
#[derive(Clone)]
pub struct TextModel {
    tokenizer: Arc<Tokenizer>,
    /// One permit for each long text that may be tokenized concurrently.
    threads: Arc<Semaphore>,
    template: Arc<ChatTemplate>,
    answer_format: Arc<AnswerFormat>,
    /// Of requests with tools, if the model has a separate template for them.
    tool_answer_format: Option<Arc<AnswerFormat>>,
    eos_token_ids: Arc<[u32]>,
    byte_encoding: ByteEncoding,
}

/// The tokenizer could not encode a text.
#[derive(Debug, thiserror::Error)]
#[error("tokenizer error {0}")]
pub(crate) struct EncodeError(String);

/// A token and its position in the encoded text.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TokenSpan {
    pub(crate) id: u32,
    /// Byte offsets; both are 0 for tokens without text.
    pub(crate) start: usize,
    pub(crate) stop: usize,
}

impl TextModel {
    /// Reads a prepared model folder.
    ///
    /// `num_threads`: how many long texts are tokenized, and how many chats rendered, concurrently. `chat_template`:
    /// source of a template that replaces the folder's. `renderer`: executable that renders chat templates; it calls
    /// [`run_chat_renderer`](super::run_chat_renderer) if its first argument is
    /// [`RENDERER_ARGUMENT`](super::RENDERER_ARGUMENT).
    ///
    /// # Errors
    ///
    /// If a file is missing or malformed, or no renderer can be started. A broken chat template fails only chats.
    pub fn load(
        folder: &Path,
        num_threads: usize,
        chat_template: Option<String>,
        renderer: &Path,
    ) -> Result<Self, LoadError> {
        let path = folder.join("tokenizer.json");
        if !path.exists() {
            return Err(LoadError::NoTokenizer(folder.to_owned()));
        }
        let malformed =
            |error: tokenizers::Error| LoadError::Malformed { path: path.clone(), reason: error.to_string() };
        let mut tokenizer = Tokenizer::from_file(&path).map_err(malformed)?;
        if tokenizer.get_vocab_size(false) == 0 {
            return Err(LoadError::NoVocabulary(path));
        }
        // Some checkpoints configure truncation and padding for training, which would silently change prompts.
        tokenizer.with_truncation(None).map_err(malformed)?;
        tokenizer.with_padding(None);

        let config = TokenizerConfig::read(folder)?;
        let mut eos_token_ids = read_eos_token_ids(folder)?;
        let eos_token_id = config.eos_token().and_then(|token| tokenizer.token_to_id(token));
        if let Some(id) = eos_token_id.filter(|id| !eos_token_ids.contains(id)) {
            eos_token_ids.push(id);
        }
        let sources = match chat_template {
            Some(source) => TemplateSources::only(source),
            None => config.chat_templates(folder)?,
        };
        let added_token_id = |text: &str| tokenizer.get_added_vocabulary().get_vocab().get(text).copied();
        let template = ChatTemplate::new(sources.clone(), &config.special_tokens, renderer, num_threads)
            .map_err(LoadError::Renderer)?;
        let answer_format =
            |source: &str, with_tools| Arc::new(AnswerFormat::new(source, template.traits(with_tools), added_token_id));
        Ok(Self {
            answer_format: answer_format(sources.default.as_deref().unwrap_or_default(), false),
            tool_answer_format: sources.tool_use.as_deref().map(|source| answer_format(source, true)),
            byte_encoding: ByteEncoding::of(&tokenizer),
            tokenizer: Arc::new(tokenizer),
            threads: Arc::new(Semaphore::new(num_threads.max(1))),
            template: Arc::new(template),
            eos_token_ids: eos_token_ids.into(),
        })
    }

    /// Ids of the model's end-of-sequence tokens.
    pub(crate) fn eos_token_ids(&self) -> Arc<[u32]> {
        Arc::clone(&self.eos_token_ids)
    }

    /// Upper bound of token ids, exclusive.
    pub(crate) fn vocabulary_size(&self) -> u32 {
        u32::try_from(self.tokenizer.get_vocab_size(true)).unwrap_or(u32::MAX)
    }

    /// Token ids of the text. `add_special_tokens`: false for rendered chats, whose template writes special tokens itself.
    pub(crate) async fn encode(&self, text: Arc<str>, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        self.on_thread(text, move |tokenizer, text| {
            let encoding = tokenizer.encode_fast(text, add_special_tokens)?;
            Ok(encoding.get_ids().to_vec())
        })
        .await
    }

    /// Like [`Self::encode`], with the position of each token in the text.
    pub(crate) async fn encode_spans(
        &self,
        text: Arc<str>,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenSpan>, EncodeError> {
        self.on_thread(text, move |tokenizer, text| {
            let encoding = tokenizer.encode(text, add_special_tokens)?;
            let spans = encoding.get_ids().iter().zip(encoding.get_offsets());
            Ok(spans.map(|(&id, &(start, stop))| TokenSpan { id, start, stop }).collect())
        })
        .await
    }

    async fn on_thread<T: Send + 'static>(
        &self,
        text: Arc<str>,
        encode: impl FnOnce(&Tokenizer, &str) -> tokenizers::Result<T> + Send + 'static,
    ) -> Result<T, EncodeError> {
        let failed = |error: tokenizers::Error| EncodeError(error.to_string());
        if text.len() <= MAX_INLINE_BYTES {
            return encode(&self.tokenizer, &text).map_err(failed);
        }
        // The permit moves into the thread: a caller that gives up does not free the thread that it started.
        let permit = Arc::clone(&self.threads).acquire_owned().await.map_err(|error| EncodeError(error.to_string()))?;
        let tokenizer = Arc::clone(&self.tokenizer);
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            encode(&tokenizer, &text)
        });
        match task.await {
            Ok(encoded) => encoded.map_err(failed),
            // A panic fails this request, as it does for short texts.
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(error) => Err(EncodeError(error.to_string())),
            },
        }
    }

    /// Renders a conversation into a prompt, in a process of its own with limits of time and memory.
    pub(crate) async fn render_chat(&self, inputs: ChatInputs) -> Result<String, TemplateError> {
        self.template.render(inputs).await
    }

    /// The format of answers to requests with or without tools.
    pub(crate) fn answer_format(&self, with_tools: bool) -> &AnswerFormat {
        self.tool_answer_format.as_ref().filter(|_| with_tools).unwrap_or(&self.answer_format)
    }

    /// The bytes of the token, which may be a part of a character. `None` if they depend on other tokens.
    pub(crate) fn token_bytes(&self, token_id: u32) -> Option<Vec<u8>> {
        self.byte_encoding.token_bytes(&self.tokenizer, token_id)
    }

    /// The text that each token adds to the decoded text, and whether the token is special. A character belongs to the
    /// token that completes it.
    pub(crate) fn decode_pieces(&self, token_ids: &[u32]) -> Vec<(String, bool)> {
        let mut detokenizer = self.detokenizer(&[]);
        let mut piece = |&id: &u32| {
            let piece = detokenizer.push(id);
            (piece.text, piece.special)
        };
        let mut pieces: Vec<_> = token_ids.iter().map(&mut piece).collect();
        if let Some((text, _)) = pieces.last_mut().filter(|(_, special)| !special) {
            text.push_str(&detokenizer.finish());
        }
        pieces
    }

    /// A detokenizer for the tokens that follow `prompt_token_ids`.
    pub(crate) fn detokenizer(&self, prompt_token_ids: &[u32]) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.tokenizer), prompt_token_ids)
    }
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
