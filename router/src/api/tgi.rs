//! TGI's requests and answers, field by field. The order of an answer's fields is the order on the wire.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use super::extension::ExtensionFields;
use super::parameter::Parameters;
use crate::text::{Ending, TextToken};

/// `/generate`, `/generate_stream`, `/tokenize`, and (with `stream`) `/`.
#[derive(Debug, Deserialize)]
pub(crate) struct GenerateRequest {
    pub(crate) inputs: String,
    #[serde(default = "GenerateParameters::when_absent")]
    pub(crate) parameters: GenerateParameters,
    /// Only `/` looks at it.
    #[serde(default)]
    pub(crate) stream: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct GenerateParameters {
    pub(crate) best_of: Option<usize>,
    pub(crate) temperature: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) top_k: Option<i32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) typical_p: Option<f32>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) do_sample: bool,
    pub(crate) max_new_tokens: Option<u32>,
    pub(crate) return_full_text: Option<bool>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) stop: Vec<String>,
    pub(crate) truncate: Option<usize>,
    #[serde(deserialize_with = "or_default")]
    pub(crate) watermark: bool,
    #[serde(deserialize_with = "or_default")]
    pub(crate) details: bool,
    #[serde(deserialize_with = "or_default")]
    pub(crate) decoder_input_details: bool,
    pub(crate) seed: Option<u64>,
    pub(crate) top_n_tokens: Option<u32>,
    pub(crate) grammar: Option<Value>,
    pub(crate) adapter_id: Option<String>,
    #[serde(flatten)]
    pub(crate) extension: ExtensionFields,
}

impl GenerateParameters {
    /// COMPAT: without the key `parameters` TGI samples; with it, even empty, a missing `do_sample` means greedy.
    fn when_absent() -> Self {
        Self { do_sample: true, ..Self::default() }
    }
}

/// `null` means the default.
pub(super) fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl From<GenerateParameters> for Parameters {
    fn from(given: GenerateParameters) -> Self {
        Self {
            best_of: given.best_of,
            temperature: given.temperature,
            repetition_penalty: given.repetition_penalty,
            frequency_penalty: given.frequency_penalty,
            top_k: given.top_k,
            top_p: given.top_p,
            typical_p: given.typical_p,
            do_sample: given.do_sample,
            max_new_tokens: given.max_new_tokens,
            stop: given.stop,
            truncate: given.truncate,
            decoder_input_details: given.decoder_input_details,
            seed: given.seed,
            top_n_tokens: given.top_n_tokens,
            watermark: given.watermark,
            adapter_id: given.adapter_id,
            extension: given.extension.into(),
            ..Self::default()
        }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct GenerateResponse {
    pub(crate) generated_text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) details: Option<Details>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Details {
    pub(crate) finish_reason: FinishReason,
    pub(crate) generated_tokens: u32,
    pub(crate) seed: Option<u64>,
    /// Always empty: `decoder_input_details` is refused.
    pub(crate) prefill: [(); 0],
    pub(crate) tokens: Vec<Token>,
}

#[derive(Debug, Serialize)]
pub(crate) struct StreamResponse {
    /// From 1.
    pub(crate) index: u32,
    pub(crate) token: Token,
    pub(crate) generated_text: Option<String>,
    pub(crate) details: Option<StreamDetails>,
}

#[derive(Debug, Serialize)]
pub(crate) struct StreamDetails {
    pub(crate) finish_reason: FinishReason,
    pub(crate) generated_tokens: u32,
    pub(crate) seed: Option<u64>,
    pub(crate) input_length: usize,
}

#[derive(Debug, Serialize)]
pub(crate) struct Token {
    pub(crate) id: u32,
    pub(crate) text: String,
    pub(crate) logprob: f32,
    pub(crate) special: bool,
}

impl From<TextToken> for Token {
    fn from(token: TextToken) -> Self {
        Self { id: token.id, text: token.text, logprob: token.logprob, special: token.special }
    }
}

#[derive(Clone, Copy, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    Length,
    EosToken,
    StopSequence,
}

impl From<Ending> for FinishReason {
    fn from(ending: Ending) -> Self {
        match ending {
            Ending::Length => Self::Length,
            Ending::EosToken => Self::EosToken,
            Ending::StopString => Self::StopSequence,
        }
    }
}

/// One element of `/tokenize`'s answer.
#[derive(Debug, Serialize)]
pub(crate) struct SimpleToken {
    pub(crate) id: u32,
    pub(crate) text: String,
    pub(crate) start: usize,
    pub(crate) stop: usize,
}

#[derive(Debug, Serialize)]
pub(crate) struct Info {
    pub(crate) model_id: String,
    pub(crate) model_sha: Option<String>,
    pub(crate) model_pipeline_tag: Option<String>,
    pub(crate) max_concurrent_requests: usize,
    pub(crate) max_best_of: usize,
    pub(crate) max_stop_sequences: usize,
    pub(crate) max_input_tokens: usize,
    pub(crate) max_total_tokens: usize,
    pub(crate) validation_workers: usize,
    pub(crate) max_client_batch_size: usize,
    pub(crate) router: &'static str,
    pub(crate) version: &'static str,
}
