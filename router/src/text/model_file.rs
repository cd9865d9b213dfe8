//! What the prepared model folder says about text, read from the files where checkpoints keep it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::template::TemplateSources;

/// Why a model folder cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("{} has no tokenizer.json; it is needed to serve text (a slow tokenizer has to be converted first)", .0.display())]
    NoTokenizer(PathBuf),
    #[error("{} has no vocabulary: no text can be encoded with it", .0.display())]
    NoVocabulary(PathBuf),
    #[error("cannot read {}: {source}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not what it should be: {reason}", .path.display())]
    Malformed { path: PathBuf, reason: String },
    #[error("cannot start the process that renders chat templates: {0}")]
    Renderer(io::Error),
}

/// Token ids that end a sequence, from generation_config.json, or else from config.json.
pub(super) fn read_eos_token_ids(folder: &Path) -> Result<Vec<u32>, LoadError> {
    for name in ["generation_config.json", "config.json"] {
        let config = read_json::<EosConfig>(&folder.join(name))?.unwrap_or_default();
        let ids = match config.eos_token_id {
            Some(EosTokenId::One(id)) => vec![id],
            Some(EosTokenId::Many(ids)) => ids,
            None => config.text_config.and_then(|text| text.eos_token_id).map(EosTokenId::into_vec).unwrap_or_default(),
        };
        if !ids.is_empty() {
            return Ok(ids);
        }
    }
    Ok(Vec::new())
}

#[derive(Default, Deserialize)]
struct EosConfig {
    eos_token_id: Option<EosTokenId>,
    text_config: Option<TextConfig>,
}

#[derive(Deserialize)]
struct TextConfig {
    eos_token_id: Option<EosTokenId>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum EosTokenId {
    One(u32),
    Many(Vec<u32>),
}

impl EosTokenId {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

/// The parts of tokenizer_config.json that matter beside tokenizer.json.
pub(super) struct TokenizerConfig {
    /// `bos_token`, `eos_token`, … as templates see them.
    pub(super) special_tokens: Map<String, Value>,
    fields: Map<String, Value>,
}

impl TokenizerConfig {
    pub(super) fn read(folder: &Path) -> Result<Self, LoadError> {
        let fields: Map<String, Value> = read_json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
        let named = fields.get("extra_special_tokens").and_then(Value::as_object).into_iter().flatten();
        let special_tokens = named.chain(&fields).filter_map(|(name, value)| special_token(name, value)).collect();
        Ok(Self { special_tokens, fields })
    }

    pub(super) fn eos_token(&self) -> Option<&str> {
        self.special_tokens.get("eos_token").and_then(Value::as_str)
    }

    /// The first place that holds any: files of their own, chat_template.json, tokenizer_config.json, and
    /// processor_config.json, as in transformers.
    pub(super) fn chat_templates(&self, folder: &Path) -> Result<TemplateSources, LoadError> {
        let files = template_files(folder)?;
        if files != TemplateSources::default() {
            return Ok(files);
        }
        if let Some(sources) = read_field(&folder.join("chat_template.json"))? {
            return Ok(sources);
        }
        if let Some(sources) = self.fields.get("chat_template").and_then(template_field) {
            return Ok(sources);
        }
        Ok(read_field(&folder.join("processor_config.json"))?.unwrap_or_default())
    }
}

/// `"bos_token": "<s>"` or `"bos_token": {"content": "<s>", …}`.
fn special_token(name: &str, value: &Value) -> Option<(String, Value)> {
    if !name.ends_with("_token") {
        return None;
    }
    let text = value.as_str().or_else(|| value.get("content").and_then(Value::as_str))?;
    Some((name.to_owned(), text.into()))
}

fn template_files(folder: &Path) -> Result<TemplateSources, LoadError> {
    let named = |name: &str| read_text(&folder.join("additional_chat_templates").join(name));
    let default = match read_text(&folder.join("chat_template.jinja"))? {
        Some(source) => Some(source),
        None => named("default.jinja")?,
    };
    Ok(TemplateSources { default, tool_use: named("tool_use.jinja")? })
}

fn read_field(path: &Path) -> Result<Option<TemplateSources>, LoadError> {
    let config: Option<Map<String, Value>> = read_json(path)?;
    Ok(config.and_then(|config| template_field(config.get("chat_template")?)))
}

/// One template, or several as a list of `{"name", "template"}` or as an object by name.
fn template_field(value: &Value) -> Option<TemplateSources> {
    let named = |wanted: &str| {
        let entry = match value {
            Value::Array(entries) => entries.iter().find(|entry| entry["name"] == wanted)?.get("template"),
            _ => value.get(wanted),
        };
        entry.and_then(Value::as_str).map(str::to_owned)
    };
    match value {
        Value::String(source) => Some(TemplateSources::only(source.clone())),
        Value::Array(_) | Value::Object(_) => {
            Some(TemplateSources { default: named("default"), tool_use: named("tool_use") })
        }
        _ => None,
    }
}

/// `None` when there is no such file.
fn read_text(path: &Path) -> Result<Option<String>, LoadError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(LoadError::Read { path: path.to_owned(), source }),
    }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, LoadError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    match serde_json::from_str(&text) {
        Ok(value) => Ok(Some(value)),
        Err(error) => Err(LoadError::Malformed { path: path.to_owned(), reason: error.to_string() }),
    }
}
