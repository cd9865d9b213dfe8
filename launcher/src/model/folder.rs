//! Applies flags that change the model's files: builds a folder of links to the prepared model in which changed files replace
//! the originals. Router and workers read that folder and need no knowledge of the flags.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tempfile::TempDir;

use crate::flag::args::Args;
use crate::model::file::{FileError, parse, read};
use crate::model::generation_config;
use crate::model::rope_scaling;

const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// Files whose chat template overrides the one in the tokenizer's configuration.
const TEMPLATES: [&str; 3] = ["chat_template.jinja", "chat_template.json", "additional_chat_templates"];

/// The folder to serve from. Links are removed on drop; the prepared model stays.
pub(crate) struct ModelFolder {
    pub(crate) path: PathBuf,
    /// Source of the template given by `--chat-template`, which overrides all others.
    pub(crate) chat_template: Option<String>,
    _links: Option<TempDir>,
}

/// Why the flags cannot be applied to the model.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FolderError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("--chat-template is neither a file nor a template: {0}")]
    NoTemplate(String),
    #[error("cannot create a folder of links to the model: {0}")]
    Link(io::Error),
}

/// Changed files by name, with their new content; `None` hides the original.
type Changes = Vec<(&'static str, Option<String>)>;

impl ModelFolder {
    /// `prepared` is the folder of the prepared model.
    pub(crate) fn new(prepared: &Path, args: &Args) -> Result<Self, FolderError> {
        let chat_template = args.chat_template.as_deref().map(read_template).transpose()?;
        let changes = changes(prepared, args)?;
        if changes.is_empty() {
            return Ok(Self { path: prepared.to_owned(), chat_template, _links: None });
        }
        let links = link(prepared, &changes).map_err(FolderError::Link)?;
        Ok(Self { path: links.path().to_owned(), chat_template, _links: Some(links) })
    }
}

fn changes(prepared: &Path, args: &Args) -> Result<Changes, FolderError> {
    let mut changes = Changes::new();
    if let Some(path) = &args.tokenizer_config_path {
        let text = read(path)?;
        if parse(path, &text)?.contains_key("chat_template") {
            changes.extend(TEMPLATES.map(|name| (name, None)));
        }
        changes.push((TOKENIZER_CONFIG, Some(text)));
    }
    if rope_scaling::is_asked_for(args) {
        let path = prepared.join("config.json");
        let mut config = parse(&path, &read(&path)?)?;
        rope_scaling::write(&mut config, args);
        changes.push(("config.json", Some(Value::Object(config).to_string())));
    }
    if let Some(config) = generation_config::replacement(args)? {
        changes.push((generation_config::FILE, Some(config)));
    }
    Ok(changes)
}

fn read_template(given: &str) -> Result<String, FolderError> {
    // No sensible path contains a brace, and every template does.
    if given.contains('{') {
        Ok(given.to_owned())
    } else if Path::new(given).is_file() {
        Ok(read(Path::new(given))?)
    } else {
        Err(FolderError::NoTemplate(given.to_owned()))
    }
}

fn link(prepared: &Path, changes: &Changes) -> io::Result<TempDir> {
    let folder = tempfile::Builder::new().prefix("penstock-model-").tempdir()?;
    // A relative target would be resolved from the link's folder.
    for entry in std::fs::read_dir(prepared.canonicalize()?)? {
        let entry = entry?;
        if !changes.iter().any(|(name, _)| entry.file_name() == *name) {
            std::os::unix::fs::symlink(entry.path(), folder.path().join(entry.file_name()))?;
        }
    }
    for (name, content) in changes {
        if let Some(content) = content {
            std::fs::write(folder.path().join(name), content)?;
        }
    }
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;

    use super::*;

    fn prepared() -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in [
            ("config.json", r#"{"max_position_embeddings": 100, "rope_scaling": {"type": "yarn"}}"#),
            (TOKENIZER_CONFIG, r#"{"own": true}"#),
            ("chat_template.jinja", "own"),
            ("model.safetensors", "weights"),
        ] {
            std::fs::write(folder.path().join(name), content).unwrap();
        }
        folder
    }

    fn with(prepared: &TempDir, flags: &[&str]) -> Result<ModelFolder, FolderError> {
        let args = Args::try_parse_from([&["penstock"], flags].concat()).unwrap();
        ModelFolder::new(prepared.path(), &args)
    }

    fn text(folder: &ModelFolder, name: &str) -> Option<String> {
        std::fs::read_to_string(folder.path.join(name)).ok()
    }

    #[test]
    fn without_changes_the_prepared_folder_is_served() {
        let prepared = prepared();
        assert_eq!(with(&prepared, &[]).unwrap().path, prepared.path());
    }

    #[test]
    fn a_given_tokenizer_configuration_replaces_the_models_own() {
        let (prepared, given) = (prepared(), tempfile::tempdir().unwrap());
        let path = given.path().join("given.json");
        let flags = ["--tokenizer-config-path", &path.to_string_lossy()].map(str::to_owned);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        std::fs::write(&path, r#"{"bos_token": "<s>"}"#).unwrap();
        let folder = with(&prepared, &flags).unwrap();
        assert_eq!(text(&folder, TOKENIZER_CONFIG).unwrap(), r#"{"bos_token": "<s>"}"#);
        assert_eq!(text(&folder, "chat_template.jinja").as_deref(), Some("own"));
        assert_eq!(text(&folder, "model.safetensors").as_deref(), Some("weights"));
        std::fs::write(&path, r#"{"chat_template": "given"}"#).unwrap();
        assert_eq!(
            text(&with(&prepared, &flags).unwrap(), "chat_template.jinja"),
            None,
            "the given template is not hidden"
        );
        std::fs::write(&path, "[]").unwrap();
        assert!(with(&prepared, &flags).err().unwrap().to_string().contains("is not a JSON object"));
    }

    #[test]
    fn a_chat_template_is_a_file_or_the_source_itself() {
        let prepared = prepared();
        let folder = with(&prepared, &["--chat-template", "{{ messages }}"]).unwrap();
        assert_eq!(folder.chat_template.as_deref(), Some("{{ messages }}"));
        let path = prepared.path().join("model.safetensors");
        let folder = with(&prepared, &["--chat-template", &path.to_string_lossy()]).unwrap();
        assert_eq!(folder.chat_template.as_deref(), Some("weights"));
        let error = with(&prepared, &["--chat-template", "/nonexistent"]).err().unwrap().to_string();
        assert_eq!(error, "--chat-template is neither a file nor a template: /nonexistent");
    }

    #[test]
    fn rope_scaling_is_written_into_the_configuration() {
        let folder = with(&prepared(), &["--rope-factor", "2.5"]).unwrap();
        let config: Value = serde_json::from_str(&text(&folder, "config.json").unwrap()).unwrap();
        let expected = json!({"max_position_embeddings": 100, "rope_scaling": {"rope_type": "linear", "factor": 2.5}});
        assert_eq!(config, expected);
    }
}
