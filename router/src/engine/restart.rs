//! How the engine gets a new worker group after it lost one.

use std::time::Duration;

use futures::future::BoxFuture;

use crate::worker::Group;

/// Starts worker groups.
pub trait RestartGroup: Send + Sync + 'static {
    /// Stops what is left of the lost group and starts another one with the same model, the same limits and at least as many
    /// KV blocks. Dropping the future cancels the restart. It is polled on the engine's thread, so it must not block.
    fn restart(&self) -> BoxFuture<'static, Result<Restarted, RestartError>>;
}

/// A new group, loaded and warmed up.
pub struct Restarted {
    /// The group.
    pub group: Group,
    /// How long the restart took.
    pub times: RestartTimes,
}

/// How long each phase of a restart took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartTimes {
    /// Stopping the processes of the lost group.
    pub stop: Duration,
    /// Starting the new processes.
    pub spawn: Duration,
    /// Until every rank answered.
    pub connect: Duration,
    /// Loading the weights.
    pub load: Duration,
    /// Warming up.
    pub warm_up: Duration,
}

/// Why a restart failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("restarting them failed: {0}")]
pub struct RestartError(pub String);
