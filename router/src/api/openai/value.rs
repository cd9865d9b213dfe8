//! Fields that OpenAI's clients send in more than one shape.

use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::api::extension::ExtensionFields;

/// `"stop"` or `["stop", …]`.
#[derive(Debug, Deserialize)]
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
pub(super) fn seed<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
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

/// A field that is not there yet says nothing when it is null, empty, false or zero.
pub(super) fn says_something(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Bool(true) | Value::String(_)) => true,
        Some(Value::Number(number)) => number.as_f64() != Some(0.0),
        Some(Value::Array(items)) => !items.is_empty(),
        Some(Value::Object(fields)) => !fields.is_empty(),
    }
}

#[derive(Debug, Default, Deserialize)]
pub(crate) struct StreamOptions {
    #[serde(default, deserialize_with = "crate::api::tgi::or_default")]
    pub(crate) include_usage: bool,
}

/// The fields of both generation routes that decide how tokens are chosen.
#[derive(Debug, Deserialize)]
pub(crate) struct SamplingFields {
    pub(super) temperature: Option<f32>,
    pub(super) top_p: Option<f32>,
    #[serde(default, deserialize_with = "seed")]
    pub(super) seed: Option<u64>,
    pub(super) frequency_penalty: Option<f32>,
    /// TGI's and everybody's extension.
    pub(super) top_k: Option<i32>,
    /// TGI's extension.
    pub(super) repetition_penalty: Option<f32>,
    pub(super) typical_p: Option<f32>,
    #[serde(flatten)]
    pub(super) extension: ExtensionFields,
}
