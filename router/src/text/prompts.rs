//! Texts that an embedding model expects in front of its inputs, by name: `config_sentence_transformers.json`.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::model_file::{LoadError, read_json};

/// The prompts of one model. A model without the file has none.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct Prompts {
    #[serde(default)]
    prompts: BTreeMap<String, String>,
    /// The prompt of inputs that name none.
    default_prompt_name: Option<String>,
}

/// There is no prompt of this name.
#[derive(Debug, thiserror::Error)]
#[error("`prompt_name` must be one of {allowed}. Given: {given}")]
pub(crate) struct UnknownPrompt {
    given: String,
    allowed: String,
}

impl Prompts {
    pub(super) fn read(folder: &Path) -> Result<Self, LoadError> {
        Ok(read_json(&folder.join("config_sentence_transformers.json"))?.unwrap_or_default())
    }

    /// The text in front of an input. `name`: as the request gives it.
    pub(crate) fn text(&self, name: Option<&str>) -> Result<&str, UnknownPrompt> {
        let Some(name) = name.or(self.default_prompt_name.as_deref()) else { return Ok("") };
        self.prompts.get(name).map(String::as_str).ok_or_else(|| {
            let names: Vec<_> = self.prompts.keys().map(|name| format!("\"{name}\"")).collect();
            let allowed =
                if names.is_empty() { "none, because the model has no prompts".into() } else { names.join(", ") };
            UnknownPrompt { given: name.to_owned(), allowed }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_input_without_a_name_gets_the_default_prompt() {
        let prompts: Prompts = serde_json::from_str(
            r#"{"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query", "similarity_fn_name": "dot"}"#,
        )
        .unwrap();
        assert_eq!(prompts.text(None).unwrap(), "q: ");
        assert_eq!(prompts.text(Some("document")).unwrap(), "");
        let error = prompts.text(Some("passage")).unwrap_err().to_string();
        assert_eq!(error, "`prompt_name` must be one of \"document\", \"query\". Given: passage");
        assert_eq!(Prompts::default().text(None).unwrap(), "");
        let error = Prompts::default().text(Some("query")).unwrap_err().to_string();
        assert_eq!(error, "`prompt_name` must be one of none, because the model has no prompts. Given: query");
    }
}
