//! The API keys, from flags, environment and a file. What is wrong with one is said without showing it.

use std::path::{Path, PathBuf};

use penstock_router::config::ApiKeys;

use crate::args::{Args, Secret};

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("cannot read --api-key-file {}: {source}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("--api-key-file {} has no key; leave it out to serve without keys", .0.display())]
    EmptyFile(PathBuf),
    #[error("--api-key (or API_KEY) is empty; leave it out to serve without keys")]
    Empty,
    #[error("{place} cannot be sent in a header: a key has visible ASCII characters only, without spaces")]
    Unsendable { place: String },
}

pub fn read(args: &Args) -> Result<ApiKeys, KeyError> {
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
    fn a_file_has_a_key_on_each_line() {
        let keys = read_text("# of the team\none\n\n  two,three \r\n").unwrap();
        assert_eq!(keys, ["one", "two,three"]);
    }

    #[test]
    fn a_file_that_would_open_the_server_is_refused() {
        let error = read_text("# nobody\n").unwrap_err();
        assert_eq!(error, "--api-key-file /keys has no key; leave it out to serve without keys");
    }

    #[test]
    fn a_key_that_cannot_be_sent_is_named_by_its_place() {
        let error = read_text("good\nsecret word\n").unwrap_err();
        assert!(error.starts_with("line 2 of /keys cannot be sent") && !error.contains("secret"), "{error}");
        let args = Args::try_parse_from(["penstock", "--api-key", "a", "--api-key", "schlüssel"]).unwrap();
        let error = read(&args).unwrap_err().to_string();
        assert!(error.starts_with("key 2 of --api-key cannot be sent") && !error.contains("schl"), "{error}");
    }

    #[test]
    fn keys_come_from_everywhere_and_are_printed_nowhere() {
        let args = Args::try_parse_from(["penstock", "--api-key", "one,two", "--api-key", "three"]).unwrap();
        assert_eq!(
            format!("{:?} {:?}", args.api_key, read(&args).unwrap()),
            "[(hidden), (hidden), (hidden)] ApiKeys(3 hidden)"
        );
        let args = Args::try_parse_from(["penstock", "--api-key", ""]).unwrap();
        assert!(matches!(read(&args), Err(KeyError::Empty)));
    }
}
