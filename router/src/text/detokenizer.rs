//! Incremental detokenization.
//!
//! INVARIANT: a piece never ends inside a character, and emitted text never changes. The concatenated pieces equal the text
//! of all tokens decoded at once, without special tokens.

use std::sync::Arc;

use tokenizers::Tokenizer;

use super::own_text::OwnTexts;

/// Prompt tokens that are decoded together with the first generated tokens, because some tokenizers drop the space before
/// the first word of a text.
const MAX_CONTEXT_TOKENS: usize = 5;
const REPLACEMENT: char = '\u{FFFD}';
/// An incomplete character decodes to at most this many replacement characters, one for each of its bytes so far.
const MAX_INCOMPLETE: usize = 3;

/// The text that one token adds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Complete characters; empty while a character is incomplete. For a special token, its own text.
    pub(crate) text: String,
    /// Whether the token is special, so that its text is not part of the visible text.
    pub(crate) special: bool,
}

/// The detokenizer of one sequence.
pub(crate) struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    own_texts: Arc<OwnTexts>,
    /// The tokens of the last complete piece, as context, and all later ones.
    window: Vec<u32>,
    /// The part of the window's text that has been emitted.
    emitted: String,
    /// Leading tokens of the window whose text has been emitted completely.
    num_emitted_tokens: usize,
}

impl Detokenizer {
    /// `own_texts`: of this tokenizer.
    pub(super) fn new(tokenizer: Arc<Tokenizer>, own_texts: Arc<OwnTexts>, prompt_token_ids: &[u32]) -> Self {
        let start = prompt_token_ids.len().saturating_sub(MAX_CONTEXT_TOKENS);
        let mut this = Self { tokenizer, own_texts, window: Vec::new(), emitted: String::new(), num_emitted_tokens: 0 };
        this.window = prompt_token_ids[start..].iter().copied().filter(|&id| this.special_text(id).is_none()).collect();
        this.emitted = this.decode_window();
        this.num_emitted_tokens = this.window.len();
        this
    }

    /// Decodes the next token.
    pub(crate) fn push(&mut self, token_id: u32) -> Piece {
        if self.is_complete()
            && let Some(text) = self.own_texts.get(token_id)
        {
            self.window.clear();
            self.window.push(token_id);
            text.clone_into(&mut self.emitted);
            self.num_emitted_tokens = 1;
            return Piece { text: text.to_owned(), special: false };
        }
        if let Some(text) = self.special_text(token_id) {
            return Piece { text, special: true };
        }
        self.window.push(token_id);
        let mut text = self.decode_window();
        if !text.starts_with(&self.emitted) {
            // Byte-fallback decoders turn a whole run of bytes into replacement characters if one byte is invalid. The
            // valid characters have been emitted already: continue after them.
            self.window.drain(..self.num_emitted_tokens);
            self.num_emitted_tokens = 0;
            self.emitted.clear();
            text = self.decode_window();
        }
        // A byte that was dropped as the first space of a text counts as incomplete if more bytes follow.
        let num_silent_tokens = if self.emitted.is_empty() { self.num_emitted_tokens } else { 0 };
        let settled = settled_len(&text, MAX_INCOMPLETE + num_silent_tokens).max(self.emitted.len());
        let piece = text[self.emitted.len()..settled].to_owned();
        if settled == text.len() && !text.ends_with(REPLACEMENT) {
            self.forget_context();
        } else {
            self.emitted.push_str(&piece);
        }
        Piece { text: piece, special: false }
    }

    /// The text of a single token without context.
    pub(crate) fn token_text(&self, token_id: u32) -> String {
        self.special_text(token_id).unwrap_or_else(|| self.tokenizer_text(&[token_id]))
    }

    /// Whether the token is special.
    pub(crate) fn is_special(&self, token_id: u32) -> bool {
        self.special_text(token_id).is_some()
    }

    /// The rest of the text after the last token: characters that stayed incomplete.
    pub(crate) fn finish(&mut self) -> String {
        let text = self.decode_window();
        text.get(self.emitted.len()..).unwrap_or_default().to_owned()
    }

    /// Drops all tokens but those of the last piece. The whole window must have been emitted.
    fn forget_context(&mut self) {
        let emitted_window = self.window.split_off(self.num_emitted_tokens);
        let context = self.tokenizer_text(&emitted_window);
        if context.is_empty() {
            // The decoder would treat a context without text as the start of a text.
            self.window.extend(emitted_window);
            self.emitted = self.decode_window();
        } else {
            self.window = emitted_window;
            self.emitted = context;
        }
        self.num_emitted_tokens = self.window.len();
    }

    /// Whether no character before the next token is incomplete.
    fn is_complete(&self) -> bool {
        self.num_emitted_tokens == self.window.len() && !self.emitted.ends_with(REPLACEMENT)
    }

    /// The text of the token if it is special.
    fn special_text(&self, token_id: u32) -> Option<String> {
        let added = self.tokenizer.get_added_vocabulary();
        added.simple_id_to_token(token_id).filter(|token| added.is_special_token(token))
    }

    fn decode_window(&self) -> String {
        self.tokenizer_text(&self.window)
    }

    fn tokenizer_text(&self, token_ids: &[u32]) -> String {
        // Decoders do not fail. Ids beyond the vocabulary, which are padding rows of the model, have no text.
        self.tokenizer.decode(token_ids, false).unwrap_or_default()
    }
}

/// Length of `text` without a possibly incomplete character at its end.
fn settled_len(text: &str, max_incomplete: usize) -> usize {
    let incomplete = text.chars().rev().take(max_incomplete).take_while(|&c| c == REPLACEMENT).count();
    text.len() - incomplete * REPLACEMENT.len_utf8()
}

#[cfg(test)]
#[path = "detokenizer_tests.rs"]
mod tests;
