//! The request of `/v1/completions`.

use serde::{Deserialize, Deserializer};
use serde_json::Value;
use utoipa::ToSchema;

use super::value::{IgnoredFields, OneOrMany, SamplingFields, StreamOptions};
use super::vllm::VllmFields;
use crate::api::error::{ApiError, COMPLETION_NAMES};
use crate::api::field::{integer, or_default};
use crate::config::Config;
use crate::config::SamplingDefaults;
use crate::generation::{FieldNames, GenerationRequest, Parameters, Prompt, ValidationError};
use crate::limits::RequestLimits;

/// OpenAI's limit, which `--max-top-n-tokens` raises.
const MAX_LOGPROBS: u32 = 5;
/// OpenAI's default of `max_tokens`.
const DEFAULT_MAX_TOKENS: u32 = 16;

#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"model": "tgi", "prompt": "What is deep learning?", "max_tokens": 20, "temperature": 0.7}))]
pub(crate) struct CompletionRequest {
    /// One or several prompts, each a text or token ids. `prompt_token_ids` is another name of this field.
    #[serde(alias = "prompt_token_ids")]
    prompt: Prompts,
    /// The answer names the served model, whatever name is accepted here.
    pub(crate) model: Option<String>,
    #[serde(flatten)]
    sampling: SamplingFields,
    #[serde(flatten)]
    pub(crate) vllm: VllmFields,
    #[serde(flatten)]
    _ignored: IgnoredFields,
    /// Maximum number of generated tokens. 0 with `echo` scores the prompt.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<u32>, minimum = 0, default = 16)]
    max_tokens: Option<u32>,
    /// Answer with a stream of events.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) stream: bool,
    pub(crate) stream_options: Option<StreamOptions>,
    /// Not supported unless empty: the model completes text only at its end.
    suffix: Option<String>,
    /// Number of generations for each prompt, of which the `n` with the highest mean logprob are returned. Not in streams.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<usize>, default = 1)]
    best_of: Option<usize>,
    /// Begin the answer with the prompt. With `logprobs` also the prompt's logprobs, on servers that run with `--enable-prefill-logprobs`.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) echo: bool,
    /// Not supported: a prompt without a chat template does not tell thoughts from text; send a chat.
    thinking_token_budget: Option<Value>,
    /// Include logprobs, with this number of most probable alternatives for each token.
    #[serde(default, deserialize_with = "num_logprobs")]
    #[schema(value_type = Option<NumLogprobs>)]
    pub(crate) logprobs: Option<u32>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "a string, a list of strings, a list of token ids, or a list of such lists")]
enum Prompts {
    Texts(OneOrMany),
    TokenIds(Vec<u32>),
    TokenIdLists(Vec<Vec<u32>>),
}

impl Prompts {
    /// At least one prompt, none of which is empty.
    fn into_vec(self) -> Result<Vec<Prompt>, ValidationError> {
        let (prompts, has_empty): (Vec<_>, bool) = match self {
            Self::Texts(texts) => {
                let texts = texts.into_vec();
                let has_empty = texts.iter().any(String::is_empty);
                (texts.into_iter().map(|text| Prompt::Text(text.into())).collect(), has_empty)
            }
            Self::TokenIds(ids) => return Self::TokenIdLists(vec![ids]).into_vec(),
            Self::TokenIdLists(lists) => {
                let has_empty = lists.iter().any(Vec::is_empty);
                (lists.into_iter().map(Prompt::TokenIds).collect(), has_empty)
            }
        };
        if has_empty || prompts.is_empty() { Err(ValidationError::NoPrompts) } else { Ok(prompts) }
    }
}

impl CompletionRequest {
    /// The request in the form that all dialects share, and the number of choices to show for each prompt: `best_of`
    /// asks for more generations than are shown. `defaults` fill in what the request leaves out.
    pub(crate) fn into_generation(
        mut self,
        config: &Config,
        defaults: &SamplingDefaults,
    ) -> Result<(GenerationRequest, usize), ApiError> {
        // Some clients always send an empty suffix.
        if self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::Suffix);
        }
        if self.thinking_token_budget.is_some() {
            let why = "a prompt without a chat template does not tell thoughts from text; send a chat";
            return Err(ValidationError::Unsupported { field: "thinking_token_budget", why }.into());
        }
        if self.stream_options.is_some() && !self.stream {
            return Err(ValidationError::StreamOptions.into());
        }
        let prompts = std::mem::replace(&mut self.prompt, Prompts::TokenIds(Vec::new())).into_vec()?;
        let max = config.limits.max_client_batch_size;
        if prompts.len() > max {
            return Err(ApiError::BatchSize { given: prompts.len(), max });
        }
        if self.echo && !config.decoder_prefix.is_empty() {
            let why = "the model is an encoder–decoder, whose answer does not go on from the prompt";
            return Err(ValidationError::Unsupported { field: "echo", why }.into());
        }
        let (mut parameters, num_choices) = self.parameters(&config.limits, defaults)?;
        if parameters.decoder_input_details && !config.prefill_logprobs {
            let why = "with `logprobs` it needs a server that runs with --enable-prefill-logprobs";
            return Err(ValidationError::Unsupported { field: "echo", why }.into());
        }
        let stop_text = self.vllm.apply(&mut parameters, config, self.stream)?;
        let request = GenerationRequest { prompts, parameters, stop_text, streams: self.stream };
        Ok((request, num_choices))
    }

    /// What this request calls its fields.
    pub(crate) fn names(&self) -> FieldNames {
        FieldNames { grammar: self.sampling.constraint_name().unwrap_or(COMPLETION_NAMES.grammar), ..COMPLETION_NAMES }
    }

    /// Whether the answer shows the drafts that steps verified.
    pub(crate) fn shows_drafts(&self) -> bool {
        self.sampling.extension.return_drafts
    }

    /// Whether the request only scores its prompt. One token is generated anyway, because that computes the prompt's
    /// logprobs, and is not shown.
    pub(crate) fn hides_generated(&self) -> bool {
        self.echo && self.max_tokens == Some(0)
    }

    fn parameters(
        &mut self,
        limits: &RequestLimits,
        defaults: &SamplingDefaults,
    ) -> Result<(Parameters, usize), ValidationError> {
        let mut parameters = self.sampling.parameters(defaults)?;
        let n = parameters.extension.n.unwrap_or(1);
        let best_of = self.best_of.unwrap_or(n);
        if best_of < n {
            return Err(ValidationError::BestOfBelowN { best_of, n });
        }
        if best_of > n {
            if self.stream {
                return Err(ValidationError::BestOfStream);
            }
            if best_of > limits.max_best_of {
                return Err(ValidationError::BestOf { max: limits.max_best_of, given: best_of });
            }
            if n > 0 {
                parameters.extension.n = Some(best_of);
            }
        }
        let max = MAX_LOGPROBS.max(limits.max_top_n_tokens);
        if let Some(given) = self.logprobs.filter(|&given| given > max) {
            return Err(ValidationError::Logprobs { field: "logprobs", max, given });
        }
        parameters.max_new_tokens = if self.hides_generated() { Some(1) } else { self.max_tokens };
        // As in vLLM, OpenAI's default stays, unless the model's is smaller.
        parameters.default_new_tokens = Some(DEFAULT_MAX_TOKENS.min(defaults.max_new_tokens.unwrap_or(u32::MAX)));
        parameters.top_n_tokens = self.logprobs;
        parameters.model_logprobs = self.logprobs.is_some();
        parameters.decoder_input_details = self.echo && self.logprobs.is_some();
        Ok((parameters, n))
    }
}

/// A number. As in chats, `true` means the logprobs of the chosen tokens only.
#[derive(Deserialize, ToSchema)]
#[serde(untagged, expecting = "a number of tokens")]
enum NumLogprobs {
    Number(u32),
    Bool(bool),
}

fn num_logprobs<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u32>, D::Error> {
    Ok(match Option::deserialize(deserializer)? {
        None | Some(NumLogprobs::Bool(false)) => None,
        Some(NumLogprobs::Bool(true)) => Some(0),
        Some(NumLogprobs::Number(number)) => Some(number),
    })
}
