//! What can go wrong with a server elsewhere; the messages are for operators.

use std::error::Error as _;

use tonic::{Code, Status};

/// Why a server cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum RemoteError {
    #[error("the connection failed: {0}")]
    Lost(String),
    /// The server's own words.
    #[error("{0}")]
    Refused(String),
    #[error(
        "it speaks version {theirs} of the engine protocol, this router speaks version {ours}; \
         install the same release of penstock on both"
    )]
    Version { theirs: u32, ours: u32 },
    #[error("it differs: {0}")]
    Different(String),
    #[error(
        "it accepts less than this router: {0}; raise its limit, or restart this router while the server runs, so that its limits fit"
    )]
    Smaller(String),
    #[error("it sent something that cannot be used: {0}")]
    Garbled(String),
}

impl RemoteError {
    /// Whether another attempt, or another server, may succeed.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::Lost(_))
    }

    pub(super) fn of_status(status: &Status) -> Self {
        // A status made on this side has a source, the transport's error; a status that the server sent has none.
        let lost = [Code::Unavailable, Code::Cancelled, Code::Unknown, Code::Internal];
        match status.source() {
            Some(source) => Self::Lost(root_cause(source)),
            None if lost.contains(&status.code()) => Self::Lost(status.message().to_owned()),
            None => Self::Refused(status.message().to_owned()),
        }
    }

    pub(super) fn of_transport(error: &tonic::transport::Error) -> Self {
        Self::Lost(root_cause(error))
    }
}

/// The innermost error of a chain: tonic and hyper wrap the informative error in several others.
fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
