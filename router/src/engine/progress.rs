//! Whether the workers get on. A worker that hangs keeps its socket, so it is asked now and then how it is.
//!
//! A busy worker answers while it computes. One whose process is stopped, or whose interpreter is stuck, does not; one
//! whose computation alone is stuck is known by the age of its step.

use std::convert::Infallible;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::MissedTickBehavior;

use super::Load;
use crate::worker::HealthProbe;

/// How often the ranks are asked, and how long they may take to answer.
const PROBE_INTERVAL: Duration = Duration::from_secs(5);
const PROBE_PATIENCE: Duration = Duration::from_secs(5);

/// Part of the deadline after which a worker is given up: whoever asks before a restart finds that one is near.
const STALL_FRACTION: u32 = 2;

/// A step that has taken so long is a stall.
pub(super) fn stall_deadline(step_deadline: Duration) -> Duration {
    step_deadline / STALL_FRACTION
}

/// Asks for as long as it is polled; the sender tells of the rank that does not answer.
pub(super) async fn watch(
    mut probe: HealthProbe,
    load: watch::Receiver<Load>,
    silent: watch::Sender<Option<usize>>,
) -> Infallible {
    let mut ticks = tokio::time::interval(PROBE_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let step_before = load.borrow().oldest_step_since;
        let rank = probe.silent_rank(PROBE_PATIENCE).await;
        // On a machine that is short of processors an answer may be late, and steps come back all the same.
        let gets_on = step_before.is_some() && load.borrow().oldest_step_since != step_before;
        let rank = rank.filter(|_| !gets_on);
        silent.send_if_modified(|silent| std::mem::replace(silent, rank) != rank);
    }
}
