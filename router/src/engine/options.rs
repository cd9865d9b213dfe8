//! The engine's limits and deadlines.

use std::time::Duration;

use penstock_scheduler::Limits;

use crate::remote::{Properties, Remote, RequestLimits};

/// A sequence, or a grammar, that was being computed in this many group losses in a row is given up: it may be the cause.
pub(super) const MAX_LOSSES: u32 = 3;

/// What an engine is started with.
#[derive(Clone, Copy, Debug)]
pub struct EngineOptions {
    /// The scheduler's limits.
    pub limits: Limits,
    /// A rank hangs when it does not answer for this long, or when no rank computes for this long during a step.
    pub step_deadline: Duration,
    /// The engine fails for good after this many group losses and failed restarts without a finished step between them.
    pub max_failures: u32,
}

/// An engine on another server.
#[derive(Clone, Debug)]
pub struct RemoteOptions {
    /// The server.
    pub remote: Remote,
    /// What it must agree on, so that its tokens are those of the other servers.
    pub properties: Properties,
    /// What it must accept.
    pub limits: RequestLimits,
    /// It is lost when it sends nothing for this long.
    pub timeout: Duration,
    /// It hangs when it has a step in flight and finishes none for this long.
    pub step_deadline: Duration,
}

impl EngineOptions {
    /// The usual `max_failures`.
    pub const DEFAULT_MAX_FAILURES: u32 = 5;
    /// The slowest warm-up step was measured on an idle machine; a busy one is slower, and can halt for seconds.
    const DEADLINE_FACTOR: u32 = 20;
    const MIN_STEP_DEADLINE: Duration = Duration::from_secs(10);

    /// The default step deadline, from the duration of the slowest warm-up step.
    pub fn step_deadline(worst_step: Duration) -> Duration {
        worst_step.saturating_mul(Self::DEADLINE_FACTOR).max(Self::MIN_STEP_DEADLINE)
    }
}
