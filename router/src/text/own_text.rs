//! The texts of the tokens that have the same text after every other token, so that they need not be decoded.

use tokenizers::{DecoderWrapper, Tokenizer};

use super::token_bytes::ByteEncoding;

/// The text of each token that consists of whole characters, if the tokenizer's decoder joins the bytes of its tokens.
///
/// PERF: finding a text here takes a seventh of the instructions of making it from the token's spelling
/// (docs/adr/streams-and-connections.md). One string and the ends of its parts take less memory than a string for each token.
#[derive(Default)]
pub(super) struct OwnTexts {
    texts: String,
    /// The end of each token's text, by token id. Tokens without an own text have an empty one.
    ends: Vec<u32>,
}

impl OwnTexts {
    /// Empty if the tokenizer's decoder does more than join bytes.
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        let mut this = Self::default();
        if !matches!(tokenizer.get_decoder(), Some(DecoderWrapper::ByteLevel(_))) {
            return this;
        }
        for token_id in 0..u32::try_from(tokenizer.get_vocab_size(true)).unwrap_or(0) {
            this.texts.push_str(&own_text(tokenizer, token_id).unwrap_or_default());
            this.ends.push(u32::try_from(this.texts.len()).unwrap_or(u32::MAX));
        }
        this.texts.shrink_to_fit();
        this.ends.shrink_to_fit();
        this
    }

    /// `None` for a token whose text depends on others, or that was added to the vocabulary.
    pub(super) fn get(&self, token_id: u32) -> Option<&str> {
        let index = token_id as usize;
        let end = *self.ends.get(index)?;
        let begin = index.checked_sub(1).map_or(0, |before| self.ends[before]);
        self.texts.get(begin as usize..end as usize).filter(|text| !text.is_empty())
    }
}

fn own_text(tokenizer: &Tokenizer, token_id: u32) -> Option<String> {
    if tokenizer.get_added_vocabulary().simple_id_to_token(token_id).is_some() {
        return None;
    }
    let bytes = ByteEncoding::ByteLevel.token_bytes(tokenizer, token_id)?;
    // Until the next token, a replacement character at the end may be an incomplete character.
    String::from_utf8(bytes).ok().filter(|text| !text.ends_with(char::REPLACEMENT_CHARACTER))
}
