//! What the engine needs to go on after its workers are lost: somebody who starts others.

use std::time::Duration;

use futures::future::BoxFuture;

use crate::worker::Group;

/// Starts a rank group in the place of a lost one.
pub trait RestartGroup: Send + Sync + 'static {
    /// Ends what is left of the lost group and starts one that can do the same: same model, same limits, at least as many KV
    /// blocks. Dropping the future gives up.
    fn restart(&self) -> BoxFuture<'static, Result<Restarted, RestartError>>;
}

/// A group that is warmed up.
pub struct Restarted {
    pub group: Group,
    pub times: RestartTimes,
}

/// How long the parts of a restart took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RestartTimes {
    /// Ending what was left.
    pub stop: Duration,
    pub spawn: Duration,
    /// Until every rank answered.
    pub connect: Duration,
    pub load: Duration,
    pub warm_up: Duration,
}

/// Why there is no new group.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("restarting them failed: {0}")]
pub struct RestartError(pub String);
