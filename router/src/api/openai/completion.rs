//! `/v1/completions`: the request.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

use super::value::{OneOrMany, SamplingFields, StreamOptions, logprob_source};
use crate::api::parameter::{Parameters, ValidationError};
use crate::api::tgi::or_default;
use crate::config::RequestLimits;

/// OpenAI's limit.
const MAX_LOGPROBS: u32 = 5;

#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"model": "tgi", "prompt": "What is deep learning?", "max_tokens": 20, "temperature": 0.7}))]
pub(crate) struct CompletionRequest {
    /// Texts or token ids, one prompt or several.
    prompt: Prompts,
    /// Any name is accepted; the answer names the model that is served.
    #[serde(rename = "model")]
    #[schema(value_type = Option<String>)]
    _model: Option<IgnoredAny>,
    #[serde(flatten)]
    sampling: SamplingFields,
    /// By default as many as fit. 0 with `echo` scores the prompt.
    #[schema(minimum = 0)]
    max_tokens: Option<u32>,
    /// Answer in events as tokens come.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) stream: bool,
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<StreamOptions>)]
    pub(crate) stream_options: StreamOptions,
    /// Refused unless empty: the model completes text at its end only.
    suffix: Option<String>,
    /// Generate so many for each prompt and answer the `n` with the highest mean logprob. Not in streams.
    #[schema(default = 1)]
    best_of: Option<usize>,
    /// The answer begins with the prompt; with `logprobs` that has some too, on servers that run with `--enable-prefill-logprobs`.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) echo: bool,
    /// Alternatives with every token; `None`: no logprobs at all.
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

/// What to go on from.
#[derive(Debug)]
pub(crate) enum Prompt {
    Text(String),
    TokenIds(Vec<u32>),
}

impl Prompt {
    fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) => text.is_empty(),
            Self::TokenIds(ids) => ids.is_empty(),
        }
    }
}

impl CompletionRequest {
    /// An empty one, which some clients send always, is none.
    pub(crate) fn has_suffix(&self) -> bool {
        self.suffix.as_ref().is_some_and(|suffix| !suffix.is_empty())
    }

    /// At least one, and none is empty.
    pub(crate) fn prompts(&mut self) -> Result<Vec<Prompt>, ValidationError> {
        let given = std::mem::replace(&mut self.prompt, Prompts::TokenIds(Vec::new()));
        let prompts: Vec<_> = match given {
            Prompts::Texts(texts) => texts.into_vec().into_iter().map(Prompt::Text).collect(),
            Prompts::TokenIds(ids) => vec![Prompt::TokenIds(ids)],
            Prompts::TokenIdLists(lists) => lists.into_iter().map(Prompt::TokenIds).collect(),
        };
        let is_empty = prompts.is_empty() || prompts.iter().any(Prompt::is_empty);
        if is_empty { Err(ValidationError::NoPrompts) } else { Ok(prompts) }
    }

    /// Asks for nothing but the prompt back: whoever scores texts does. One token is generated all the same, for that
    /// is what computes the prompt, and not shown.
    pub(crate) fn hides_generated(&self) -> bool {
        self.echo && self.max_tokens == Some(0)
    }

    /// Also returns how many choices there are for each prompt: `best_of` asks for more generations than are shown.
    pub(crate) fn parameters(&mut self, limits: &RequestLimits) -> Result<(Parameters, usize), ValidationError> {
        let mut parameters = self.sampling.parameters()?;
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
        if let Some(given) = self.logprobs.filter(|&given| given > MAX_LOGPROBS) {
            return Err(ValidationError::Logprobs { field: "logprobs", max: MAX_LOGPROBS, given });
        }
        parameters.max_new_tokens = if self.hides_generated() { Some(1) } else { self.max_tokens };
        parameters.top_n_tokens = self.logprobs;
        parameters.logprob_source = logprob_source(self.logprobs.is_some());
        parameters.decoder_input_details = self.echo && self.logprobs.is_some();
        Ok((parameters, n))
    }
}

/// A number; also `true`, as chats have it, for none but the chosen ones.
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
