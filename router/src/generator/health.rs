//! Whether the engine takes steps at this moment, and if not, why.

use std::time::Duration;

/// Only a `Healthy` engine takes steps. All other states end by themselves, except the permanent ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// The workers compute, or wait for work.
    Healthy,
    /// The oldest step in flight has run for so long that the workers seem to hang.
    Stalled {
        /// How long the step has run.
        step: Duration,
    },
    /// A rank does not answer health checks.
    Unresponsive {
        /// Index of the rank.
        rank: usize,
    },
    /// The worker group failed, for this reason, and no new group has finished a step yet.
    Restarting(String),
    /// The server that the engine is on takes no new sequences; it finishes those that it has.
    Draining,
    /// The server that the engine is on was removed from the list of servers; it finishes the sequences that no other one takes.
    Leaving,
    /// The server that the engine is on cannot be reached, for this reason.
    Unreachable(String),
    /// Permanent: the worker group failed, for this reason, and is not restarted.
    Failed(String),
    /// Permanent: the engine was shut down.
    ShutDown,
}

impl Health {
    /// Whether steps are taken.
    pub fn is_healthy(&self) -> bool {
        *self == Self::Healthy
    }

    /// Whether only a restart of the server helps.
    pub fn is_permanent(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::ShutDown)
    }

    /// Whether there is a worker group that makes no progress.
    pub fn is_stuck(&self) -> bool {
        matches!(self, Self::Stalled { .. } | Self::Unresponsive { .. })
    }

    /// Why the engine is not healthy. Safe to show to clients: the workers' own messages are only logged.
    pub fn public_reason(&self) -> Option<String> {
        match self {
            Self::Healthy => None,
            Self::Stalled { step } => Some(format!("a step of the model has taken {} s so far", step.as_secs())),
            Self::Unresponsive { rank } => Some(format!("the model worker of rank {rank} does not answer")),
            Self::Restarting(_) => Some("the model workers are being restarted".to_owned()),
            Self::Draining => Some("the server with the model is being stopped".to_owned()),
            Self::Leaving => Some("the server with the model was removed from the list of servers".to_owned()),
            Self::Unreachable(_) => Some("no server with the model can be reached".to_owned()),
            Self::Failed(_) => Some("the model workers stopped and are not restarted any more".to_owned()),
            Self::ShutDown => Some("the server is shutting down".to_owned()),
        }
    }
}
