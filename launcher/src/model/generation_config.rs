//! Chooses the `generation_config.json` that is served (`--generation-config`, `--override-generation-config`), and reads the
//! defaults of requests from it.

use std::path::Path;

use penstock_router::SamplingDefaults;
use serde_json::{Map, Value};

use crate::flag::args::Args;
use crate::flag::generation_config::{GenerationConfig, Overrides};
use crate::model::file::{FileError, parse, read};

pub(crate) const FILE: &str = "generation_config.json";
/// Models saved by old releases of transformers have the entries here.
const MODEL_CONFIG: &str = "config.json";

/// The content that replaces the file of the prepared model, for router and workers; `None` if the flags do not change it.
pub(crate) fn replacement(args: &Args) -> Result<Option<String>, FileError> {
    let GenerationConfig::Folder(folder) = &args.generation_config else { return Ok(None) };
    let path = folder.join(FILE);
    let text = read(&path)?;
    parse(&path, &text)?;
    Ok(Some(text))
}

/// The defaults of requests to the model in `folder`. Logs them, and each entry that has no effect.
pub(crate) fn defaults(folder: &Path, args: &Args) -> Result<SamplingDefaults, FileError> {
    let (file, mut config) = match args.generation_config {
        GenerationConfig::None => ("--override-generation-config", Map::new()),
        GenerationConfig::Auto | GenerationConfig::Folder(_) => entries(folder)?,
    };
    if let Some(Overrides(entries)) = &args.override_generation_config {
        config.extend(entries.clone());
    }
    let (defaults, bad) = SamplingDefaults::of(&config);
    bad.iter().for_each(|bad| tracing::warn!("{file}: {bad}; it is ignored"));
    let not_applied = SamplingDefaults::not_applied(&config);
    if !not_applied.is_empty() {
        tracing::warn!("{file}: no effect here, but in transformers: {}", not_applied.join(", "));
    }
    if !defaults.is_none() {
        tracing::info!(
            "requests that leave them out get {defaults}, except on TGI's routes ({file}; see --generation-config)"
        );
    }
    Ok(defaults)
}

/// The file's entries; without the file, those of the model's configuration, as in transformers. Also the name of the file that was read.
fn entries(folder: &Path) -> Result<(&'static str, Map<String, Value>), FileError> {
    let path = folder.join(FILE);
    if path.exists() {
        return Ok((FILE, parse(&path, &read(&path)?)?));
    }
    let path = folder.join(MODEL_CONFIG);
    let mut config = if path.exists() { parse(&path, &read(&path)?)? } else { Map::new() };
    config.retain(|_, value| !value.is_null());
    if let Some(Value::Object(text)) = config.get("text_config").cloned() {
        let is_own = |(key, _): &(String, Value)| SamplingDefaults::concerns(key) && !config.contains_key(key);
        let missing: Vec<_> = text.into_iter().filter(is_own).collect();
        config.extend(missing);
    }
    Ok((MODEL_CONFIG, config))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use serde_json::json;
    use tempfile::TempDir;

    use super::*;

    fn folder(files: &[(&str, Value)]) -> TempDir {
        let folder = tempfile::tempdir().unwrap();
        for (name, content) in files {
            std::fs::write(folder.path().join(name), content.to_string()).unwrap();
        }
        folder
    }

    fn args(flags: &[&str]) -> Args {
        Args::try_parse_from([&["penstock"], flags].concat()).unwrap()
    }

    fn shown(folder: &TempDir, flags: &[&str]) -> String {
        defaults(folder.path(), &args(flags)).unwrap().to_string()
    }

    #[test]
    fn flags_replace_remove_and_add_defaults() {
        let model = folder(&[(FILE, json!({"eos_token_id": [1, 2], "temperature": 0.6, "top_k": 20, "num_beams": 4}))]);
        let overrides = ["--override-generation-config", r#"{"temperature": null, "top_p": 0.5}"#];
        assert_eq!(shown(&model, &[]), "temperature 0.6, top_k 20");
        assert_eq!(shown(&model, &overrides), "top_p 0.5, top_k 20");
        for name in ["none", "vllm"] {
            let none = ["--generation-config", name];
            assert_eq!(shown(&model, &none), "");
            assert_eq!(shown(&model, &[none, overrides].concat()), "top_p 0.5");
            assert_eq!(replacement(&args(&none)).unwrap(), None, "token ids are still those of the model's file");
        }
    }

    #[test]
    fn a_folders_file_replaces_the_models_with_its_token_ids() {
        let content = json!({"eos_token_id": 7, "top_p": 0.9});
        let other = folder(&[(FILE, content.clone())]);
        let given = other.path().to_string_lossy().into_owned();
        let replaced = replacement(&args(&["--generation-config", &given])).unwrap();
        assert_eq!(replaced, Some(content.to_string()));
        let error = replacement(&args(&["--generation-config", "/no/such"])).unwrap_err().to_string();
        assert!(error.starts_with("cannot read /no/such/generation_config.json: "), "{error}");
    }

    #[test]
    fn a_model_without_the_file_has_the_entries_of_its_configuration() {
        let config = json!({"top_k": null, "temperature": 0.7, "text_config": {"top_k": 9, "temperature": 2, "eos_token_id": 3}});
        assert_eq!(shown(&folder(&[(MODEL_CONFIG, config.clone())]), &[]), "temperature 0.7, top_k 9");
        assert_eq!(shown(&folder(&[(MODEL_CONFIG, config), (FILE, json!({"min_p": 0.1}))]), &[]), "min_p 0.1");
        assert_eq!(shown(&folder(&[]), &[]), "");
    }
}
