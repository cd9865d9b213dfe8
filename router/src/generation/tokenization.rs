//! The tokens of prompts that nothing is generated from. Each call takes a permit, as a generation does.

use std::sync::Arc;
use std::time::Instant;

use super::chat::Chat;
use super::deadline::Deadlines;
use super::error::GenerationError;
use super::image::{self, GivenImage, ImageSource};
use super::service::GenerationService;
use super::validation::ValidationError;
use crate::text::TokenSpan;

/// A chat's prompt and its tokens.
pub(crate) struct TokenizedChat {
    pub(crate) text: Arc<str>,
    pub(crate) spans: Vec<TokenSpan>,
}

impl GenerationService {
    /// The tokens of a text, with a placeholder for each of the images.
    pub(crate) async fn tokenize(
        &self,
        mut text: Arc<str>,
        images: &[ImageSource],
        mut add_special_tokens: bool,
    ) -> Result<Vec<TokenSpan>, GenerationError> {
        let _permit = self.context().admission.permit(1)?;
        let deadlines = self.tokenization_deadlines();
        let images = self.context().read_images(images)?;
        let input = self.context().image_input().filter(|_| !images.is_empty());
        if let Some(framed) = input.and_then(|input| image::framed(&text, input)) {
            (text, add_special_tokens) = (framed, false);
        }
        self.spans(text, images, add_special_tokens, deadlines).await
    }

    /// The text of tokens, special ones included.
    pub(crate) async fn detokenize(&self, token_ids: Vec<u32>) -> Result<String, GenerationError> {
        let _permit = self.context().admission.permit(1)?;
        let vocabulary = self.text().tokenizer_size();
        if let Some(&given) = token_ids.iter().find(|&&id| id >= vocabulary) {
            return Err(ValidationError::TokenId { field: "tokens", vocabulary, given }.into());
        }
        Ok(self.text().decode(token_ids).await?)
    }

    /// The rendered prompt of a chat and its tokens.
    pub(crate) async fn tokenize_chat(
        &self,
        chat: Chat,
        add_special_tokens: bool,
    ) -> Result<TokenizedChat, GenerationError> {
        let _permit = self.context().admission.permit(1)?;
        let deadlines = self.tokenization_deadlines();
        let images = self.context().read_images(&chat.images)?;
        let mut text =
            self.context().in_time(deadlines, chat.render(self.text(), self.context().image_input())).await?.prompt;
        if let Some(input) = self.context().image_input().filter(|_| !images.is_empty()) {
            text = image::place_in_template(text, input);
        }
        let spans = self.spans(Arc::clone(&text), images, add_special_tokens, deadlines).await?;
        Ok(TokenizedChat { text, spans })
    }

    async fn spans(
        &self,
        text: Arc<str>,
        images: Vec<GivenImage>,
        add_special_tokens: bool,
        deadlines: Deadlines,
    ) -> Result<Vec<TokenSpan>, GenerationError> {
        let encode = self.text().encode_spans(text, add_special_tokens);
        let spans = self.context().in_time(deadlines, async { Ok(encode.await?) }).await?;
        let Some(input) = self.context().image_input().filter(|_| !images.is_empty()) else { return Ok(spans) };
        let token_ids: Vec<_> = spans.iter().map(|span| span.id).collect();
        let (_, encoded) = self.context().encode_images(&token_ids, images, deadlines).await?;
        Ok(image::expand_spans(spans, input, encoded))
    }

    fn tokenization_deadlines(&self) -> Deadlines {
        Deadlines::new(Instant::now(), None, self.context().config.queue.timeout)
    }
}
