//! Values of `--generation-config` and `--override-generation-config`.

use std::convert::Infallible;
use std::path::PathBuf;
use std::str::FromStr;

use penstock_router::SamplingDefaults;
use serde_json::{Map, Value};

/// The source of the sampling defaults of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GenerationConfig {
    /// The model's own file.
    Auto,
    /// The API's defaults hold. Token ids are still those of the model's file.
    None,
    /// The file in this folder, with its token ids.
    Folder(PathBuf),
}

impl FromStr for GenerationConfig {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Self, Infallible> {
        Ok(match text {
            // An empty variable.
            "auto" | "" => Self::Auto,
            // COMPAT: vLLM's name.
            "none" | "vllm" => Self::None,
            folder => Self::Folder(folder.into()),
        })
    }
}

/// Entries that replace those of the file; null removes one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Overrides(pub(crate) Map<String, Value>);

impl FromStr for Overrides {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let entries: Map<String, Value> =
            serde_json::from_str(text).map_err(|error| format!("it is not a JSON object: {error}"))?;
        if let Some(unknown) = entries.keys().find(|key| !SamplingDefaults::KEYS.contains(&key.as_str())) {
            return Err(format!("{unknown} has no effect here; give {}", SamplingDefaults::KEYS.join(", ")));
        }
        match &SamplingDefaults::of(&entries).1[..] {
            [] => Ok(Self(entries)),
            [bad, ..] => Err(bad.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_override_without_effect_is_refused_by_name() {
        let refusal = |text: &str| text.parse::<Overrides>().unwrap_err();
        let keys = "temperature, top_p, top_k, min_p, typical_p, repetition_penalty, max_new_tokens";
        assert_eq!(refusal(r#"{"top_q": 1}"#), format!("top_q has no effect here; give {keys}"));
        assert_eq!(refusal(r#"{"top_p": 2}"#), "top_p is 2, must be a number from 0 to 1");
        assert!(refusal("0.5").starts_with("it is not a JSON object: "));
        assert!(refusal(r#"{"temperature": NaN}"#).starts_with("it is not a JSON object: "));
    }
}
