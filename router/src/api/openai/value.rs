//! Fields that both generation routes have, some of which clients send in more than one shape.

use serde::{Deserialize, Deserializer};
use serde_json::Value;
use utoipa::ToSchema;

use crate::api::extension::ExtensionFields;
use crate::api::field::named;
use crate::api::grammar::GrammarField;
use crate::generation::{Extension, Parameters, ValidationError};
use crate::sequence::{Grammar, LogprobSource};

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

/// OpenAI allows negative seeds; they are as good as any.
fn seed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "an integer of 64 bits")]
    enum Seed {
        Unsigned(u64),
        Signed(i64),
    }
    Ok(Option::deserialize(deserializer)?.map(|seed| match seed {
        Seed::Unsigned(seed) => seed,
        Seed::Signed(seed) => seed.cast_unsigned(),
    }))
}

/// Null, empty, false or zero: as if the field were not there.
pub(super) fn says_something(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Bool(true) | Value::String(_)) => true,
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        Some(Value::Array(items)) => !items.is_empty(),
        Some(Value::Object(fields)) => !fields.is_empty(),
    }
}

#[derive(Debug, Default, Deserialize, ToSchema)]
pub(crate) struct StreamOptions {
    /// Streams end with a chunk that has the usage and no choices.
    #[serde(default, deserialize_with = "crate::api::field::or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) include_usage: bool,
}

/// What decides how tokens are chosen, and where they end.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(crate) struct SamplingFields {
    /// 0 means greedy, without it sampling is on with 1.
    #[schema(minimum = 0, default = 1)]
    temperature: Option<f32>,
    /// Sample from the smallest set of tokens with so much probability; 1 is all.
    #[schema(exclusive_minimum = 0, maximum = 1, default = 1)]
    top_p: Option<f32>,
    /// The same tokens for the same request; any integer of 64 bits. By default a random one.
    #[schema(value_type = Option<i64>)]
    #[serde(default, deserialize_with = "seed")]
    seed: Option<u64>,
    /// Subtracted from the logit of a generated token, once for each time.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    frequency_penalty: Option<f32>,
    /// The answer ends before one of these; how many there may be is in `/info`.
    stop: Option<OneOrMany>,
    /// What the answer must match.
    response_format: Option<GrammarField>,
    /// TGI's name on its own routes.
    grammar: Option<GrammarField>,
    /// Sample from the so many most probable tokens; -1 and 0 are all.
    #[schema(minimum = -1, default = 0)]
    top_k: Option<i32>,
    /// Divides the logits of tokens that occurred, the prompt included. 1 is none.
    #[schema(exclusive_minimum = 0, default = 1)]
    repetition_penalty: Option<f32>,
    /// Sample from the locally typical tokens with so much probability; 1 is all.
    #[schema(exclusive_minimum = 0, maximum = 1, default = 1)]
    typical_p: Option<f32>,
    #[serde(flatten)]
    extension: ExtensionFields,
}

impl<'de> Deserialize<'de> for SamplingFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // The derived one: `remote` makes it a function of the type's own.
        named(deserializer, |deserializer| Self::deserialize(deserializer))
    }
}

/// OpenAI's logprobs are the model's own. Where none are shown the worker is spared the second distribution.
pub(super) fn logprob_source(are_shown: bool) -> LogprobSource {
    if are_shown { LogprobSource::Model } else { LogprobSource::Processed }
}

impl SamplingFields {
    /// OpenAI's rules, logprobs aside: sampling unless the temperature is 0, and neutral values mean nothing.
    pub(super) fn parameters(&mut self) -> Result<Parameters, ValidationError> {
        let greedy = self.temperature == Some(0.0);
        let is_fraction = |value: f32| value > 0.0 && value < 1.0;
        let counts = |value: &f32| *value != 1.0 && !(greedy && is_fraction(*value));
        let mut extension = Extension::from(self.extension.clone());
        extension.min_p = extension.min_p.filter(|min_p| !(greedy && (0.0..=1.0).contains(min_p)));
        Ok(Parameters {
            do_sample: !greedy,
            temperature: self.temperature.filter(|_| !greedy),
            top_p: self.top_p.filter(counts),
            // Both -1 and 0 are "all tokens" where this field comes from.
            top_k: self.top_k.filter(|&top_k| !(matches!(top_k, -1 | 0) || greedy && top_k > 0)),
            typical_p: self.typical_p.filter(counts),
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
            stop: self.stop.take().map(OneOrMany::into_vec).unwrap_or_default(),
            grammar: self.grammar()?,
            extension,
            ..Parameters::default()
        })
    }

    fn grammar(&mut self) -> Result<Option<Grammar>, ValidationError> {
        let grammars = [self.response_format.take(), self.grammar.take()].map(|field| field.and_then(|field| field.0));
        match grammars {
            [Some(one), Some(other)] if one != other => Err(ValidationError::Unsupported {
                field: "grammar",
                why: "`response_format` says something else; send one of them",
            }),
            [one, other] => Ok(one.or(other)),
        }
    }
}
