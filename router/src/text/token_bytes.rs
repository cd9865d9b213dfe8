//! The bytes of a token, decoded from its spelling in the vocabulary.

use serde_json::Value;
use tokenizers::Tokenizer;

/// How a vocabulary spells bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ByteEncoding {
    /// Each byte is a printable character (GPT-2 and later).
    ByteLevel,
    /// A byte is `<0xE2>`, a space is `▁` (SentencePiece).
    ByteFallback,
    /// The bytes of a token depend on other tokens.
    Unknown,
}

impl ByteEncoding {
    /// Detects the encoding from the tokenizer's decoder.
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        // In the JSON of tokenizer.json, decoders may be nested.
        let decoder = serde_json::to_value(tokenizer.get_decoder()).unwrap_or_default();
        if has_type(&decoder, "ByteLevel") {
            Self::ByteLevel
        } else if has_type(&decoder, "ByteFallback") {
            Self::ByteFallback
        } else {
            Self::Unknown
        }
    }

    /// The bytes of the token; `None` if they depend on other tokens or the id is unknown.
    pub(super) fn token_bytes(self, tokenizer: &Tokenizer, token_id: u32) -> Option<Vec<u8>> {
        if let Some(added) = tokenizer.get_added_vocabulary().simple_id_to_token(token_id) {
            return Some(added.into_bytes());
        }
        let spelled = tokenizer.id_to_token(token_id)?;
        match self {
            Self::ByteLevel => spelled.chars().map(byte_of).collect(),
            Self::ByteFallback => Some(match fallback_byte(&spelled) {
                Some(byte) => vec![byte],
                None => spelled.replace('▁', " ").into_bytes(),
            }),
            Self::Unknown => None,
        }
    }
}

fn has_type(decoder: &Value, name: &str) -> bool {
    match decoder {
        Value::Object(fields) => {
            fields.get("type").is_some_and(|kind| kind == name) || fields.values().any(|field| has_type(field, name))
        }
        Value::Array(items) => items.iter().any(|item| has_type(item, name)),
        _ => false,
    }
}

fn fallback_byte(spelled: &str) -> Option<u8> {
    let digits = spelled.strip_prefix("<0x")?.strip_suffix('>')?;
    u8::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 2 && !digits.starts_with('+'))
}

/// A printable character of Latin-1 stands for its own code; the other bytes are numbered from U+0100 on.
fn byte_of(c: char) -> Option<u8> {
    let code = u8::try_from(u32::from(c));
    match (code, u32::from(c)) {
        (Ok(code @ (b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)), _) => Some(code),
        (_, nth @ 0x100..=0x120) => u8::try_from(nth - 0x100).ok(),
        (_, nth @ 0x121..=0x142) => u8::try_from(nth - 0x121 + 0x7F).ok(),
        (_, 0x143) => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_one_character() {
        let mut bytes: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
    }

    #[test]
    fn fallback_bytes_are_two_digits() {
        assert_eq!(fallback_byte("<0xE2>"), Some(0xE2));
        for text in ["<0x>", "<0xE2", "<0x+1>", "<0xE23>", "E2"] {
            assert_eq!(fallback_byte(text), None, "{text}");
        }
    }
}
