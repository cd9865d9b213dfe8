//! vLLM's requests and answers of `/tokenize` and `/detokenize`. A chat is that of `/v1/chat/completions`.

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::ChatRequest;
use crate::api::field::named;

/// A text to tokenize.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"prompt": "What is deep learning?", "return_token_strs": true}))]
pub(crate) struct TokenizePrompt {
    pub(crate) prompt: String,
    pub(crate) model: Option<String>,
    /// Whether the tokenizer adds its special tokens, such as the one at the beginning of a text.
    #[schema(default = true)]
    pub(crate) add_special_tokens: Option<bool>,
    /// Whether the answer has the tokens as the vocabulary spells them.
    #[schema(default = false)]
    pub(crate) return_token_strs: Option<bool>,
}

/// A chat to tokenize.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct TokenizeChat {
    #[serde(flatten, deserialize_with = "chat")]
    pub(crate) chat: ChatRequest,
    /// Whether the answer has the tokens as the vocabulary spells them.
    #[schema(default = false)]
    pub(crate) return_token_strs: Option<bool>,
}

fn chat<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ChatRequest, D::Error> {
    named(deserializer, |deserializer| ChatRequest::deserialize(deserializer))
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Tokenized {
    /// Number of tokens.
    pub(crate) count: usize,
    /// Most tokens of a prompt and its answer together.
    pub(crate) max_model_len: usize,
    pub(crate) tokens: Vec<u32>,
    /// Null unless `return_token_strs` was set.
    pub(crate) token_strs: Option<Vec<String>>,
}

/// The prompt that a request would be generated from.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Rendered {
    pub(crate) model: String,
    pub(crate) token_ids: Vec<u32>,
    /// Most tokens that the request would generate.
    pub(crate) max_tokens: u32,
}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"tokens": [1, 2, 3]}))]
pub(crate) struct DetokenizeRequest {
    pub(crate) tokens: Vec<u32>,
    pub(crate) model: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Detokenized {
    /// The text of the tokens, special ones included.
    pub(crate) prompt: String,
}
