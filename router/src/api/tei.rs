//! text-embeddings-inference's requests and answers: `/embed` and `/rerank`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::field::{integer, or_default};
use super::pooling::{EmbeddingInputs, check_inputs};
use crate::generation::{PoolingInput, PoolingRequest, ValidationError};
use crate::limits::RequestLimits;
use crate::sequence::Task;
use crate::text::{Input, Prompts, Truncation};

#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"inputs": ["What is deep learning?", "A branch of machine learning."]}))]
pub(crate) struct EmbedRequest {
    /// One or several texts or lists of token ids. `/info` reports the maximum number.
    inputs: EmbeddingInputs,
    /// Whether vectors have the length 1.
    #[serde(default = "yes")]
    #[schema(value_type = Option<bool>, default = true)]
    pub(crate) normalize: Option<bool>,
    #[serde(flatten)]
    truncation: TruncationFields,
    /// Name of one of the model's prompts, which goes before each text. By default the model's default prompt, if it has one.
    prompt_name: Option<String>,
    /// Length of the vectors, if the model was trained for shorter ones (Matryoshka).
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<usize>)]
    pub(crate) dimensions: Option<usize>,
    /// Vectors are always lists of numbers; `/v1/embeddings` also writes them as base64.
    #[serde(rename = "encoding_format")]
    #[schema(inline)]
    _encoding_format: Option<ListFormat>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ListFormat {
    Float,
}

#[derive(Debug, Default, Deserialize, ToSchema)]
struct TruncationFields {
    /// Cut inputs that are too long, instead of refusing them.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    truncate: bool,
    /// The side at which they are cut.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<Side>, default = "right")]
    truncation_direction: Side,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum Side {
    #[serde(alias = "Left")]
    Left,
    #[default]
    #[serde(alias = "Right")]
    Right,
}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"query": "What is deep learning?", "texts": ["A branch of machine learning.", "A fish."]}))]
pub(crate) struct RerankRequest {
    query: String,
    /// The texts to score. `/info` reports the maximum number.
    texts: Vec<String>,
    /// Return the model's logits instead of probabilities.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) raw_scores: bool,
    /// Repeat the texts in the answer.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) return_text: bool,
    #[serde(flatten)]
    truncation: TruncationFields,
}

/// A text's score. The answer lists the most relevant text first.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Rank {
    /// Position in the request's `texts`.
    index: usize,
    /// Only with `return_text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    score: f32,
}

fn yes() -> Option<bool> {
    Some(true)
}

impl TruncationFields {
    fn truncation(&self) -> Option<Truncation> {
        self.truncate.then_some(match self.truncation_direction {
            Side::Left => Truncation::Left,
            Side::Right => Truncation::Right,
        })
    }
}

impl EmbedRequest {
    /// `prompts`: of the model.
    pub(crate) fn into_pooling(
        self,
        limits: &RequestLimits,
        prompts: &Prompts,
    ) -> Result<PoolingRequest, ValidationError> {
        let name = self.prompt_name.as_deref();
        let prefix = prompts.text(name).map_err(|error| ValidationError::Prompt(error.to_string()))?;
        let inputs = self.inputs.into_vec(prefix, limits)?;
        Ok(PoolingRequest { task: Task::Embed, inputs, truncation: self.truncation.truncation() })
    }
}

impl RerankRequest {
    /// The texts, and the request.
    pub(crate) fn into_pooling(self, limits: &RequestLimits) -> Result<(Vec<String>, PoolingRequest), ValidationError> {
        let truncation = self.truncation.truncation();
        let inputs = pairs(&self.query, &self.texts, limits)?;
        Ok((self.texts, PoolingRequest { task: Task::Rerank, inputs, truncation }))
    }
}

/// The query with each of the texts.
pub(super) fn pairs(
    query: &str,
    texts: &[String],
    limits: &RequestLimits,
) -> Result<Vec<PoolingInput>, ValidationError> {
    if query.is_empty() || texts.iter().any(String::is_empty) {
        return Err(ValidationError::EmptyInput);
    }
    check_inputs(texts.len(), limits)?;
    let pair = |text: &String| PoolingInput::Text(Input::Pair(query.into(), text.as_str().into()));
    Ok(texts.iter().map(pair).collect())
}

impl Rank {
    /// `scores`: of the texts, in their order. `texts`: None unless they are repeated.
    pub(crate) fn list(scores: Vec<f32>, texts: Option<Vec<String>>) -> Vec<Self> {
        let mut texts = texts.map(Vec::into_iter);
        let rank = |(index, score)| Self { index, text: texts.as_mut().and_then(Iterator::next), score };
        let mut ranks: Vec<_> = scores.into_iter().enumerate().map(rank).collect();
        ranks.sort_by(|one, other| other.score.total_cmp(&one.score));
        ranks
    }
}

/// The probability of which `logit` is the logit.
pub(crate) fn probability(logit: f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_relevant_text_is_first() {
        let texts = Some(vec!["a".to_owned(), "b".to_owned(), "c".to_owned()]);
        let ranks = Rank::list(vec![-1.0, 2.0, 0.5], texts);
        let found: Vec<_> = ranks.into_iter().map(|rank| (rank.index, rank.text.unwrap(), rank.score)).collect();
        assert_eq!(found, [(1, "b".to_owned(), 2.0), (2, "c".to_owned(), 0.5), (0, "a".to_owned(), -1.0)]);
        assert_eq!(probability(0.0), 0.5);
    }
}
