//! Logprobs, in the shapes of `/v1/chat/completions` and `/v1/completions`.

use std::collections::{BTreeMap, HashSet};

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

/// OpenAI's value for a probability of zero: JSON has no infinity.
const MIN_LOGPROB: f32 = -9999.0;

#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct ChatLogprobs {
    /// The tokens of the content and of calls, and the one that ends the answer.
    pub(crate) content: Vec<TokenLogprob>,
    /// The tokens of `reasoning_content`, and those around it that mark it. Left out if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) reasoning_content: Vec<TokenLogprob>,
    /// Always null: a model's refusal is part of its content.
    #[schema(value_type = Option<Vec<TokenLogprob>>)]
    pub(crate) refusal: (),
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub(crate) struct TokenLogprob {
    #[serde(flatten)]
    pub(crate) token: TopLogprob,
    pub(crate) top_logprobs: Vec<TopLogprob>,
}

#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
pub(crate) struct TopLogprob {
    pub(crate) token: String,
    #[serde(serialize_with = "finite")]
    pub(crate) logprob: f32,
    /// The token's bytes, also if they are a part of a character; null if unknown.
    pub(crate) bytes: Option<Vec<u8>>,
}

/// vLLM's prompt logprobs: an object from token ids for each token, with the token itself and its alternatives. Null for the
/// first token.
pub(crate) type PromptLogprobs = Vec<Option<BTreeMap<u32, PromptLogprob>>>;

#[derive(Clone, Debug, Serialize, ToSchema)]
pub(crate) struct PromptLogprob {
    #[serde(serialize_with = "finite")]
    pub(crate) logprob: f32,
    /// From 1; null for a token that is not among the alternatives.
    pub(crate) rank: Option<usize>,
    pub(crate) decoded_token: String,
}

/// Lists of equal length, with one entry for each token.
#[derive(Debug, Default, Serialize, ToSchema)]
pub(crate) struct CompletionLogprobs {
    pub(crate) tokens: Vec<String>,
    /// Null for the first token of a prompt.
    #[serde(serialize_with = "finite_list")]
    pub(crate) token_logprobs: Vec<Option<f32>>,
    #[schema(value_type = Vec<Option<std::collections::BTreeMap<String, f32>>>)]
    pub(crate) top_logprobs: Vec<Option<TopTokens>>,
    /// Number of characters of the choice's text before each token.
    pub(crate) text_offset: Vec<usize>,
}

/// An object from tokens to logprobs, best first. Of two tokens with the same text the better one is kept.
#[derive(Debug)]
pub(crate) struct TopTokens(pub(crate) Vec<(String, f32)>);

impl Serialize for TopTokens {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut seen = HashSet::new();
        let mut map = serializer.serialize_map(None)?;
        for (token, logprob) in self.0.iter().filter(|(token, _)| seen.insert(token)) {
            map.serialize_entry(token, &logprob.max(MIN_LOGPROB))?;
        }
        map.end()
    }
}

impl CompletionLogprobs {
    pub(crate) fn extend(&mut self, more: Self) {
        self.tokens.extend(more.tokens);
        self.token_logprobs.extend(more.token_logprobs);
        self.top_logprobs.extend(more.top_logprobs);
        self.text_offset.extend(more.text_offset);
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn finite<S: Serializer>(logprob: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f32(logprob.max(MIN_LOGPROB))
}

fn finite_list<S: Serializer>(logprobs: &[Option<f32>], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(logprobs.iter().map(|logprob| logprob.map(|logprob| logprob.max(MIN_LOGPROB))))
}
