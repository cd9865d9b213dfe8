//! `/v1/embeddings`.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::field::integer;
use crate::api::pooling::EmbeddingInputs;
use crate::generation::{PoolingRequest, ValidationError};
use crate::limits::RequestLimits;
use crate::sequence::Task;
use crate::telemetry::RequestSummary;
use crate::text::Prompts;

#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"model": "tgi", "input": ["What is deep learning?", "A branch of machine learning."]}))]
pub(crate) struct EmbeddingRequest {
    /// One or several inputs, each a text or token ids. `/info` reports the maximum number.
    input: EmbeddingInputs,
    /// Any name is accepted unless the server runs with `--check-model-name`.
    pub(crate) model: Option<String>,
    /// Length of the vectors, if the model was trained for shorter ones (Matryoshka).
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<usize>)]
    pub(crate) dimensions: Option<usize>,
    /// How vectors are written.
    #[serde(default)]
    pub(crate) encoding_format: Option<EncodingFormat>,
    /// Name of one of the model's prompts, which goes before each text. By default the model's default prompt, if it has one.
    prompt_name: Option<String>,
    /// Whether vectors have the length 1. By default as the model's files say.
    pub(crate) normalize: Option<bool>,
    /// Not supported: send shorter inputs, or `truncate` to `/embed`.
    truncate_prompt_tokens: Option<Value>,
    /// Not supported unless `float32`.
    embed_dtype: Option<Value>,
    /// Not supported unless `little` or `native`.
    endianness: Option<Value>,
    /// Accepted without effect.
    #[serde(rename = "user")]
    #[schema(value_type = Option<String>)]
    _user: Option<IgnoredAny>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EncodingFormat {
    /// A list of numbers.
    #[default]
    Float,
    /// 32-bit numbers, little-endian, as base64.
    Base64,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingList {
    pub(crate) object: &'static str,
    pub(crate) data: Vec<Embedding>,
    pub(crate) model: String,
    pub(crate) usage: EmbeddingUsage,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Embedding {
    object: &'static str,
    index: usize,
    embedding: EncodedVector,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
enum EncodedVector {
    Float(Vec<f32>),
    Base64(String),
}

/// Number of tokens in the inputs.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

impl EmbeddingRequest {
    /// `prompts`: of the model, whose default goes before each text.
    pub(crate) fn into_pooling(
        self,
        limits: &RequestLimits,
        prompts: &Prompts,
    ) -> Result<PoolingRequest, ValidationError> {
        self.check_supported()?;
        let prefix =
            prompts.text(self.prompt_name.as_deref()).map_err(|error| ValidationError::Prompt(error.to_string()))?;
        let inputs = self.input.into_vec(prefix, limits)?;
        Ok(PoolingRequest { task: Task::Embed, inputs, truncation: None })
    }
}

impl EmbeddingRequest {
    /// Fields of vLLM that would change the answer.
    fn check_supported(&self) -> Result<(), ValidationError> {
        let fields: [(_, _, &[&str], _); 3] = [
            (
                "truncate_prompt_tokens",
                &self.truncate_prompt_tokens,
                &[],
                "send shorter inputs, or `truncate` to /embed",
            ),
            ("embed_dtype", &self.embed_dtype, &["float32"], "vectors have 32-bit numbers"),
            ("endianness", &self.endianness, &["little", "native"], "base64 is of little-endian numbers"),
        ];
        for (field, value, supported, why) in fields {
            let is_supported = |value: &Value| value.is_null() || supported.iter().any(|known| value == known);
            if !value.as_ref().is_none_or(is_supported) {
                return Err(ValidationError::Unsupported { field, why });
            }
        }
        Ok(())
    }
}

impl EmbeddingList {
    pub(crate) fn new(model: String, vectors: Vec<Vec<f32>>, format: EncodingFormat, summary: &RequestSummary) -> Self {
        let embedding = |(index, vector)| Embedding { object: "embedding", index, embedding: encoded(vector, format) };
        Self {
            object: "list",
            data: vectors.into_iter().enumerate().map(embedding).collect(),
            model,
            usage: EmbeddingUsage::from(summary),
        }
    }
}

impl From<&RequestSummary> for EmbeddingUsage {
    fn from(summary: &RequestSummary) -> Self {
        Self { prompt_tokens: summary.num_prompt_tokens, total_tokens: summary.num_prompt_tokens }
    }
}

fn encoded(vector: Vec<f32>, format: EncodingFormat) -> EncodedVector {
    match format {
        EncodingFormat::Float => EncodedVector::Float(vector),
        EncodingFormat::Base64 => {
            let bytes: Vec<u8> = vector.into_iter().flat_map(f32::to_le_bytes).collect();
            EncodedVector::Base64(BASE64_STANDARD.encode(bytes))
        }
    }
}
