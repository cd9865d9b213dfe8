//! What can be expected of the engine at this moment.

use std::time::Duration;

/// Only `Well` takes steps. Whatever else it is heals by itself, unless it is lasting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// The workers compute, or wait for something to do.
    Well,
    /// The oldest step has taken so long already that its workers seem to hang.
    Stalled {
        step: Duration,
    },
    /// This rank does not answer, and no step came back while it was asked.
    Silent {
        rank: usize,
    },
    /// The workers are gone, for this reason, and others have not done a step yet.
    Restarting(String),
    /// The workers are gone for ever, for this reason.
    Failed(String),
    ShutDown,
}

impl Health {
    pub fn is_well(&self) -> bool {
        *self == Self::Well
    }

    /// Nothing but another process helps.
    pub fn is_lasting(&self) -> bool {
        matches!(self, Self::Failed(_) | Self::ShutDown)
    }

    /// There are workers, and they do not get on.
    pub fn is_stuck(&self) -> bool {
        matches!(self, Self::Stalled { .. } | Self::Silent { .. })
    }

    /// Why it is not well, in words that anybody may read: what the workers said of their end is in the log.
    pub fn public_reason(&self) -> Option<String> {
        match self {
            Self::Well => None,
            Self::Stalled { step } => Some(format!("a step of the model has taken {} s so far", step.as_secs())),
            Self::Silent { rank } => Some(format!("the model worker of rank {rank} does not answer")),
            Self::Restarting(_) => Some("the model workers are being restarted".to_owned()),
            Self::Failed(_) => Some("the model workers stopped and are not restarted any more".to_owned()),
            Self::ShutDown => Some("the server is shutting down".to_owned()),
        }
    }
}
