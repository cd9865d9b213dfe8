//! TGI's requests and answers, field by field. Fields of answers are declared in the order they have on the wire.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::extension::ExtensionFields;
use super::field::or_default;
use super::grammar::GrammarField;
use super::prediction::VerifiedDraft;
use crate::config::Config;
use crate::config::SamplingDefaults;
use crate::generation::{
    self, GenerationRequest, ImageSource, Parameters, Prompt, PromptToken, StopText, TextToken, TopToken,
    ValidationError,
};
use crate::sequence::DraftCount;

/// `/generate`, `/generate_stream`, `/tokenize`, and (with `stream`) `/`.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"inputs": "What is deep learning?", "parameters": {"max_new_tokens": 20, "do_sample": true, "temperature": 0.7, "top_p": 0.95, "stop": ["\n\n"], "details": true}}))]
pub(crate) struct GenerateRequest {
    /// The prompt. No chat template is applied.
    #[schema(min_length = 1)]
    pub(crate) inputs: String,
    /// Without this key sampling is on. With it, even if empty, sampling is off unless `do_sample` or a sampling parameter is given.
    #[serde(default = "GenerateParameters::when_absent")]
    pub(crate) parameters: GenerateParameters,
    /// Answer with a stream of events. Only `/` reads this field.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) stream: bool,
}

/// The parameters of a generation. `/info` reports the limits that are set by flags.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct GenerateParameters {
    /// Number of generations, of which the one with the highest mean logprob is the answer. Requires sampling; not with `seed` and not in streams.
    #[schema(default = 1)]
    pub(crate) best_of: Option<usize>,
    /// Divides the logits before sampling.
    #[schema(exclusive_minimum = 0, default = 1)]
    pub(crate) temperature: Option<f32>,
    /// Divides the logits of tokens that occurred in the prompt or the answer. 1 means no penalty.
    #[schema(exclusive_minimum = 0, default = 1)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtracted from a token's logit once for each time that the token was generated.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    pub(crate) frequency_penalty: Option<f32>,
    /// Sample from the `top_k` most probable tokens.
    #[schema(minimum = 1)]
    pub(crate) top_k: Option<i32>,
    /// Sample from the smallest set of most probable tokens whose probabilities add up to `top_p`.
    #[schema(exclusive_minimum = 0, exclusive_maximum = 1)]
    pub(crate) top_p: Option<f32>,
    /// Sample from the smallest set of locally typical tokens whose probabilities add up to `typical_p`.
    #[schema(exclusive_minimum = 0, exclusive_maximum = 1)]
    pub(crate) typical_p: Option<f32>,
    /// Sample instead of taking the most probable token. Any parameter that only makes sense with sampling turns it on.
    #[schema(default = false)]
    pub(crate) do_sample: Option<bool>,
    /// Maximum number of generated tokens. By default limited only by the context.
    #[schema(minimum = 1)]
    pub(crate) max_new_tokens: Option<u32>,
    /// Begin the answer with the prompt. On `/` the default is true for text-generation models.
    #[schema(default = false)]
    pub(crate) return_full_text: Option<bool>,
    /// Strings that end the answer. The answer includes the one that ended it.
    #[schema(value_type = Option<Vec<String>>)]
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) stop: Vec<String>,
    /// Keep only the last `truncate` tokens of the prompt.
    #[schema(minimum = 1)]
    pub(crate) truncate: Option<usize>,
    /// Watermark the text, so that `penstock_server.watermark` detects it.
    #[schema(value_type = Option<bool>, default = false)]
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) watermark: bool,
    /// Include tokens, logprobs and the finish reason in the answer.
    #[schema(value_type = Option<bool>, default = false)]
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) details: bool,
    /// Include the prompt's logprobs, on servers that run with `--enable-prefill-logprobs`. Not in streams.
    #[schema(value_type = Option<bool>, default = false)]
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) decoder_input_details: bool,
    /// Seed of the sampling: the same request with the same seed gives the same tokens. By default random.
    pub(crate) seed: Option<u64>,
    /// Number of most probable alternatives to return with each token.
    #[schema(default = 0)]
    pub(crate) top_n_tokens: Option<u32>,
    /// Grammar that the answer must match.
    pub(crate) grammar: Option<GrammarField>,
    /// OpenAI's name for `grammar`.
    pub(crate) response_format: Option<GrammarField>,
    /// Name of the LoRA adapter that changes the model for this request, one of the server's `--lora-adapters`.
    pub(crate) adapter_id: Option<String>,
    #[serde(flatten)]
    pub(crate) extension: ExtensionFields,
}

impl GenerateRequest {
    /// The request in the form that all dialects share.
    pub(crate) fn into_generation(self, config: &Config, streams: bool) -> Result<GenerationRequest, ValidationError> {
        let mut parameters = self.parameters.into_parameters(config)?;
        if streams {
            check_stream(&parameters)?;
        }
        // COMPAT: without the flag `prefill` is empty; asking for it is not an error.
        parameters.decoder_input_details &= config.prefill_logprobs;
        let (text, images) = split_images(self.inputs, config);
        let prompts = vec![if images.is_empty() { Prompt::Text(text) } else { Prompt::Illustrated(text, images) }];
        Ok(GenerationRequest { prompts, parameters, stop_text: StopText::Kept, streams })
    }
}

/// The images in `inputs`, and the text with placeholders; for a model that reads none, `inputs` is a text.
pub(crate) fn split_images(inputs: String, config: &Config) -> (Arc<str>, Vec<ImageSource>) {
    match &config.image_input {
        None => (inputs.into(), Vec::new()),
        Some(input) => {
            let (text, images) = generation::take_from_text(&inputs, &input.placeholder);
            (text.into(), images)
        }
    }
}

impl GenerateParameters {
    /// COMPAT: without the key `parameters` TGI samples; with it, even if empty, a missing `do_sample` means greedy.
    pub(crate) fn when_absent() -> Self {
        Self { do_sample: Some(true), ..Self::default() }
    }

    fn into_parameters(self, config: &Config) -> Result<Parameters, ValidationError> {
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
            max_top_n_tokens: Some(config.limits.max_top_n_tokens),
            grammar: self.grammar.or(self.response_format).and_then(|field| field.0),
            adapter_id: self.adapter_id,
            extension: self.extension.into(),
            ..Parameters::default()
        })
    }
}

/// Refuses what TGI's streams cannot carry: their events do not name a generation.
fn check_stream(parameters: &Parameters) -> Result<(), ValidationError> {
    if parameters.best_of.is_some_and(|best_of| best_of != 1) {
        return Err(ValidationError::BestOfStream);
    }
    if parameters.decoder_input_details {
        return Err(ValidationError::PrefillDetailsStream);
    }
    if parameters.extension.n.is_some_and(|n| n > 1) {
        return Err(ValidationError::GenerationsStream);
    }
    Ok(())
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
    /// The other generations of a request with `best_of` or `n`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) best_of_sequences: Option<Vec<BestOfSequence>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) top_tokens: Vec<Vec<Token>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) draft_tokens: Option<DraftTokens>,
    /// Only with `return_drafts`; left out if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) drafts: Vec<VerifiedDraft>,
}

/// The draft tokens of a generation. Left out if no step verified any, as without `--speculate`.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
pub(crate) struct DraftTokens {
    /// Draft tokens that steps compared with the tokens they sampled.
    verified: u32,
    /// Draft tokens that were right, and so are part of the answer.
    accepted: u32,
}

impl DraftTokens {
    pub(crate) fn of(drafts: DraftCount) -> Option<Self> {
        let DraftCount { num_verified: verified, num_right: accepted } = drafts;
        (verified > 0).then_some(Self { verified, accepted })
    }
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BestOfSequence {
    pub(crate) generated_text: String,
    pub(crate) finish_reason: FinishReason,
    pub(crate) generated_tokens: u32,
    pub(crate) seed: Option<u64>,
    /// The prompt's tokens. Empty unless `decoder_input_details` was set and the server allows it.
    pub(crate) prefill: Vec<PrefillToken>,
    pub(crate) tokens: Vec<Token>,
    /// One list for each token. Left out without `top_n_tokens`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) top_tokens: Vec<Vec<Token>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) draft_tokens: Option<DraftTokens>,
    /// Only with `return_drafts`; left out if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) drafts: Vec<VerifiedDraft>,
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StreamResponse {
    /// Position of the token in the answer, from 1.
    pub(crate) index: u32,
    pub(crate) token: Token,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) top_tokens: Vec<Token>,
    pub(crate) generated_text: Option<String>,
    pub(crate) details: Option<StreamDetails>,
}

impl StreamResponse {
    /// Appends the JSON that serde_json writes.
    ///
    /// PERF: serde_json searches the name of every field for characters to escape: it takes three times the instructions for an event of a token
    /// (docs/adr/streams-and-connections.md).
    pub(crate) fn write_json(&self, json: &mut Vec<u8>) -> serde_json::Result<()> {
        let Self { index, token: Token { id, text, logprob, special }, top_tokens, generated_text, details } = self;
        if !top_tokens.is_empty() || generated_text.is_some() || details.is_some() {
            return serde_json::to_writer(json, self);
        }
        append(json, r#"{"index":"#, index)?;
        append(json, r#","token":{"id":"#, id)?;
        append(json, r#","text":"#, text)?;
        append(json, r#","logprob":"#, logprob)?;
        append(json, r#","special":"#, special)?;
        json.extend_from_slice(br#"},"generated_text":null,"details":null}"#);
        Ok(())
    }
}

fn append(json: &mut Vec<u8>, name: &str, value: &impl Serialize) -> serde_json::Result<()> {
    json.extend_from_slice(name.as_bytes());
    serde_json::to_writer(json, value)
}

#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct StreamDetails {
    pub(crate) finish_reason: FinishReason,
    pub(crate) generated_tokens: u32,
    pub(crate) seed: Option<u64>,
    pub(crate) input_length: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) draft_tokens: Option<DraftTokens>,
    /// Only with `return_drafts`; left out if there are none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) drafts: Vec<VerifiedDraft>,
}

/// A token of the prompt.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct PrefillToken {
    id: u32,
    text: String,
    /// Null for the first token.
    logprob: Option<f32>,
}

/// A generated token. A logprob that is not a number is written as null.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Token {
    pub(crate) id: u32,
    pub(crate) text: String,
    #[schema(value_type = Option<f32>)]
    pub(crate) logprob: f32,
    pub(crate) special: bool,
}

impl Token {
    /// Splits off the most probable alternatives.
    pub(crate) fn with_top(token: TextToken) -> (Self, Vec<Self>) {
        let TextToken { id, text, logprob, special, top } = token;
        (Self { id, text, logprob, special }, top.into_iter().map(Into::into).collect())
    }
}

impl From<TopToken> for Token {
    fn from(token: TopToken) -> Self {
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
    /// `max_new_tokens` tokens were generated, or the context is full.
    Length,
    /// The model generated an end-of-sequence token.
    EosToken,
    /// The answer reached one of the strings in `stop`.
    StopSequence,
}

impl From<generation::FinishReason> for FinishReason {
    fn from(reason: generation::FinishReason) -> Self {
        match reason {
            generation::FinishReason::Length => Self::Length,
            generation::FinishReason::StopToken => Self::EosToken,
            generation::FinishReason::StopString(_) => Self::StopSequence,
        }
    }
}

/// A token of `/tokenize`'s answer.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SimpleToken {
    pub(crate) id: u32,
    pub(crate) text: String,
    /// Byte offset of the token's text in the input.
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
    /// The model's parameters for requests on the routes of OpenAI and Anthropic that leave them out.
    pub(crate) sampling_defaults: SamplingDefaults,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_event_is_written_as_serde_json_writes_it(
            index in any::<u32>(),
            id in any::<u32>(),
            text in any::<String>(),
            logprob in any::<f32>(),
            special in any::<bool>(),
            has_top_tokens in any::<bool>(),
            generated_text in any::<Option<String>>(),
        ) {
            let token = || Token { id, text: text.clone(), logprob, special };
            let top_tokens = has_top_tokens.then(token).into_iter().collect();
            let event = StreamResponse { index, token: token(), top_tokens, generated_text, details: None };
            let mut json = Vec::new();
            event.write_json(&mut json).unwrap();
            prop_assert_eq!(String::from_utf8(json).unwrap(), serde_json::to_string(&event).unwrap());
        }
    }
}
