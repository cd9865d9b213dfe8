//! TGI's requests and answers, field by field. The order of an answer's fields is the order on the wire.

use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::extension::ExtensionFields;
use super::grammar::GrammarField;
use super::parameter::{Parameters, ValidationError};
use crate::config::Config;
use crate::text::{Ending, PromptToken, TextToken, TopText};

/// `/generate`, `/generate_stream`, `/tokenize`, and (with `stream`) `/`.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"inputs": "What is deep learning?", "parameters": {"max_new_tokens": 20, "do_sample": true, "temperature": 0.7, "top_p": 0.95, "stop": ["\n\n"], "details": true}}))]
pub(crate) struct GenerateRequest {
    /// The prompt, as it is: no template is applied.
    #[schema(min_length = 1)]
    pub(crate) inputs: String,
    /// Without this key sampling is on; with it, even empty, it is off unless `do_sample` or a sampling parameter is given.
    #[serde(default = "GenerateParameters::when_absent")]
    pub(crate) parameters: GenerateParameters,
    /// Only `/` looks at it.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) stream: bool,
}

/// What a generation may be asked for. Limits that a flag sets are in `/info`.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct GenerateParameters {
    /// Generate so many and answer the one with the highest mean logprob. Needs sampling; not with `seed`, not in streams.
    #[schema(default = 1)]
    pub(crate) best_of: Option<usize>,
    /// Logits are divided by it.
    #[schema(exclusive_minimum = 0, default = 1)]
    pub(crate) temperature: Option<f32>,
    /// Divides the logits of tokens that occurred, the prompt included. 1 is none.
    #[schema(exclusive_minimum = 0, default = 1)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtracted from the logit of a generated token, once for each time.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Sample from the so many most probable tokens.
    #[schema(minimum = 1)]
    pub(crate) top_k: Option<i32>,
    /// Sample from the smallest set of tokens with so much probability.
    #[schema(exclusive_minimum = 0, exclusive_maximum = 1)]
    pub(crate) top_p: Option<f32>,
    /// Sample from the locally typical tokens with so much probability.
    #[schema(exclusive_minimum = 0, exclusive_maximum = 1)]
    pub(crate) typical_p: Option<f32>,
    /// Sample instead of taking the most probable token. On whenever a parameter that only makes sense with sampling is given.
    #[schema(default = false)]
    pub(crate) do_sample: Option<bool>,
    /// By default as many as fit.
    #[schema(minimum = 1)]
    pub(crate) max_new_tokens: Option<u32>,
    /// The answer begins with the prompt. On `/` the default is true for models that write on.
    #[schema(default = false)]
    pub(crate) return_full_text: Option<bool>,
    /// The answer ends with one of these, and shows it.
    #[schema(value_type = Option<Vec<String>>)]
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) stop: Vec<String>,
    /// Keep only the so many last tokens of the prompt.
    #[schema(minimum = 1)]
    pub(crate) truncate: Option<usize>,
    /// Mark the text so that `penstock_server.watermark` recognises it.
    #[schema(value_type = Option<bool>, default = false)]
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) watermark: bool,
    /// Answer with tokens, logprobs and the reason why it ended.
    #[schema(value_type = Option<bool>, default = false)]
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) details: bool,
    /// The prompt's logprobs, on servers that run with `--enable-prefill-logprobs`. Not in streams.
    #[schema(value_type = Option<bool>, default = false)]
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) decoder_input_details: bool,
    /// The same tokens for the same request. By default a random one.
    pub(crate) seed: Option<u64>,
    /// With each token, so many of the most probable ones in its place.
    #[schema(default = 0)]
    pub(crate) top_n_tokens: Option<u32>,
    /// What the answer must match.
    pub(crate) grammar: Option<GrammarField>,
    /// OpenAI's name for it.
    pub(crate) response_format: Option<GrammarField>,
    /// Refused: no adapters are served.
    pub(crate) adapter_id: Option<String>,
    #[serde(flatten)]
    pub(crate) extension: ExtensionFields,
}

impl GenerateParameters {
    /// COMPAT: without the key `parameters` TGI samples; with it, even empty, a missing `do_sample` means greedy.
    pub(crate) fn when_absent() -> Self {
        Self { do_sample: Some(true), ..Self::default() }
    }

    pub(crate) fn into_parameters(self, config: &Config) -> Result<Parameters, ValidationError> {
        if self.grammar.is_some() && self.response_format.is_some() {
            return Err(ValidationError::TwoGrammars);
        }
        Ok(Parameters {
            best_of: self.best_of,
            temperature: self.temperature,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            top_k: self.top_k,
            top_p: self.top_p,
            typical_p: self.typical_p,
            do_sample: self.do_sample.unwrap_or(false),
            max_new_tokens: self.max_new_tokens,
            stop: self.stop,
            truncate: self.truncate,
            watermark: self.watermark,
            decoder_input_details: self.decoder_input_details,
            seed: self.seed,
            top_n_tokens: self.top_n_tokens,
            max_top_n_tokens: config.limits.max_top_n_tokens,
            grammar: self.grammar.or(self.response_format).and_then(|field| field.0),
            adapter_id: self.adapter_id,
            extension: self.extension.into(),
            ..Parameters::default()
        })
    }
}

/// `null` means the default.
pub(super) fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct GenerateResponse {
    pub(crate) generated_text: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) details: Option<Details>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Details {
    pub(crate) finish_reason: FinishReason,
    pub(crate) generated_tokens: u32,
    pub(crate) seed: Option<u64>,
    pub(crate) prefill: Vec<PrefillToken>,
    pub(crate) tokens: Vec<Token>,
    /// The generations that did not win.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) best_of_sequences: Option<Vec<BestOfSequence>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) top_tokens: Vec<Vec<Token>>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BestOfSequence {
    pub(crate) generated_text: String,
    pub(crate) finish_reason: FinishReason,
    pub(crate) generated_tokens: u32,
    pub(crate) seed: Option<u64>,
    /// Empty unless it was asked for and the server allows it.
    pub(crate) prefill: Vec<PrefillToken>,
    pub(crate) tokens: Vec<Token>,
    /// One list for each token, or none at all.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) top_tokens: Vec<Vec<Token>>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StreamResponse {
    /// From 1.
    pub(crate) index: u32,
    pub(crate) token: Token,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) top_tokens: Vec<Token>,
    pub(crate) generated_text: Option<String>,
    pub(crate) details: Option<StreamDetails>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StreamDetails {
    pub(crate) finish_reason: FinishReason,
    pub(crate) generated_tokens: u32,
    pub(crate) seed: Option<u64>,
    pub(crate) input_length: usize,
}

/// A token of the prompt.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PrefillToken {
    id: u32,
    text: String,
    /// Null for the first one.
    logprob: Option<f32>,
}

/// A logprob that is not a number is written as null.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Token {
    pub(crate) id: u32,
    pub(crate) text: String,
    #[schema(value_type = Option<f32>)]
    pub(crate) logprob: f32,
    pub(crate) special: bool,
}

impl Token {
    /// A generated token, and the most probable ones in its place.
    pub(crate) fn with_top(token: TextToken) -> (Self, Vec<Self>) {
        let TextToken { id, text, logprob, special, top } = token;
        (Self { id, text, logprob, special }, top.into_iter().map(Into::into).collect())
    }
}

impl From<TopText> for Token {
    fn from(token: TopText) -> Self {
        Self { id: token.id, text: token.text, logprob: token.logprob, special: token.special }
    }
}

impl From<PromptToken> for PrefillToken {
    fn from(token: PromptToken) -> Self {
        Self { id: token.id, text: token.text, logprob: token.logprob }
    }
}

#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FinishReason {
    /// `max_new_tokens` were generated, or the context is full.
    Length,
    /// The model ended it.
    EosToken,
    /// One of `stop` was generated.
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
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SimpleToken {
    pub(crate) id: u32,
    pub(crate) text: String,
    /// Byte offsets.
    pub(crate) start: usize,
    pub(crate) stop: usize,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ChatTokenizeResponse {
    pub(crate) tokenize_response: Vec<SimpleToken>,
    pub(crate) templated_text: String,
}

#[derive(Debug, Serialize, ToSchema)]
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
