//! What a sequence's model is changed by.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

/// A LoRA adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Adapter {
    /// At least 1. It is never given to another adapter.
    pub id: u64,
    /// Absolute path of its folder.
    pub path: Arc<Path>,
}

/// SHA-256 of an adapter's files: adapters of the same hash give the same tokens, on whichever server they are.
pub type AdapterHash = [u8; 32];

/// The adapters of a server elsewhere.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ServerAdapters {
    pub(crate) by_name: HashMap<String, AdapterHash>,
    pub(crate) hashes: HashSet<AdapterHash>,
}

/// Why an adapter cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdapterError {
    /// The adapter itself is unusable with this model.
    #[error("{0}")]
    Unusable(String),
    /// The workers have no room for it now.
    #[error("{0}")]
    NoMemory(String),
    /// The workers stopped, or do not answer.
    #[error("the model workers stopped: {0}")]
    Worker(String),
}
