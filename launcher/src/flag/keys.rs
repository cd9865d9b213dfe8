//! Reads the API keys from flags, environment and file. Errors never contain a key.

use std::path::{Path, PathBuf};

use penstock_router::config::ApiKeys;

use crate::flag::args::{Args, Secret};

/// Why the keys cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KeyError {
    #[error("cannot read --api-key-file {}: {source}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("--api-key-file {} has no key; remove the flag to serve without keys", .0.display())]
    EmptyFile(PathBuf),
    #[error("--api-key (or API_KEY) is empty; remove it to serve without keys")]
    Empty,
    #[error("{place} cannot be sent in a header: only visible ASCII characters are allowed, no spaces")]
    Unsendable { place: String },
}

/// All keys of the server; none means that requests need no key.
pub(crate) fn read(args: &Args) -> Result<ApiKeys, KeyError> {
    let mut keys = Vec::new();
    for (index, Secret(key)) in args.api_key.iter().enumerate() {
        if key.is_empty() {
            return Err(KeyError::Empty);
        }
        keys.push(checked(key, || format!("key {} of --api-key", index + 1))?);
    }
    if let Some(path) = &args.api_key_file {
        keys.extend(read_file(path)?);
    }
    Ok(ApiKeys::new(keys))
}

fn read_file(path: &Path) -> Result<Vec<String>, KeyError> {
    let text = std::fs::read_to_string(path).map_err(|source| KeyError::Read { path: path.to_owned(), source })?;
    let mut keys = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        keys.push(checked(line, || format!("line {} of {}", index + 1, path.display()))?);
    }
    if keys.is_empty() { Err(KeyError::EmptyFile(path.to_owned())) } else { Ok(keys) }
}

fn checked(key: &str, place: impl FnOnce() -> String) -> Result<String, KeyError> {
    if key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Ok(key.to_owned());
    }
    Err(KeyError::Unsendable { place: place() })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn read_text(text: &str) -> Result<Vec<String>, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        std::fs::write(&path, text).unwrap();
        read_file(&path).map_err(|error| error.to_string().replace(&folder.path().display().to_string(), ""))
    }

    #[test]
    fn each_line_of_a_file_is_a_key() {
        let keys = read_text("# team keys\none\n\n  two,three \r\n").unwrap();
        assert_eq!(keys, ["one", "two,three"]);
    }

    #[test]
    fn a_file_without_keys_is_refused() {
        let error = read_text("# comment\n").unwrap_err();
        assert_eq!(error, "--api-key-file /keys has no key; remove the flag to serve without keys");
    }

    #[test]
    fn an_unusable_key_is_named_by_its_place() {
        let error = read_text("good\nsecret word\n").unwrap_err();
        assert!(error.starts_with("line 2 of /keys cannot be sent") && !error.contains("secret"), "{error}");
        let args = Args::try_parse_from(["penstock", "--api-key", "a", "--api-key", "schlüssel"]).unwrap();
        let error = read(&args).unwrap_err().to_string();
        assert!(error.starts_with("key 2 of --api-key cannot be sent") && !error.contains("schl"), "{error}");
    }

    #[test]
    fn keys_of_all_sources_are_used_and_never_printed() {
        let args = Args::try_parse_from(["penstock", "--api-key", "one,two", "--api-key", "three"]).unwrap();
        assert_eq!(
            format!("{:?} {:?}", args.api_key, read(&args).unwrap()),
            "[(hidden), (hidden), (hidden)] ApiKeys(3 hidden)"
        );
        let args = Args::try_parse_from(["penstock", "--api-key", ""]).unwrap();
        assert!(matches!(read(&args), Err(KeyError::Empty)));
    }
}
