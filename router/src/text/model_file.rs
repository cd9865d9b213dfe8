//! Reads the text configuration of a prepared model folder: end-of-sequence tokens, special tokens and chat templates.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::{Map, Value};

use super::template::TemplateSources;

/// Why a model folder cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The folder has no `tokenizer.json`.
    #[error("{} has no tokenizer.json; it is needed to serve text (a slow tokenizer has to be converted first)", .0.display())]
    NoTokenizer(PathBuf),
    /// The tokenizer has no tokens.
    #[error("{} has no vocabulary: no text can be encoded with it", .0.display())]
    NoVocabulary(PathBuf),
    /// A file exists but cannot be read.
    #[error("cannot read {}: {source}", .path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file has unexpected content.
    #[error("{} is malformed: {reason}", .path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The parser's message.
        reason: String,
    },
    /// No process for rendering chat templates can be started.
    #[error("cannot start the process that renders chat templates: {0}")]
    Renderer(io::Error),
}

/// Ids of end-of-sequence tokens from generation_config.json, or else from config.json.
pub(super) fn read_eos_token_ids(folder: &Path) -> Result<Vec<u32>, LoadError> {
    for name in ["generation_config.json", "config.json"] {
        let config = read_json::<EosConfig>(&folder.join(name))?.unwrap_or_default();
        let id = config.eos_token_id.or(config.text_config.and_then(|text| text.eos_token_id));
        let ids = id.map(EosTokenId::into_vec).unwrap_or_default();
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
    One(TokenId),
    Many(Vec<TokenId>),
}

/// An id, which some tools write as `2.0`. `None`: no token, which they write as -1 or null.
#[derive(Deserialize)]
#[serde(try_from = "Option<f64>")]
struct TokenId(Option<u32>);

impl TryFrom<Option<f64>> for TokenId {
    type Error = String;

    fn try_from(number: Option<f64>) -> Result<Self, Self::Error> {
        let Some(number) = number.filter(|&number| number != -1.0) else { return Ok(Self(None)) };
        let is_id = number.fract() == 0.0 && (0.0..=f64::from(u32::MAX)).contains(&number);
        is_id.then_some(Self(Some(number as u32))).ok_or_else(|| format!("{number} is not a token id"))
    }
}

impl EosTokenId {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => id.0.into_iter().collect(),
            Self::Many(ids) => ids.into_iter().filter_map(|id| id.0).collect(),
        }
    }
}

/// The parts of tokenizer_config.json that tokenizer.json does not contain.
pub(super) struct TokenizerConfig {
    /// Texts of `bos_token`, `eos_token` and so on: variables of chat templates.
    pub(super) special_tokens: Map<String, Value>,
    fields: Map<String, Value>,
}

impl TokenizerConfig {
    pub(super) fn read(folder: &Path) -> Result<Self, LoadError> {
        let fields: Map<String, Value> = read_json(&folder.join("tokenizer_config.json"))?.unwrap_or_default();
        let named = ["model_specific_special_tokens", "extra_special_tokens"];
        let named = named.into_iter().filter_map(|key| fields.get(key)?.as_object()).flatten();
        let roles = fields.iter().filter(|(name, _)| name.ends_with("_token"));
        let special_tokens = named.chain(roles).filter_map(|(name, value)| special_token(name, value)).collect();
        Ok(Self { special_tokens, fields })
    }

    pub(super) fn eos_token(&self) -> Option<&str> {
        self.special_tokens.get("eos_token").and_then(Value::as_str)
    }

    /// False if `model_input_names` lists what the model reads, and token types are not among it.
    pub(super) fn gives_token_types(&self) -> bool {
        let names = self.fields.get("model_input_names").and_then(Value::as_array);
        names.is_none_or(|names| names.iter().any(|name| name == "token_type_ids"))
    }

    /// The templates in the first of these places that has any, as in transformers: template files, chat_template.json,
    /// tokenizer_config.json, processor_config.json.
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

/// One template, or several: a list of `{"name", "template"}`, or an object by name.
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

/// Returns `None` if the file does not exist.
fn read_text(path: &Path) -> Result<Option<String>, LoadError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(LoadError::Read { path: path.to_owned(), source }),
    }
}

pub(super) fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<Option<T>, LoadError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    match serde_json::from_str(&text) {
        Ok(value) => Ok(Some(value)),
        Err(error) => Err(LoadError::Malformed { path: path.to_owned(), reason: error.to_string() }),
    }
}
