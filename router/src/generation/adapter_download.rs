//! Adapters that clients name by their ids on the hub. The launcher downloads them.

use std::path::{Path, PathBuf};

use tokio::sync::{mpsc, oneshot};

use super::adapter::AdapterUpdateError;

/// A download that a client asks for. `answer` is closed when the client no longer waits.
#[derive(Debug)]
pub struct AdapterDownload {
    /// `ID` or `ID@REVISION`.
    pub id: String,
    /// The adapter's folder, or why there is none.
    pub answer: oneshot::Sender<Result<PathBuf, String>>,
}

/// The location of an adapter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdapterPlace {
    /// An absolute path.
    Folder(PathBuf),
    /// `ID` or `ID@REVISION`.
    Hub(String),
}

impl AdapterPlace {
    /// An absolute path, or `name` or `owner/name` on the hub, with or without `@revision`.
    pub(crate) fn read(given: &str) -> Option<Self> {
        if Path::new(given).is_absolute() {
            return Some(Self::Folder(given.into()));
        }
        is_hub_id(given).then(|| Self::Hub(given.to_owned()))
    }
}

/// Longest name of an owner, a repository or a revision on the hub.
const MAX_NAME_BYTES: usize = 96;

/// Whether this is `name` or `owner/name` on the hub, with or without `@revision`.
pub fn is_hub_id(given: &str) -> bool {
    let (id, revision) = given.split_once('@').unwrap_or((given, "main"));
    let is_character = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let is_name = |part: &str| {
        (1..=MAX_NAME_BYTES).contains(&part.len()) && !part.starts_with(['.', '-']) && part.bytes().all(is_character)
    };
    id.split('/').count() <= 2 && id.split('/').all(is_name) && is_name(revision)
}

/// Downloads an adapter. Cancel safe: a download whose caller is gone ends.
pub(super) async fn download(
    asking: &mpsc::Sender<AdapterDownload>,
    id: String,
) -> Result<PathBuf, AdapterUpdateError> {
    let (answer, answered) = oneshot::channel();
    // Fails only while the server stops.
    let gone = || AdapterUpdateError::Unusable("the server is shutting down".to_owned());
    asking.send(AdapterDownload { id, answer }).await.map_err(|_| gone())?;
    answered.await.map_err(|_| gone())?.map_err(AdapterUpdateError::Unusable)
}
