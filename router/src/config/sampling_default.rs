//! The sampling parameters that the authors of a model chose (`generation_config.json`): defaults of what requests on the routes
//! of OpenAI and Anthropic leave out (docs/adr/dialects.md).

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// A request that leaves out a parameter gets the model's value, or else the API's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, ToSchema)]
pub struct SamplingDefaults {
    /// 0 is greedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) temperature: Option<f32>,
    /// 0 is greedy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) top_p: Option<f32>,
    /// -1 and 0 are off.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) top_k: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) min_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) typical_p: Option<f32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) repetition_penalty: Option<f32>,
    /// Limit of an answer whose request names none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) max_new_tokens: Option<u32>,
}

/// A value of a sampling parameter that cannot be a default.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} is {value}, must be {expected}")]
pub struct BadDefault {
    key: &'static str,
    value: String,
    expected: &'static str,
}

/// Entries that change what transformers generates and have no effect here, each with the number that has none there either.
/// Null, false, 0 and empty values never have an effect.
const NOT_APPLIED: [(&str, f64); 36] = [
    ("num_beams", 1.0),
    ("num_beam_groups", 1.0),
    ("num_return_sequences", 1.0),
    ("length_penalty", 1.0),
    ("diversity_penalty", 0.0),
    ("early_stopping", 0.0),
    ("penalty_alpha", 0.0),
    ("no_repeat_ngram_size", 0.0),
    ("encoder_no_repeat_ngram_size", 0.0),
    ("encoder_repetition_penalty", 1.0),
    ("exponential_decay_length_penalty", 0.0),
    ("epsilon_cutoff", 0.0),
    ("eta_cutoff", 0.0),
    ("top_h", 0.0),
    ("guidance_scale", 1.0),
    ("renormalize_logits", 0.0),
    ("min_length", 0.0),
    ("min_new_tokens", 0.0),
    ("max_length", 0.0),
    ("max_time", 0.0),
    ("stop_strings", 0.0),
    ("suppress_tokens", 0.0),
    ("begin_suppress_tokens", 0.0),
    ("bad_words_ids", 0.0),
    ("force_words_ids", 0.0),
    ("constraints", 0.0),
    ("sequence_bias", 0.0),
    ("forced_decoder_ids", 0.0),
    ("forced_eos_token_id", 0.0),
    ("token_healing", 0.0),
    ("watermarking_config", 0.0),
    ("dola_layers", 0.0),
    // Unknown to transformers; some authors write them.
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    // Known from GGUF files only.
    ("xtc_probability", 0.0),
    ("mirostat", 0.0),
];

/// Without it transformers takes the most probable tokens, and ignores temperature and truncation. COMPAT: as in vLLM, requests sample.
const DO_SAMPLE: &str = "do_sample";

impl SamplingDefaults {
    /// The entries of `generation_config.json` that are defaults of requests.
    pub const KEYS: [&str; 7] =
        ["temperature", "top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "max_new_tokens"];

    /// No defaults of a model: those of the API hold.
    pub const NONE: Self = Self {
        temperature: None,
        top_p: None,
        top_k: None,
        min_p: None,
        typical_p: None,
        repetition_penalty: None,
        max_new_tokens: None,
    };

    /// Reads the entries `KEYS`. A bad value is left out and returned.
    pub fn of(config: &Map<String, Value>) -> (Self, Vec<BadDefault>) {
        let mut reader = Reader { config, bad: Vec::new() };
        let fraction = |value: f64| (0.0..=1.0).contains(&value);
        let is_integer = |value: f64| value.fract() == 0.0;
        let defaults = Self {
            temperature: reader.float("temperature", "a number of at least 0", |value| value >= 0.0),
            top_p: reader.float("top_p", "a number from 0 to 1", fraction),
            top_k: reader
                .number("top_k", "an integer of at least -1", |value| is_integer(value) && value >= -1.0)
                .map(|top_k| top_k as i32),
            min_p: reader.float("min_p", "a number from 0 to 1", fraction),
            typical_p: reader.float("typical_p", "a number above 0 and at most 1", |value| value > 0.0 && value <= 1.0),
            repetition_penalty: reader.float("repetition_penalty", "a number above 0", |value| value > 0.0),
            max_new_tokens: reader
                .number("max_new_tokens", "an integer of at least 1", |value| is_integer(value) && value >= 1.0)
                .map(|max| max as u32),
        };
        (defaults, reader.bad)
    }

    /// The entries that transformers would apply and this server does not, as `name value`.
    pub fn not_applied(config: &Map<String, Value>) -> Vec<String> {
        let applies = |(name, neutral): &(&str, f64)| match config.get(*name) {
            None | Some(Value::Null | Value::Bool(false)) => None,
            Some(Value::Number(number)) if [Some(0.0), Some(*neutral)].contains(&number.as_f64()) => None,
            Some(Value::Array(items)) if items.is_empty() => None,
            Some(Value::Object(fields)) if fields.is_empty() => None,
            Some(value) => Some(format!("{name} {}", shortened(value))),
        };
        let is_greedy = config.get(DO_SAMPLE) == Some(&Value::Bool(false));
        is_greedy
            .then(|| format!("{DO_SAMPLE} false"))
            .into_iter()
            .chain(NOT_APPLIED.iter().filter_map(applies))
            .collect()
    }

    /// Whether an entry is one of those that `of` or `not_applied` reads.
    pub fn concerns(key: &str) -> bool {
        Self::KEYS.contains(&key) || key == DO_SAMPLE || NOT_APPLIED.iter().any(|(name, _)| *name == key)
    }

    /// The defaults that the model has, by their keys.
    pub(crate) fn values(&self) -> Map<String, Value> {
        // By way of text, because 0.7 as f32 is not 0.7 as f64.
        let text = serde_json::to_string(self).unwrap_or_default();
        serde_json::from_str(&text).unwrap_or_default()
    }

    /// Whether no default differs from the API's.
    pub fn is_none(&self) -> bool {
        *self == Self::NONE
    }
}

/// A list such as `temperature 0.6, top_p 0.95`.
impl fmt::Display for SamplingDefaults {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let values = self.values();
        let named = |key: &&str| Some(format!("{key} {}", values.get(*key)?));
        formatter.write_str(&Self::KEYS.iter().filter_map(named).collect::<Vec<_>>().join(", "))
    }
}

struct Reader<'a> {
    config: &'a Map<String, Value>,
    bad: Vec<BadDefault>,
}

impl Reader<'_> {
    fn number(&mut self, key: &'static str, expected: &'static str, is_allowed: impl Fn(f64) -> bool) -> Option<f64> {
        let value = self.config.get(key).filter(|value| !value.is_null())?;
        let number = value.as_f64().filter(|&number| is_allowed(number));
        if number.is_none() {
            self.bad.push(BadDefault { key, value: shortened(value), expected });
        }
        number
    }

    /// A number whose 32 bits are allowed as well: 1e-60 is 0, and 1e60 is infinite.
    fn float(&mut self, key: &'static str, expected: &'static str, is_allowed: impl Fn(f64) -> bool) -> Option<f32> {
        let rounded = |value: f64| f64::from(value as f32);
        self.number(key, expected, |value| is_allowed(rounded(value)) && rounded(value).is_finite())
            .map(|value| value as f32)
    }
}

/// JSON for a line of the log: lists of token ids may be long.
fn shortened(value: &Value) -> String {
    const MAX_CHARS: usize = 40;
    let text = value.to_string();
    match text.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(config: Value) -> (SamplingDefaults, Vec<String>) {
        let (defaults, bad) = SamplingDefaults::of(config.as_object().unwrap());
        (defaults, bad.iter().map(ToString::to_string).collect())
    }

    #[test]
    fn the_keys_are_those_of_vllm_and_typical_p() {
        let (defaults, bad) = of(json!({
            "eos_token_id": 2, "do_sample": true, "temperature": 0.6, "top_p": 0.95, "top_k": 20.0, "min_p": 0,
            "typical_p": 0.9, "repetition_penalty": 1.05, "max_new_tokens": 2048,
        }));
        assert_eq!(bad, [""; 0]);
        assert_eq!(
            defaults.to_string(),
            "temperature 0.6, top_p 0.95, top_k 20, min_p 0.0, typical_p 0.9, repetition_penalty 1.05, max_new_tokens 2048"
        );
        assert!(of(json!({"temperature": null, "top_k": null})).0.is_none());
        assert_eq!(of(json!({"max_new_tokens": i64::MAX})).0.max_new_tokens, Some(u32::MAX));
    }

    #[test]
    fn values_that_the_file_may_have_and_mean_greedy_or_off_are_kept() {
        let (defaults, bad) = of(json!({"temperature": 0.0, "top_p": 0, "top_k": -1}));
        assert_eq!(
            (defaults.temperature, defaults.top_p, defaults.top_k, bad.len()),
            (Some(0.0), Some(0.0), Some(-1), 0)
        );
    }

    #[test]
    fn a_bad_value_is_named_and_left_out() {
        let (defaults, bad) = of(json!({
            "temperature": -1, "top_p": 1.5, "top_k": 2.5, "min_p": "0.1", "typical_p": 0, "repetition_penalty": 1e-60,
            "max_new_tokens": 0,
        }));
        assert!(defaults.is_none());
        assert_eq!(
            bad,
            [
                "temperature is -1, must be a number of at least 0",
                "top_p is 1.5, must be a number from 0 to 1",
                "top_k is 2.5, must be an integer of at least -1",
                "min_p is \"0.1\", must be a number from 0 to 1",
                "typical_p is 0, must be a number above 0 and at most 1",
                "repetition_penalty is 1e-60, must be a number above 0",
                "max_new_tokens is 0, must be an integer of at least 1",
            ]
        );
        for value in [json!(1e300), json!(true), json!([0.5]), json!("NaN")] {
            let (defaults, bad) = of(json!({"temperature": value}));
            assert!(defaults.is_none() && bad.len() == 1, "{value}");
        }
    }

    #[test]
    fn entries_without_effect_are_listed_unless_they_are_neutral() {
        let config = json!({
            "do_sample": false, "num_beams": 4, "length_penalty": 0.8, "early_stopping": "never", "suppress_tokens": (0..90).collect::<Vec<_>>(),
            "num_beam_groups": 1, "diversity_penalty": 0.0, "bad_words_ids": [], "no_repeat_ngram_size": 0,
            "encoder_repetition_penalty": 1.0, "min_length": null, "renormalize_logits": false, "pad_token_id": 0,
            "forced_eos_token_id": 2, "presence_penalty": 1.5, "frequency_penalty": 0,
        });
        assert_eq!(
            SamplingDefaults::not_applied(config.as_object().unwrap()),
            [
                "do_sample false",
                "num_beams 4",
                "length_penalty 0.8",
                "early_stopping \"never\"",
                "suppress_tokens [0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,1…",
                "forced_eos_token_id 2",
                "presence_penalty 1.5",
            ]
        );
    }
}
