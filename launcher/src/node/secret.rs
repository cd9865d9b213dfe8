//! The secret that a server and its nodes share. Errors never contain it.

use std::path::{Path, PathBuf};

/// A node shows its certificate to everybody who connects. With it, a short secret could be found by trying out, without the node.
const MIN_CHARACTERS: usize = 32;

/// `Debug` does not print it.
#[derive(Clone)]
pub(crate) struct NodeSecret(String);

/// Why a secret cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SecretError {
    #[error("cannot read the nodes' secret in {}: {source}", .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "the nodes' secret has {0} characters, must have at least {min}; make one with: openssl rand -hex 32",
        min = MIN_CHARACTERS
    )]
    Short(usize),
    #[error("--ranks-on node://… needs --node-secret-file, the file that every `penstock node` has as --secret-file")]
    Missing,
}

impl NodeSecret {
    pub(crate) fn read(path: &Path) -> Result<Self, SecretError> {
        let text =
            std::fs::read_to_string(path).map_err(|source| SecretError::Read { path: path.to_owned(), source })?;
        Self::new(&text)
    }

    /// Without the white space around it.
    pub(crate) fn new(text: &str) -> Result<Self, SecretError> {
        let text = text.trim();
        if text.len() < MIN_CHARACTERS {
            return Err(SecretError::Short(text.len()));
        }
        Ok(Self(text.to_owned()))
    }

    /// A new secret of 32 random bytes.
    pub(super) fn make() -> Self {
        let bytes: [u8; 32] = rand::random();
        Self(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    pub(super) fn text(&self) -> &str {
        &self.0
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_short_secret_is_refused_without_being_printed() {
        let error = NodeSecret::new(" hunter2\n").err().unwrap().to_string();
        assert!(error.contains("has 7 characters, must have at least 32") && !error.contains("hunter2"), "{error}");
    }
}
