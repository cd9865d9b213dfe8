//! Files of a model's folder: text, and JSON objects.

use std::io;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FileError {
    #[error("cannot read {}: {source}", .path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{} is not a JSON object: {reason}", .path.display())]
    Malformed { path: PathBuf, reason: String },
}

/// The text of a file.
pub(crate) fn read(path: &Path) -> Result<String, FileError> {
    std::fs::read_to_string(path).map_err(|source| FileError::Read { path: path.to_owned(), source })
}

/// The JSON object `text`, which is the content of `path`.
pub(crate) fn parse(path: &Path, text: &str) -> Result<Map<String, Value>, FileError> {
    serde_json::from_str(text)
        .map_err(|error| FileError::Malformed { path: path.to_owned(), reason: error.to_string() })
}
