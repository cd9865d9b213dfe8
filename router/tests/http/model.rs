//! A small model folder that tests write: one token for each byte, and a few words.

use std::path::Path;

use serde_json::{Value, json};

pub const IM_START: u32 = 256;
pub const IM_END: u32 = 257;
/// Tokens of several bytes: encoding never produces them, but a model may generate them.
const WORDS: [&str; 6] = ["Hello", " world", "!\n\nUser", ": hi", "END", " and more"];

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

pub fn write(folder: &Path) {
    write_with_template(folder, &json!(TEMPLATE));
}

pub fn write_with_template(folder: &Path, template: &Value) {
    let config = json!({"bos_token": null, "eos_token": {"content": "<|im_end|>"}, "chat_template": template});
    write_json(&folder.join("tokenizer_config.json"), &config);
    write_json(&folder.join("generation_config.json"), &json!({"eos_token_id": [IM_END]}));
    write_json(&folder.join("tokenizer.json"), &tokenizer());
}

/// The token ids of a text's bytes.
pub fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// The token id of a whole word.
pub fn word(word: &str) -> u32 {
    let index = WORDS.iter().position(|known| *known == word).unwrap();
    258 + u32::try_from(index).unwrap()
}

fn tokenizer() -> Value {
    let mut vocabulary = serde_json::Map::new();
    for byte in 0..=255_u8 {
        vocabulary.insert(byte_char(byte).to_string(), byte.into());
    }
    for known in WORDS {
        let spelled: String = known.bytes().map(byte_char).collect();
        vocabulary.insert(spelled, word(known).into());
    }
    // Added tokens keep these ids only if the vocabulary has them, too.
    vocabulary.insert("<|im_start|>".to_owned(), IM_START.into());
    vocabulary.insert("<|im_end|>".to_owned(), IM_END.into());
    let special = |id: u32, content: &str| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [special(IM_START, "<|im_start|>"), special(IM_END, "<|im_end|>")],
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "post_processor": null,
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true},
        "model": {"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                  "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
                  "vocab": vocabulary, "merges": []},
    })
}

/// The printable character for a byte in byte-level vocabularies.
fn byte_char(byte: u8) -> char {
    let is_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_itself(byte) {
        return char::from(byte);
    }
    let nth = (0..byte).filter(|&before| !is_itself(before)).count();
    char::from_u32(256 + u32::try_from(nth).unwrap()).unwrap()
}

fn write_json(path: &Path, value: &Value) {
    std::fs::write(path, serde_json::to_vec(value).unwrap()).unwrap();
}
