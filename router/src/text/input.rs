//! Inputs of models that pool: a text, or a pair of texts, cut to a length without losing the tokens that the tokenizer
//! adds around them.

use std::sync::Arc;

use tokenizers::{
    Encoding, PostProcessor, Tokenizer, TruncationDirection, TruncationParams, TruncationStrategy, truncate_encodings,
};

use super::model::{EncodeError, MAX_INLINE_BYTES, TextModel};

/// What a vector is made of.
#[derive(Clone, Debug)]
pub(crate) enum Input {
    Text(Arc<str>),
    /// As the tokenizer joins two texts: a query, and a text that may answer it.
    Pair(Arc<str>, Arc<str>),
}

impl Input {
    pub(crate) fn num_characters(&self) -> usize {
        match self {
            Self::Text(text) => text.chars().count(),
            Self::Pair(query, text) => query.chars().count() + text.chars().count(),
        }
    }
}

/// The side at which a long input is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Truncation {
    Left,
    Right,
}

/// An input as a model reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct EncodedInput {
    pub(crate) token_ids: Vec<u32>,
    /// The last of them that have token type 1; all others have type 0.
    pub(crate) num_second_text_tokens: u32,
}

impl TextModel {
    /// Encodes the input, with the tokens that the tokenizer adds. `truncation`: the most tokens, and the side at which
    /// the text, or the longer one of two, is cut. `has_token_types`: whether the model reads token types.
    pub(crate) async fn encode_input(
        &self,
        input: Input,
        truncation: Option<(usize, Truncation)>,
        has_token_types: bool,
    ) -> Result<EncodedInput, EncodeError> {
        let (text, second) = match input {
            Input::Text(text) => (text, None),
            Input::Pair(query, text) => (query, Some(text)),
        };
        let num_bytes = text.len() + second.as_ref().map_or(0, |text| text.len());
        let has_token_types = has_token_types && self.gives_token_types();
        self.on_thread(num_bytes <= MAX_INLINE_BYTES, move |tokenizer| {
            let encoding = encode(tokenizer, &text, second.as_deref(), truncation)?;
            let num_second_text_tokens =
                if has_token_types { num_second_text_tokens(encoding.get_type_ids())? } else { 0 };
            Ok(EncodedInput { token_ids: encoding.get_ids().to_vec(), num_second_text_tokens })
        })
        .await
    }
}

fn encode(
    tokenizer: &Tokenizer,
    text: &str,
    second: Option<&str>,
    truncation: Option<(usize, Truncation)>,
) -> tokenizers::Result<Encoding> {
    let first = tokenizer.encode_fast(text, false)?;
    let second = second.map(|text| tokenizer.encode_fast(text, false)).transpose()?;
    let (first, second) = match truncation {
        Some((max_tokens, side)) => cut(tokenizer, first, second, max_tokens, side)?,
        None => (first, second),
    };
    tokenizer.post_process(first, second, true)
}

/// The tokens of type 1, which must be the last ones.
fn num_second_text_tokens(type_ids: &[u32]) -> tokenizers::Result<u32> {
    let first = type_ids.iter().take_while(|&&type_id| type_id == 0).count();
    match type_ids[first..].iter().find(|&&type_id| type_id != 1) {
        Some(type_id) => Err(format!(
            "gives a token of type {type_id} after one of type 1; supported are tokens of type 0, then tokens of type 1"
        )
        .into()),
        None => Ok((type_ids.len() - first) as u32),
    }
}

fn cut(
    tokenizer: &Tokenizer,
    first: Encoding,
    second: Option<Encoding>,
    max_tokens: usize,
    side: Truncation,
) -> tokenizers::Result<(Encoding, Option<Encoding>)> {
    let num_added = tokenizer.get_post_processor().map_or(0, |processor| processor.added_tokens(second.is_some()));
    let direction = match side {
        Truncation::Left => TruncationDirection::Left,
        Truncation::Right => TruncationDirection::Right,
    };
    let max_length = max_tokens.saturating_sub(num_added);
    let strategy = TruncationStrategy::LongestFirst;
    truncate_encodings(first, second, &TruncationParams { direction, max_length, strategy, stride: 0 })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    /// The types of `template` for a pair, as a model with token types or without reads them.
    async fn encoded(template: &str, has_token_types: bool, config: &str) -> Result<EncodedInput, EncodeError> {
        let pair: Vec<_> = template
            .split(' ')
            .map(|piece| {
                let (id, type_id) = piece.split_once(':').unwrap();
                match id.strip_prefix('$') {
                    Some(text) => json!({"Sequence": {"id": text, "type_id": type_id.parse::<u32>().unwrap()}}),
                    None => json!({"SpecialToken": {"id": id, "type_id": type_id.parse::<u32>().unwrap()}}),
                }
            })
            .collect();
        let tokenizer = json!({
            "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
            "pre_tokenizer": {"type": "Whitespace"}, "decoder": null,
            "post_processor": {
                "type": "TemplateProcessing", "single": [{"Sequence": {"id": "A", "type_id": 0}}], "pair": pair,
                "special_tokens": {"/": {"id": "/", "ids": [0], "tokens": ["/"]}},
            },
            "model": {"type": "WordLevel", "unk_token": "/", "vocab": {"/": 0, "a": 1, "b": 2}},
        });
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
        std::fs::write(folder.path().join("tokenizer_config.json"), config).unwrap();
        let model = TextModel::load(folder.path(), 1, None, Path::new("unused")).unwrap();
        let input = Input::Pair("a a a a".into(), "b b b".into());
        model.encode_input(input, Some((8, Truncation::Right)), has_token_types).await
    }

    #[tokio::test]
    async fn a_second_text_and_what_ends_it_have_token_type_1() {
        let bert = "/:0 $A:0 /:0 $B:1 /:1";
        let token_ids = vec![0, 1, 1, 1, 0, 2, 2, 0];
        let with = |num_second_text_tokens| EncodedInput { token_ids: token_ids.clone(), num_second_text_tokens };
        assert_eq!(encoded(bert, true, "{}").await.unwrap(), with(3));
        assert_eq!(encoded(bert, false, "{}").await.unwrap(), with(0));
        assert_eq!(encoded("/:0 $A:0 /:0 $B:0 /:0", true, "{}").await.unwrap(), with(0));
        assert_eq!(encoded("/:1 $A:1 /:1 $B:1 /:1", true, "{}").await.unwrap(), with(8));
        let names = |names| json!({"model_input_names": names}).to_string();
        assert_eq!(encoded(bert, true, &names(json!(["input_ids", "attention_mask"]))).await.unwrap(), with(0));
        assert_eq!(encoded(bert, true, &names(json!(["input_ids", "token_type_ids"]))).await.unwrap(), with(3));
    }

    #[tokio::test]
    async fn other_orders_of_token_types_are_refused_where_they_count() {
        for (template, type_id) in [("$A:0 /:0 $B:1 /:1 /:2", 2), ("$A:1 /:1 $B:0 /:0 /:0", 0)] {
            let error = encoded(template, true, "{}").await.unwrap_err().to_string();
            assert!(error.contains(&format!("a token of type {type_id} after one of type 1")), "{error}");
            assert!(encoded(template, false, "{}").await.is_ok());
        }
    }
}
