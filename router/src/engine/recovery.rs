//! How often a lost worker group is replaced, and how long its sequences wait for it (docs/adr/worker-failures.md).

use std::time::Duration;

use tokio::time::Instant;

use super::restart::RestartTimes;
use crate::telemetry::metrics::{self, RestartPhase};

/// Wait before the first restart; each further one waits four times as long, up to the maximum.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// A group that was idle when it was lost, this long after its start, counts as healthy: its loss starts a new streak.
const PROVEN_IDLE: Duration = Duration::from_secs(60);

/// Failures that are left until the engine fails for good. A finished step replenishes it.
#[derive(Debug)]
pub(super) struct RestartBudget {
    max_failures: u32,
    /// Group losses and failed restarts since a step was finished.
    num_failures: u32,
    group_since: Instant,
}

/// The time between the last sign of life of a lost group and the first token of the next one.
#[derive(Debug)]
pub(super) struct Outage {
    began: Instant,
    noticed: Instant,
    /// Waited before restarts, and spent in restarts that failed.
    backoff: Duration,
    times: RestartTimes,
    resumed: Instant,
    num_sequences: usize,
}

impl RestartBudget {
    pub(super) fn new(max_failures: u32) -> Self {
        Self { max_failures, num_failures: 0, group_since: Instant::now() }
    }

    /// A step was finished.
    pub(super) fn replenish(&mut self) {
        self.num_failures = 0;
    }

    /// A new group is ready.
    pub(super) fn group_ready(&mut self, now: Instant) {
        self.group_since = now;
    }

    /// A group was lost without a step in flight.
    pub(super) fn lost_while_idle(&mut self) {
        if self.group_since.elapsed() > PROVEN_IDLE {
            self.replenish();
        }
    }

    /// Counts a group loss or a failed restart. Returns how long to wait before the next restart, or, with the budget spent,
    /// why the engine fails.
    pub(super) fn spend(&mut self, reason: &str) -> Result<Duration, String> {
        self.num_failures += 1;
        let Self { num_failures, max_failures, .. } = *self;
        if num_failures < max_failures {
            tracing::warn!(
                num_failures,
                max_failures,
                "the model workers failed and are restarted, streams wait: {reason}"
            );
            return Ok(backoff(num_failures));
        }
        Err(match num_failures {
            1 => reason.to_owned(),
            _ => format!("{num_failures} failures in a row without a finished step, the last one: {reason}"),
        })
    }
}

pub(super) fn backoff(num_failures: u32) -> Duration {
    let factor = 4_u32.saturating_pow(num_failures.saturating_sub(1));
    FIRST_BACKOFF.saturating_mul(factor).min(MAX_BACKOFF)
}

impl Outage {
    /// A group was lost while `num_sequences` sequences were running. The loss of a group that has given no token yet prolongs
    /// the `previous` outage.
    pub(super) fn begin(previous: Option<Self>, last_sign_of_life: Instant, num_sequences: usize) -> Self {
        let now = Instant::now();
        let began = previous.map_or(last_sign_of_life, |outage| outage.began);
        Self {
            began,
            noticed: now,
            backoff: Duration::ZERO,
            times: RestartTimes::default(),
            resumed: now,
            num_sequences,
        }
    }

    /// A new group is ready, after a restart that began at `restart_began`.
    pub(super) fn resume(&mut self, restart_began: Instant, times: RestartTimes, now: Instant) {
        (self.backoff, self.times, self.resumed) = (restart_began - self.noticed, times, now);
    }

    /// Logs and records the outage, which ends now.
    pub(super) fn report(&self) {
        let now = Instant::now();
        let RestartTimes { stop, spawn, connect, load, warm_up } = self.times;
        let phases = [
            (RestartPhase::Notice, self.noticed - self.began),
            (RestartPhase::Backoff, self.backoff),
            (RestartPhase::Stop, stop),
            (RestartPhase::Spawn, spawn),
            (RestartPhase::Connect, connect),
            (RestartPhase::Load, load),
            (RestartPhase::WarmUp, warm_up),
            (RestartPhase::FirstToken, now - self.resumed),
        ];
        let total = now - self.began;
        for (phase, duration) in phases {
            tracing::info!(milliseconds = duration.as_millis(), "restart phase {}", phase.value());
        }
        metrics::downtime(&phases, total);
        let sequences = self.num_sequences;
        tracing::info!(milliseconds = total.as_millis(), sequences, "the model workers have recovered");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_backoff_is_longer_than_the_one_before_up_to_the_maximum() {
        let mut budget = RestartBudget::new(7);
        let waits: Vec<_> = (1..=5).map(|_| budget.spend("lost").unwrap().as_millis()).collect();
        assert_eq!(waits, [100, 400, 1600, 5000, 5000]);
        assert_eq!(backoff(u32::MAX), MAX_BACKOFF);
    }

    #[test]
    fn a_finished_step_replenishes_the_budget() {
        let mut budget = RestartBudget::new(2);
        for _ in 0..3 {
            assert_eq!(budget.spend("lost"), Ok(FIRST_BACKOFF));
            budget.replenish();
        }
        assert_eq!(budget.spend("lost"), Ok(FIRST_BACKOFF));
        let reason = "2 failures in a row without a finished step, the last one: lost again";
        assert_eq!(budget.spend("lost again"), Err(reason.to_owned()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_group_that_idled_for_a_minute_starts_a_new_streak() {
        for (idle, is_new_streak) in [(PROVEN_IDLE, false), (PROVEN_IDLE + Duration::from_secs(1), true)] {
            let mut budget = RestartBudget::new(2);
            budget.spend("lost").unwrap();
            budget.group_ready(Instant::now());
            tokio::time::advance(idle).await;
            budget.lost_while_idle();
            assert_eq!(budget.spend("lost").is_ok(), is_new_streak);
        }
    }
}
