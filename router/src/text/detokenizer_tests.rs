use proptest::prelude::*;
use serde_json::json;

use super::*;

/// One token for each byte, and fragments that ignore character boundaries.
fn byte_level() -> Arc<Tokenizer> {
    let fragments: [&[u8]; 6] = [b" world", b"\xE2\x82", b"\xAC!", b"\xF0\x9F", b"\x98\x80\xC3", "\u{FFFD}".as_bytes()];
    let mut vocabulary = serde_json::Map::new();
    for byte in 0..=255_u8 {
        vocabulary.insert(byte_char(byte).to_string(), byte.into());
    }
    for (index, fragment) in fragments.iter().enumerate() {
        vocabulary.insert(fragment.iter().map(|&byte| byte_char(byte)).collect(), (256 + index).into());
    }
    tokenizer(
        json!({"type": "BPE", "vocab": vocabulary, "merges": []}),
        json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true,
        }),
        256 + fragments.len(),
    )
}

/// Like Llama 2's: a space is `▁`, the first space of a text is dropped, and rare characters are written as bytes.
fn byte_fallback() -> Arc<Tokenizer> {
    byte_fallback_with(&[json!({"type": "Strip", "content": " ", "start": 1, "stop": 0})])
}

/// Like Gemma's: the first space of a text is kept.
fn byte_fallback_without_prefix() -> Arc<Tokenizer> {
    byte_fallback_with(&[])
}

fn byte_fallback_with(last_decoders: &[serde_json::Value]) -> Arc<Tokenizer> {
    let mut vocabulary = serde_json::Map::new();
    for byte in 0..=255_u8 {
        vocabulary.insert(format!("<0x{byte:02X}>"), byte.into());
    }
    for (index, word) in ["▁Hello", "▁world", "▁", "a", "é", "▁▁"].into_iter().enumerate() {
        vocabulary.insert(word.to_owned(), (256 + index).into());
    }
    let first = json!([{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}]);
    let decoders = [first.as_array().unwrap().as_slice(), last_decoders].concat();
    let decoder = json!({"type": "Sequence", "decoders": decoders});
    tokenizer(json!({"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": true}), decoder, 262)
}

/// Like T5's and others without byte fallback, with a given treatment of the first space of a text.
fn metaspace(prepend_scheme: &str) -> Arc<Tokenizer> {
    let words = ["<unk>", "▁Hello", "▁world", "▁", "a", "é😀", "▁▁"].map(|word| json!([word, -1.0]));
    let model = json!({"type": "Unigram", "unk_id": 0, "vocab": words, "byte_fallback": false});
    let decoder = json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": true});
    tokenizer(model, decoder, 7)
}

fn word_piece() -> Arc<Tokenizer> {
    let vocabulary = json!({"[UNK]": 0, "un": 1, "##able": 2, "to": 3, ".": 4, "##s": 5});
    let model = json!({"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##",
                       "max_input_chars_per_word": 100, "vocab": vocabulary});
    tokenizer(model, json!({"type": "WordPiece", "prefix": "##", "cleanup": true}), 6)
}

/// `special`: id of the special token, which follows the vocabulary.
fn tokenizer(model: serde_json::Value, decoder: serde_json::Value, special: usize) -> Arc<Tokenizer> {
    let special = json!({"id": special, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                         "normalized": false, "special": true});
    let file = json!({"version": "1.0", "added_tokens": [special], "normalizer": null, "pre_tokenizer": null,
                      "post_processor": null, "decoder": decoder, "model": model});
    Arc::new(Tokenizer::from_bytes(file.to_string()).unwrap())
}

fn byte_char(byte: u8) -> char {
    let is_itself = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_itself(byte) {
        return char::from(byte);
    }
    let nth = (0..byte).filter(|&before| !is_itself(before)).count();
    char::from_u32(256 + u32::try_from(nth).unwrap()).unwrap()
}

/// The visible pieces, and the rest at the end.
fn pieces(tokenizer: &Arc<Tokenizer>, prompt: &[u32], token_ids: &[u32]) -> Vec<String> {
    let own_texts = Arc::new(OwnTexts::of(tokenizer));
    let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), own_texts, prompt);
    let pushed: Vec<_> = token_ids.iter().map(|&id| detokenizer.push(id)).collect();
    let visible = pushed.into_iter().map(|piece| if piece.special { String::new() } else { piece.text });
    let mut pieces: Vec<_> = visible.collect();
    pieces.push(detokenizer.finish());
    pieces
}

#[test]
fn characters_are_emitted_whole() {
    let tokenizer = byte_level();
    assert_eq!(pieces(&tokenizer, &[], &[0xE2, 0x82, 0xAC, 97]), ["", "", "€", "a", ""]);
    assert_eq!(pieces(&tokenizer, &[], &[257, 258, 259]), ["", "€!", "", "\u{FFFD}"]);
}

#[test]
fn invalid_bytes_are_emitted_as_soon_as_they_cannot_become_a_character() {
    assert_eq!(pieces(&byte_level(), &[], &[0xFF, 97]), ["", "\u{FFFD}a", ""]);
    let run = vec![0xFF; 10];
    assert!(pieces(&byte_level(), &[], &run)[9].ends_with('\u{FFFD}'));
}

#[test]
fn the_first_space_depends_on_the_prompt() {
    let tokenizer = byte_fallback();
    assert_eq!(pieces(&tokenizer, &[], &[256, 257]), ["Hello", " world", ""]);
    assert_eq!(pieces(&tokenizer, &[256], &[257, 257]), [" world", " world", ""]);
    // A special token is not text: the token after it is not the start of the text.
    assert_eq!(pieces(&tokenizer, &[], &[256, 262, 257]), ["Hello", "", " world", ""]);
}

#[test]
fn an_invalid_byte_does_not_change_emitted_characters() {
    let tokenizer = byte_fallback();
    assert_eq!(pieces(&tokenizer, &[], &[0xE2, 0x82, 0xAC, 0xFF, 259]).concat(), "€\u{FFFD}a");
    assert_eq!(
        pieces(&tokenizer, &[], &[0xC3, 0xA9, 0xC3, 0xFF, 0xFF, 0xFF, 0xFF, 259]).concat().chars().next(),
        Some('é')
    );
}

#[test]
fn unknown_ids_have_no_text() {
    assert_eq!(pieces(&byte_level(), &[], &[9999, 97]), ["", "a", ""]);
}

fn check_whole(tokenizer: &Arc<Tokenizer>, token_ids: &[u32]) -> Result<(), TestCaseError> {
    let pieces = pieces(tokenizer, &[], token_ids);
    prop_assert_eq!(pieces.concat(), tokenizer.decode(token_ids, true).unwrap());
    Ok(())
}

proptest! {
    #[test]
    fn byte_level_pieces_concatenate_to_the_whole(ids in prop::collection::vec(0..263_u32, 0..40)) {
        check_whole(&byte_level(), &ids)?;
    }

    #[test]
    fn fragments_of_characters_are_joined(
        ids in prop::collection::vec(prop_oneof![256..263_u32, 0x80..0xC4_u32, 97..99_u32], 0..40),
    ) {
        check_whole(&byte_level(), &ids)?;
    }

    #[test]
    fn bytes_of_characters_are_joined(text in "[ aé€😀]{0,20}", specials in prop::collection::vec(0..20_usize, 0..3)) {
        let mut ids: Vec<u32> = text.bytes().map(u32::from).collect();
        for at in specials {
            ids.insert(at.min(ids.len()), 262);
        }
        check_whole(&byte_level(), &ids)?;
        check_whole(&byte_fallback(), &ids)?;
    }

    #[test]
    fn words_and_spaces_concatenate_to_the_whole(ids in prop::collection::vec(256..263_u32, 0..20)) {
        check_whole(&byte_fallback(), &ids)?;
    }

    #[test]
    fn the_first_space_is_kept_without_a_prefix_space(ids in prop::collection::vec(256..263_u32, 0..20), text in "[ aé€😀]{0,20}") {
        let spelled: Vec<u32> = text.bytes().map(u32::from).collect();
        check_whole(&byte_fallback_without_prefix(), &ids)?;
        check_whole(&byte_fallback_without_prefix(), &spelled)?;
    }

    #[test]
    fn pieces_concatenate_to_the_whole_with_every_prefix_scheme(ids in prop::collection::vec(0..8_u32, 0..20)) {
        for prepend_scheme in ["always", "first", "never"] {
            check_whole(&metaspace(prepend_scheme), &ids)?;
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(ids in prop::collection::vec(0..263_u32, 0..40)) {
        pieces(&byte_fallback(), &[], &ids);
    }

    #[test]
    fn word_pieces_concatenate_to_the_whole(ids in prop::collection::vec(1..7_u32, 0..20)) {
        check_whole(&word_piece(), &ids)?;
    }

    #[test]
    fn the_answer_continues_the_text_of_the_prompt(
        prompt in prop::collection::vec(256..263_u32, 1..8),
        ids in prop::collection::vec(256..263_u32, 0..8),
    ) {
        let tokenizer = byte_fallback();
        let whole = tokenizer.decode(&[&prompt[..], &ids].concat(), true).unwrap();
        let before = tokenizer.decode(&prompt, true).unwrap();
        prop_assume!(!before.is_empty());
        prop_assert_eq!(before + &pieces(&tokenizer, &prompt, &ids).concat(), whole);
    }
}
