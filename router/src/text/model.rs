//! The text side of a model: its tokenizer, its chat template and its end-of-sequence tokens.

use std::path::Path;
use std::sync::Arc;

use tokenizers::Tokenizer;
use tokio::sync::Semaphore;

use super::chat_style::{ChatStyle, RequestStyles, StyleFactory};
use super::detokenizer::Detokenizer;
pub use super::model_file::LoadError;
use super::model_file::{TokenizerConfig, read_eos_token_ids};
use super::own_text::OwnTexts;
use super::prompts::Prompts;
use super::template::{TemplateError, TemplateSources};
use super::token_bytes::ByteEncoding;

/// Shorter texts are tokenized on the calling thread in well under a millisecond, longer texts on a blocking thread.
pub(super) const MAX_INLINE_BYTES: usize = 1024;
/// The same for tokens to decode.
const MAX_INLINE_TOKENS: usize = 512;

/// The tokenizer and chat style of one model. Cheap to clone.
#[derive(Clone)]
pub struct TextModel {
    tokenizer: Arc<Tokenizer>,
    own_texts: Arc<OwnTexts>,
    /// One permit for each long text that may be tokenized concurrently.
    threads: Arc<Semaphore>,
    chat_style: Arc<ChatStyle>,
    request_styles: Arc<RequestStyles>,
    eos_token_ids: Arc<[u32]>,
    /// Tokens that the model has embeddings for.
    num_embeddings: u32,
    byte_encoding: ByteEncoding,
    prompts: Arc<Prompts>,
    gives_token_types: bool,
}

/// The tokenizer could not encode a text.
#[derive(Debug, thiserror::Error)]
#[error("tokenizer error {0}")]
pub(crate) struct EncodeError(String);

/// A token and its position in the encoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
        let gives_token_types = config.gives_token_types();
        let added = tokenizer.get_added_vocabulary();
        let added_tokens = || added.get_vocab().iter().map(|(text, &id)| (text.clone(), id));
        let styles = StyleFactory {
            special_tokens: config.special_tokens,
            added_tokens: added_tokens().collect(),
            control_tokens: added_tokens().filter(|(text, _)| added.is_special_token(text)).collect(),
            eos_token_ids: eos_token_ids.clone(),
            program: renderer.to_owned(),
        };
        Ok(Self {
            chat_style: Arc::new(styles.style(&sources, num_threads).map_err(LoadError::Renderer)?),
            request_styles: Arc::new(RequestStyles::new(styles)),
            byte_encoding: ByteEncoding::of(&tokenizer),
            own_texts: Arc::new(OwnTexts::of(&tokenizer)),
            tokenizer: Arc::new(tokenizer),
            threads: Arc::new(Semaphore::new(num_threads.max(1))),
            eos_token_ids: eos_token_ids.into(),
            num_embeddings: u32::MAX,
            prompts: Arc::new(Prompts::read(folder)?),
            gives_token_types,
        })
    }

    /// Ids of the model's end-of-sequence tokens.
    pub(crate) fn eos_token_ids(&self) -> Arc<[u32]> {
        Arc::clone(&self.eos_token_ids)
    }

    /// What an embedding model expects in front of its inputs.
    pub(crate) fn prompts(&self) -> &Prompts {
        &self.prompts
    }

    /// Whether the model was trained with the token types of its tokenizer.
    pub(super) fn gives_token_types(&self) -> bool {
        self.gives_token_types
    }

    /// The same for a model with `num_embeddings` rows in its embedding; 0: unknown. Tokens after them are refused. Logs a
    /// warning if the tokenizer has such tokens.
    #[must_use]
    pub fn with_embeddings(mut self, num_embeddings: u32) -> Self {
        if num_embeddings == 0 {
            return self;
        }
        self.num_embeddings = num_embeddings;
        let num_tokens = self.tokenizer_size();
        if num_tokens > num_embeddings {
            let first: Vec<_> =
                (num_embeddings..num_tokens).take(3).filter_map(|id| self.tokenizer.id_to_token(id)).collect();
            tracing::warn!(
                "the tokenizer has {num_tokens} tokens, but the model has {num_embeddings} embeddings; texts with the \
                 others are refused, the first of which are {}",
                first.join(" "),
            );
        }
        let (lost, kept) = self.eos_token_ids.iter().partition::<Vec<u32>, _>(|&&id| id >= num_embeddings);
        if !lost.is_empty() {
            tracing::warn!("the model has no embeddings for its EOS tokens {lost:?}, so no generation ends with them");
            self.eos_token_ids = kept.into();
        }
        self
    }

    /// Tokens that the model has embeddings for; `u32::MAX`: unknown.
    pub(crate) fn num_embeddings(&self) -> u32 {
        self.num_embeddings
    }

    /// Tokens of the tokenizer.
    pub(crate) fn tokenizer_size(&self) -> u32 {
        u32::try_from(self.tokenizer.get_vocab_size(true)).unwrap_or(u32::MAX)
    }

    /// Upper bound of token ids that the model reads and generates, exclusive.
    pub(crate) fn vocabulary_size(&self) -> u32 {
        self.tokenizer_size().min(self.num_embeddings)
    }

    /// Token ids of the text. `add_special_tokens`: false for rendered chats, whose template writes special tokens itself.
    pub(crate) async fn encode(&self, text: Arc<str>, add_special_tokens: bool) -> Result<Vec<u32>, EncodeError> {
        self.on_thread(text.len() <= MAX_INLINE_BYTES, move |tokenizer| {
            let encoding = tokenizer.encode_fast(&*text, add_special_tokens)?;
            Ok(encoding.get_ids().to_vec())
        })
        .await
    }

    /// The tokens of each word at the beginning of a text and, with a space in front, in the middle of one; each once.
    pub(crate) async fn encode_bad_words(&self, words: &[String]) -> Result<Vec<Vec<u32>>, EncodeError> {
        let spellings =
            words.iter().map(|word| word.trim_start()).flat_map(|word| [word.to_owned(), format!(" {word}")]);
        let spellings: Vec<String> = spellings.collect();
        let is_short = spellings.iter().map(String::len).sum::<usize>() <= MAX_INLINE_BYTES;
        let num_embeddings = self.num_embeddings;
        self.on_thread(is_short, move |tokenizer| {
            let mut encoded = Vec::with_capacity(spellings.len());
            for spelling in spellings {
                encoded.push(tokenizer.encode_fast(spelling, false)?.get_ids().to_vec());
            }
            // What the model cannot generate needs not be forbidden.
            encoded.retain(|ids| !ids.is_empty() && ids.iter().all(|&id| id < num_embeddings));
            encoded.sort_unstable();
            encoded.dedup();
            Ok(encoded)
        })
        .await
    }

    /// Like [`Self::encode`], with the position of each token in the text.
    pub(crate) async fn encode_spans(
        &self,
        text: Arc<str>,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenSpan>, EncodeError> {
        self.on_thread(text.len() <= MAX_INLINE_BYTES, move |tokenizer| {
            let encoding = tokenizer.encode(&*text, add_special_tokens)?;
            let spans = encoding.get_ids().iter().zip(encoding.get_offsets());
            Ok(spans.map(|(&id, &(start, stop))| TokenSpan { id, start, stop }).collect())
        })
        .await
    }

    /// The text of the tokens, special ones included.
    pub(crate) async fn decode(&self, token_ids: Vec<u32>) -> Result<String, EncodeError> {
        self.on_thread(token_ids.len() <= MAX_INLINE_TOKENS, move |tokenizer| tokenizer.decode(&token_ids, false)).await
    }

    /// The tokens as the vocabulary spells them; empty for ids that it lacks.
    pub(crate) fn spellings(&self, token_ids: &[u32]) -> Vec<String> {
        token_ids.iter().map(|&id| self.tokenizer.id_to_token(id).unwrap_or_default()).collect()
    }

    /// Runs short work at once, and other work on a blocking thread.
    pub(super) async fn on_thread<T: Send + 'static>(
        &self,
        is_short: bool,
        work: impl FnOnce(&Tokenizer) -> tokenizers::Result<T> + Send + 'static,
    ) -> Result<T, EncodeError> {
        let failed = |error: tokenizers::Error| EncodeError(error.to_string());
        if is_short {
            return work(&self.tokenizer).map_err(failed);
        }
        // The permit moves into the thread: a caller that gives up does not free the thread that it started.
        let permit = Arc::clone(&self.threads).acquire_owned().await.map_err(|error| EncodeError(error.to_string()))?;
        let tokenizer = Arc::clone(&self.tokenizer);
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work(&tokenizer)
        });
        match task.await {
            Ok(done) => done.map_err(failed),
            // A panic fails this request, as it does for short texts.
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(error) => Err(EncodeError(error.to_string())),
            },
        }
    }

    /// How chats are rendered and their answers read: by the model's own templates, unless the request brings one.
    pub(crate) async fn chat_style(&self, template: Option<String>) -> Result<Arc<ChatStyle>, TemplateError> {
        match template {
            Some(source) => self.request_styles.of(source).await,
            None => Ok(Arc::clone(&self.chat_style)),
        }
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
        Detokenizer::new(Arc::clone(&self.tokenizer), Arc::clone(&self.own_texts), prompt_token_ids)
    }
}

#[cfg(test)]
#[path = "model_tests.rs"]
mod tests;
