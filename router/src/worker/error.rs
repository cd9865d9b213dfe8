//! What can go wrong with a worker; the messages are for operators.

use std::error::Error as _;
use std::time::Duration;

use tonic::{Code, Status};

/// Why a worker group cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say it")]
pub enum WorkerError {
    #[error("rank {rank} did not answer on {endpoint} within {} s: {reason}", .waited.as_secs())]
    Unreachable { rank: usize, endpoint: String, waited: Duration, reason: String },
    #[error(
        "rank {rank} speaks version {theirs} of the worker protocol, this router speaks version {ours}; \
         install the penstock binary and the penstock_server package of one release"
    )]
    Version { rank: usize, theirs: u32, ours: u32 },
    /// The worker refused a call, in its own words.
    #[error("{message}")]
    Refused { rank: usize, message: String },
    #[error("the connection to rank {rank} was lost: {reason}")]
    Lost { rank: usize, reason: String },
    #[error("rank {rank} sent a result that cannot be used: {reason}")]
    Garbled { rank: usize, reason: String },
    #[error("rank {rank} did not answer about {about} within {} s", .waited.as_secs())]
    Unresponsive { rank: usize, about: &'static str, waited: Duration },
    #[error("the ranks do not agree on {what}: {values}")]
    Disagreement { what: &'static str, values: String },
}

impl WorkerError {
    /// Whether the connection failed. The worker's process may then know a better reason.
    pub fn is_loss(&self) -> bool {
        matches!(self, Self::Lost { .. } | Self::Unreachable { .. })
    }

    pub(super) fn of_status(rank: usize, status: &Status) -> Self {
        // A status made on this side has a source, the transport's error; a status that the worker sent has none.
        match status.source() {
            Some(source) => Self::Lost { rank, reason: root_cause(source) },
            None if status.code() == Code::Unavailable => Self::Lost { rank, reason: status.message().to_owned() },
            None if status.message().is_empty() => {
                Self::Refused { rank, message: format!("rank {rank} failed with {:?} and no message", status.code()) }
            }
            None => Self::Refused { rank, message: status.message().to_owned() },
        }
    }
}

/// The innermost error of a chain: tonic and hyper wrap the informative error in several others.
pub(super) fn root_cause(error: &(dyn std::error::Error + 'static)) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}
