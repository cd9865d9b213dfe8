//! Fields that both OpenAI routes have. Clients send some of them in more than one shape.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use utoipa::ToSchema;

use super::constraint::ConstraintFields;
use super::refused::RefusedFields;
use crate::api::extension::ExtensionFields;
use crate::api::field::{integer, named};
use crate::config::SamplingDefaults;
use crate::generation::{Extension, Parameters, ValidationError};

/// `"stop"` or `["stop", …]`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "a string or a list of strings")]
pub(crate) enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

impl OneOrMany {
    pub(crate) fn into_vec(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Many(texts) => texts,
        }
    }
}

/// Accepts negative seeds, as OpenAI does.
fn seed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "an integer of 64 bits")]
    enum Seed {
        Unsigned(u64),
        Signed(#[serde(deserialize_with = "signed")] i64),
    }
    fn signed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<i64, D::Error> {
        integer(deserializer)?.ok_or_else(|| serde::de::Error::custom("null"))
    }
    Ok(Option::deserialize(deserializer)?.map(|seed| match seed {
        Seed::Unsigned(seed) => seed,
        Seed::Signed(seed) => seed.cast_unsigned(),
    }))
}

/// Options of a streamed answer, which only streams may have.
#[derive(Clone, Copy, Debug, Default, Deserialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// End the stream with a chunk that has the usage and no choices.
    #[serde(default, deserialize_with = "crate::api::field::or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) include_usage: bool,
    /// Give every chunk the usage so far.
    #[serde(default, deserialize_with = "crate::api::field::or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) continuous_usage_stats: bool,
    /// Accepted without effect: no chunk is padded.
    #[serde(rename = "include_obfuscation")]
    #[schema(value_type = Option<bool>)]
    _include_obfuscation: Option<IgnoredAny>,
}

/// Sampling parameters, stop strings and grammar.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(crate) struct SamplingFields {
    /// Divides the logits before sampling. 0 means greedy.
    #[schema(minimum = 0, default = 1)]
    temperature: Option<f32>,
    /// Sample from the smallest set of most probable tokens whose probabilities add up to `top_p`. 1 means all tokens.
    /// 0 means the most probable one.
    #[schema(minimum = 0, maximum = 1, default = 1)]
    top_p: Option<f32>,
    /// Seed of the sampling, any 64-bit integer: the same request with the same seed gives the same tokens. By default random.
    #[schema(value_type = Option<i64>)]
    #[serde(default, deserialize_with = "seed")]
    seed: Option<u64>,
    /// Subtracted from a token's logit once for each time that the token was generated.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    frequency_penalty: Option<f32>,
    /// Strings that end the answer, which does not include them. `/info` reports the maximum number.
    stop: Option<OneOrMany>,
    #[serde(flatten)]
    constraint: ConstraintFields,
    /// Sample from the `top_k` most probable tokens. -1 and 0 mean all tokens, 1 means greedy.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<i32>, minimum = -1, default = 0)]
    top_k: Option<i32>,
    /// Divides the logits of tokens that occurred in the prompt or the answer. 1 means no penalty.
    #[schema(exclusive_minimum = 0, default = 1)]
    repetition_penalty: Option<f32>,
    /// Sample from the smallest set of locally typical tokens whose probabilities add up to `typical_p`. 1 means all tokens.
    #[schema(exclusive_minimum = 0, maximum = 1, default = 1)]
    typical_p: Option<f32>,
    #[serde(flatten)]
    refused: RefusedFields,
    #[serde(flatten)]
    pub(super) extension: ExtensionFields,
}

impl<'de> Deserialize<'de> for SamplingFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Calls the derived function, which `remote` makes an inherent one.
        named(deserializer, |deserializer| Self::deserialize(deserializer))
    }
}

impl SamplingFields {
    /// The fields of a dialect that has no others.
    pub(in crate::api) fn of(temperature: Option<f32>, top_p: Option<f32>, top_k: Option<i32>) -> Self {
        Self { temperature, top_p, top_k, ..Self::default() }
    }

    /// Applies OpenAI's rules: sampling unless `temperature` or `top_p` is 0, or `top_k` is 1; neutral values have no effect.
    /// `defaults` fill in what the request leaves out. Sets no logprobs.
    pub(in crate::api) fn parameters(&mut self, defaults: &SamplingDefaults) -> Result<Parameters, ValidationError> {
        self.refused.check()?;
        // First, because a neutral value of the request wins as well.
        self.temperature = self.temperature.or(defaults.temperature);
        self.top_p = self.top_p.or(defaults.top_p);
        self.top_k = self.top_k.or(defaults.top_k);
        self.typical_p = self.typical_p.or(defaults.typical_p);
        // Sampling would choose at random among equally probable tokens.
        let greedy = self.temperature == Some(0.0) || self.top_p == Some(0.0) || self.top_k == Some(1);
        let is_fraction = |value: f32| value > 0.0 && value < 1.0;
        let counts = |value: &f32| *value != 1.0 && !(greedy && is_fraction(*value));
        let mut extension = Extension::from(self.extension.clone());
        extension.min_p = extension.min_p.or(defaults.min_p).filter(|min_p| !(greedy && (0.0..=1.0).contains(min_p)));
        Ok(Parameters {
            do_sample: !greedy,
            temperature: self.temperature.filter(|&temperature| !(greedy && temperature >= 0.0)),
            top_p: self.top_p.filter(|&top_p| top_p != 0.0).filter(counts),
            // Other OpenAI-compatible servers use -1 and 0 for all tokens.
            top_k: self.top_k.filter(|&top_k| !(matches!(top_k, -1 | 0) || greedy && top_k > 0)),
            typical_p: self.typical_p.filter(counts),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty),
            frequency_penalty: self.frequency_penalty,
            default_new_tokens: defaults.max_new_tokens,
            seed: self.seed,
            stop: self.stop.take().map(OneOrMany::into_vec).unwrap_or_default(),
            grammar: self.constraint.take()?,
            extension,
            ..Parameters::default()
        })
    }

    /// The field that constrains the answer, if one does.
    pub(super) fn constraint_name(&self) -> Option<&'static str> {
        self.constraint.name()
    }
}

/// OpenAI's fields that have no effect here. They are known, so that clients which always send them work.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct IgnoredFields {
    /// Accepted without effect.
    #[serde(rename = "user")]
    #[schema(value_type = Option<String>)]
    _user: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "service_tier")]
    #[schema(value_type = Option<String>)]
    _service_tier: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "store")]
    #[schema(value_type = Option<bool>)]
    _store: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "metadata")]
    #[schema(value_type = Option<Object>)]
    _metadata: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "safety_identifier")]
    #[schema(value_type = Option<String>)]
    _safety_identifier: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "prompt_cache_key")]
    #[schema(value_type = Option<String>)]
    _prompt_cache_key: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "verbosity")]
    #[schema(value_type = Option<String>)]
    _verbosity: Option<IgnoredAny>,
    /// Accepted without effect: a guess of the answer, which does not change it.
    #[serde(rename = "prediction")]
    #[schema(value_type = Option<Object>)]
    _prediction: Option<IgnoredAny>,
    /// Accepted without effect: the header `x-request-id` names a request.
    #[serde(rename = "request_id")]
    #[schema(value_type = Option<String>)]
    _request_id: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "session_id")]
    #[schema(value_type = Option<String>)]
    _session_id: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "prompt_cache_retention")]
    #[schema(value_type = Option<String>)]
    _prompt_cache_retention: Option<IgnoredAny>,
}
