//! After the workers are lost: others are started, and every sequence goes on from its last token (docs/adr/0009).
//!
//! INVARIANT: a sequence fails for having been in the last step only when it was alone in it, and for the third time
//! without having got past that step in between. Until then nothing is known but that it was there, like all the others.

use std::pin::pin;
use std::time::Duration;

use tokio::time::Instant;

use super::MAX_LOSSES;
use super::grammar::Compiler;
use super::handle::State;
use super::record;
use super::restart::{RestartTimes, Restarted};
use super::step_loop::{StepLoop, Stop};
use crate::sequence::{SequenceEvent, SequenceFailure};
use crate::telemetry::metrics::{self, RestartPhase};
use crate::worker::Group;

/// Losses in a row with a sequence in the step, after which it is tried alone.
const SUSPICIOUS_LOSSES: u32 = 2;
/// Before the first restart, and the longest wait between two; each is the fourfold of the one before.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(5);
/// Workers that were idle for so long before they were lost had worked.
const PROVEN_IDLE: Duration = Duration::from_secs(60);

/// The time between the last sign of life of the workers and the next token.
#[derive(Debug)]
pub(super) struct Outage {
    began: Instant,
    noticed: Instant,
    /// Waited before restarts, and spent in those that failed.
    backoff: Duration,
    times: RestartTimes,
    resumed: Instant,
    num_replayed: usize,
}

impl StepLoop {
    /// Starts other workers, however often it takes; all sequences are queued again when it returns.
    pub(super) async fn recover(&mut self, mut reason: String) -> Result<Group, Stop> {
        self.lose_workers(&reason);
        let noticed = Instant::now();
        loop {
            self.num_failures += 1;
            if self.num_failures >= self.options.max_failures {
                let num_failures = self.num_failures;
                return Err(Stop::WorkerFailed(match num_failures {
                    0 | 1 => reason,
                    _ => format!("{num_failures} failures in a row without a finished step, at last: {reason}"),
                }));
            }
            let (num_failures, max_failures) = (self.num_failures, self.options.max_failures);
            tracing::warn!(
                num_failures,
                max_failures,
                "the model workers stopped and are restarted; streams wait: {reason}"
            );
            let backoff = backoff(self.num_failures);
            let restart = self.restart.restart();
            let restarted = self.meanwhile(async move {
                tokio::time::sleep(backoff).await;
                (Instant::now(), restart.await)
            });
            match restarted.await? {
                (since, Ok(restarted)) => return Ok(self.resume(restarted, since - noticed)),
                (_, Err(error)) => reason = error.to_string(),
            }
        }
    }

    fn lose_workers(&mut self, reason: &str) {
        let now = Instant::now();
        let was_idle = self.in_flight.is_empty();
        let last_sign_of_life = self.in_flight.front().map_or(now, |oldest| oldest.since(self.last_report_at));
        if was_idle && now - self.group_since > PROVEN_IDLE {
            self.num_failures = 0;
        }
        self.state.send_replace(State::Restarting(reason.to_owned()));
        self.grammars.send_replace(Compiler::Restarting);
        self.next_compiler = None;
        record::worker_failed(&self.in_flight);
        let num_replayed = self.scheduler.stats().num_running;
        self.blame();
        self.in_flight.clear();
        // Workers that are lost before the first token make one outage longer.
        let began = self.outage.take().map_or(last_sign_of_life, |outage| outage.began);
        let (backoff, times) = (Duration::ZERO, RestartTimes::default());
        self.outage = Some(Outage { began, noticed: now, backoff, times, resumed: now, num_replayed });
    }

    /// Queues everybody again. Who was in flight is suspected, tried alone, given up: each time that it happens again.
    fn blame(&mut self) {
        let num_steps_in_flight = self.scheduler.stats().num_steps_in_flight;
        for id in self.scheduler.restart() {
            let Some(sequence) = self.open.get_mut(&id) else { continue };
            sequence.lose(num_steps_in_flight);
            if sequence.num_losses() >= MAX_LOSSES {
                let reason = format!(
                    "the model workers stopped {MAX_LOSSES} times in a row while they computed this sequence, \
                     the last time alone; it is not tried again"
                );
                tracing::error!("{reason}");
                self.scheduler.abort(id);
                self.finish(id, SequenceEvent::Failed(SequenceFailure::Sequence(reason)));
            }
        }
        let is_suspect = |id: &_| self.open[id].num_losses() >= SUSPICIOUS_LOSSES;
        self.suspects = self.open.keys().copied().filter(is_suspect).collect();
        // The youngest is tried first: the others have worked for longer.
        self.suspects.sort_unstable();
    }

    /// Lets the next suspect run alone until it is cleared; everybody, when there is none.
    pub(super) fn try_suspects(&mut self) {
        while let Some(id) = self.suspects.last().copied() {
            if self.open.get(&id).is_some_and(|sequence| sequence.num_losses() >= SUSPICIOUS_LOSSES) {
                return self.scheduler.quarantine(Some(id));
            }
            self.suspects.pop();
            self.scheduler.quarantine(None);
        }
        if let Some(compiler) = self.next_compiler.take() {
            self.grammars.send_replace(Compiler::Ready(compiler));
        }
    }

    /// Takes commands until the future is done: who comes is queued, who leaves is forgotten.
    async fn meanwhile<T>(&mut self, future: impl Future<Output = T>) -> Result<T, Stop> {
        let mut future = pin!(future);
        loop {
            self.publish_load();
            tokio::select! {
                done = &mut future => return Ok(done),
                command = self.commands.recv() => self.take_command(command)?,
            }
        }
    }

    fn resume(&mut self, restarted: Restarted, backoff: Duration) -> Group {
        let Restarted { group, times } = restarted;
        metrics::workers_restarted();
        let now = Instant::now();
        self.last_report_at = now;
        self.group_since = now;
        self.next_compiler = Some(group.grammars());
        if let Some(outage) = &mut self.outage {
            (outage.backoff, outage.times, outage.resumed) = (backoff, times, now);
        }
        group
    }

    /// The new workers have shown that they work, or there is nothing to show it with.
    pub(super) fn end_outage(&mut self) {
        if let Some(outage) = self.outage.take() {
            self.state.send_replace(State::Serving);
            outage.report();
        }
    }
}

impl Outage {
    fn report(&self) {
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
            let milliseconds = duration.as_millis();
            tracing::info!(milliseconds, "restart phase {}", phase.label());
        }
        metrics::downtime(&phases, total);
        tracing::info!(milliseconds = total.as_millis(), sequences = self.num_replayed, "the model workers work again");
    }
}

fn backoff(num_failures: u32) -> Duration {
    let factor = 4_u32.saturating_pow(num_failures.saturating_sub(1));
    FIRST_BACKOFF.saturating_mul(factor).min(MAX_BACKOFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wait_is_longer_than_the_one_before_and_none_is_too_long() {
        let waits: Vec<_> = (1..6).map(|num_failures| backoff(num_failures).as_millis()).collect();
        assert_eq!(waits, [100, 400, 1600, 5000, 5000]);
        assert_eq!(backoff(u32::MAX), MAX_BACKOFF);
    }
}
