//! The text side of a model: its tokenizer, its chat template and the tokens that end a sequence.

use std::path::Path;
use std::sync::Arc;

use tokenizers::Tokenizer;
use tokio::sync::Semaphore;

use super::answer::AnswerStyle;
use super::detokenize::Detokenizer;
pub use super::model_file::LoadError;
use super::model_file::{TokenizerConfig, read_eos_token_ids};
use super::spelling::Spelling;
use super::template::{ChatInputs, ChatTemplate, TemplateError, TemplateSources};

/// Texts up to this are tokenized where they are, in well under a millisecond; longer ones on a thread of their own.
const MAX_INLINE_BYTES: usize = 1024;

/// Cheap to clone.
#[derive(Clone)]
pub struct TextModel {
    tokenizer: Arc<Tokenizer>,
    /// Long texts that may be tokenized at the same time.
    threads: Arc<Semaphore>,
    template: Arc<ChatTemplate>,
    style: Arc<AnswerStyle>,
    /// Where tools are offered and the model has another template for that.
    tool_style: Option<Arc<AnswerStyle>>,
    eos_token_ids: Arc<[u32]>,
    spelling: Spelling,
}

/// The tokenizer could not encode a text.
#[derive(Debug, thiserror::Error)]
#[error("tokenizer error {0}")]
pub(crate) struct EncodeError(String);

/// A token and where it stands in the text it was made from.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct TokenSpan {
    pub(crate) id: u32,
    /// Byte offsets; 0 and 0 for tokens that stand for no text.
    pub(crate) start: usize,
    pub(crate) stop: usize,
}

impl TextModel {
    /// Reads a prepared model folder.
    ///
    /// `num_threads`: long texts tokenized, and chats rendered, at the same time. `chat_template`: the source of a
    /// template that replaces the folder's. `renderer`: the program that renders chat templates; it calls
    /// [`run_chat_renderer`](super::run_chat_renderer) where its first argument is
    /// [`RENDERER_ARGUMENT`](super::RENDERER_ARGUMENT). A broken chat template is not an error here: it fails the chats.
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
        // Some checkpoints carry the lengths they were trained with; here they would cut prompts silently.
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
        let style = |source: &String| Arc::new(AnswerStyle::new(source.clone(), added_token_id));
        Ok(Self {
            style: style(sources.default.as_ref().unwrap_or(&String::new())),
            tool_style: sources.tool_use.as_ref().map(style),
            spelling: Spelling::of(&tokenizer),
            tokenizer: Arc::new(tokenizer),
            threads: Arc::new(Semaphore::new(num_threads.max(1))),
            template: Arc::new(
                ChatTemplate::new(sources, &config.special_tokens, renderer, num_threads)
                    .map_err(LoadError::Renderer)?,
            ),
            eos_token_ids: eos_token_ids.into(),
        })
    }

    /// Tokens that end a sequence by the model's own decision.
    pub(crate) fn eos_token_ids(&self) -> Arc<[u32]> {
        Arc::clone(&self.eos_token_ids)
    }

    /// Ids are smaller than this.
    pub(crate) fn vocabulary_size(&self) -> u32 {
        u32::try_from(self.tokenizer.get_vocab_size(true)).unwrap_or(u32::MAX)
    }

    /// `add_special_tokens`: false for rendered chats, whose template has written them.
    pub(crate) async fn encode(&self, text: Arc<str>, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        self.on_thread(text, move |tokenizer, text| {
            let encoding = tokenizer.encode_fast(text, add_special_tokens)?;
            Ok(encoding.get_ids().to_vec())
        })
        .await
    }

    /// As [`Self::encode`], and where each token came from.
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
        // The permit moves into the thread: a caller that gives up does not free the thread it has started.
        let permit = Arc::clone(&self.threads).acquire_owned().await.map_err(|error| EncodeError(error.to_string()))?;
        let tokenizer = Arc::clone(&self.tokenizer);
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            encode(&tokenizer, &text)
        });
        match task.await {
            Ok(encoded) => encoded.map_err(failed),
            // A bug in there is this request's, as it is for short texts.
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(error) => Err(EncodeError(error.to_string())),
            },
        }
    }

    /// The prompt for a conversation, ready for the assistant's answer.
    pub(crate) async fn render_chat(&self, inputs: ChatInputs) -> Result<String, TemplateError> {
        self.template.render(inputs).await
    }

    /// Whether the chat template shows offered tools to the model; if not, a message has to.
    pub fn shows_tools(&self) -> bool {
        self.template.uses_tools()
    }

    /// How the model answers where tools are offered, or are not.
    pub(crate) fn answer_style(&self, with_tools: bool) -> &AnswerStyle {
        self.tool_style.as_ref().filter(|_| with_tools).unwrap_or(&self.style)
    }

    /// What the token stands for by itself, also where that is part of a character. `None`: it depends on others.
    pub(crate) fn token_bytes(&self, token_id: u32) -> Option<Vec<u8>> {
        self.spelling.bytes(&self.tokenizer, token_id)
    }

    /// What each token adds to the text of all, and whether that is a special token's own text. Characters belong to the
    /// token that ends them.
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

    /// Decodes what follows `prompt_token_ids`.
    pub(crate) fn detokenizer(&self, prompt_token_ids: &[u32]) -> Detokenizer {
        Detokenizer::new(Arc::clone(&self.tokenizer), prompt_token_ids)
    }
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
