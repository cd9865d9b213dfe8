//! Token ids → text, piece by piece.
//!
//! INVARIANT: a piece never ends in half a character, and what was emitted never changes. The pieces put together are
//! what decoding all tokens at once would have given (special tokens skipped).

use std::sync::Arc;

use tokenizers::Tokenizer;

/// Prompt tokens that are decoded along with the first pieces: with some tokenizers a word's space depends on what
/// stands before it.
const MAX_CONTEXT_TOKENS: usize = 5;
const REPLACEMENT: char = '\u{FFFD}';
/// An unfinished character decodes to at most this many replacement characters (one for each byte it has so far).
const MAX_UNFINISHED: usize = 3;

/// What one token adds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// Complete characters; empty while one is unfinished. For a special token its own text.
    pub(crate) text: String,
    /// The token is not part of the visible text.
    pub(crate) special: bool,
}

/// One sequence's decoder.
pub(crate) struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    /// The tokens still needed: those of the last complete piece, as context, and those after it.
    window: Vec<u32>,
    /// What the window's text had emitted already.
    emitted: String,
    /// How many tokens of the window are wholly emitted.
    num_emitted_tokens: usize,
}

impl Detokenizer {
    pub(super) fn new(tokenizer: Arc<Tokenizer>, prompt_token_ids: &[u32]) -> Self {
        let start = prompt_token_ids.len().saturating_sub(MAX_CONTEXT_TOKENS);
        let mut this = Self { tokenizer, window: Vec::new(), emitted: String::new(), num_emitted_tokens: 0 };
        this.window = prompt_token_ids[start..].iter().copied().filter(|&id| this.special_text(id).is_none()).collect();
        this.emitted = this.decode_window();
        this.num_emitted_tokens = this.window.len();
        this
    }

    pub(crate) fn push(&mut self, token_id: u32) -> Piece {
        if let Some(text) = self.special_text(token_id) {
            return Piece { text, special: true };
        }
        self.window.push(token_id);
        let mut text = self.decode_window();
        if !text.starts_with(&self.emitted) {
            // Byte-fallback decoders turn a whole run of bytes into replacement characters when a later byte breaks it.
            // The part that was fine has been sent: go on after it.
            self.window.drain(..self.num_emitted_tokens);
            self.num_emitted_tokens = 0;
            self.emitted.clear();
            text = self.decode_window();
        }
        // Bytes that were dropped as a text's first space count as unfinished when a run of bytes goes on after them.
        let num_silent_tokens = if self.emitted.is_empty() { self.num_emitted_tokens } else { 0 };
        let settled = settled_len(&text, MAX_UNFINISHED + num_silent_tokens).max(self.emitted.len());
        let piece = text[self.emitted.len()..settled].to_owned();
        if settled == text.len() && !text.ends_with(REPLACEMENT) {
            self.forget_context();
        } else {
            self.emitted.push_str(&piece);
        }
        Piece { text: piece, special: false }
    }

    /// The text of a token by itself.
    pub(crate) fn token_text(&self, token_id: u32) -> String {
        self.special_text(token_id).unwrap_or_else(|| self.tokenizer_text(&[token_id]))
    }

    /// Whether the token is no part of a visible text.
    pub(crate) fn is_special(&self, token_id: u32) -> bool {
        self.special_text(token_id).is_some()
    }

    /// What is left when no more tokens come: characters that stayed unfinished.
    pub(crate) fn finish(&mut self) -> String {
        let text = self.decode_window();
        text.get(self.emitted.len()..).unwrap_or_default().to_owned()
    }

    /// Everything in the window is emitted: keep the last piece's tokens only.
    fn forget_context(&mut self) {
        let emitted_window = self.window.split_off(self.num_emitted_tokens);
        let context = self.tokenizer_text(&emitted_window);
        if context.is_empty() {
            // A context without text would be taken for the start of a text.
            self.window.extend(emitted_window);
            self.emitted = self.decode_window();
        } else {
            self.window = emitted_window;
            self.emitted = context;
        }
        self.num_emitted_tokens = self.window.len();
    }

    /// The text of a special token; `None` for all others.
    fn special_text(&self, token_id: u32) -> Option<String> {
        let added = self.tokenizer.get_added_vocabulary();
        added.simple_id_to_token(token_id).filter(|token| added.is_special_token(token))
    }

    fn decode_window(&self) -> String {
        self.tokenizer_text(&self.window)
    }

    fn tokenizer_text(&self, token_ids: &[u32]) -> String {
        // No decoder fails on ids; ids beyond the vocabulary (padding rows of the model) have no text.
        self.tokenizer.decode(token_ids, false).unwrap_or_default()
    }
}

/// Length of `text` without a possibly unfinished character at its end.
fn settled_len(text: &str, max_unfinished: usize) -> usize {
    let unfinished = text.chars().rev().take(max_unfinished).take_while(|&c| c == REPLACEMENT).count();
    text.len() - unfinished * REPLACEMENT.len_utf8()
}

#[cfg(test)]
#[path = "detokenize_tests.rs"]
mod tests;
