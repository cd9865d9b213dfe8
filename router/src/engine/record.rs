//! How long each step took and where: the figures behind "time per step outside the model".

use std::collections::VecDeque;
use std::time::Duration;

use penstock_scheduler::{Forecast, Plan};
use tokio::time::Instant;

use crate::telemetry::metrics::{self, StepPart};
use crate::worker::WorkerTiming;

/// A plan whose report has not come yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepInFlight {
    method: &'static str,
    num_sequences: usize,
    starts: bool,
    /// New sequences and others are in it together.
    joins: bool,
    /// What led to this plan: the arrival of a report or of a command.
    woken_at: Instant,
    sent_at: Instant,
    /// Choosing the plan and handing it to the transport.
    schedule: Duration,
}

/// One finished step.
#[derive(Clone, Copy, Debug)]
pub(super) struct StepRecord {
    method: &'static str,
    num_sequences: usize,
    starts: bool,
    joins: bool,
    schedule: Duration,
    round_trip: Duration,
    apply: Duration,
    interval: Duration,
    worker: WorkerTiming,
    /// What the scheduler had expected, once it knows something.
    forecast: Option<Forecast>,
}

impl StepInFlight {
    pub fn new(plan: &Plan, woken_at: Instant) -> Self {
        // COMPAT: a mixed step counts as a prefill, as in TGI's chunked mode.
        let is_decode = plan.new_sequences.is_empty() && plan.advances.iter().all(|advance| advance.num_tokens == 1);
        Self {
            method: if is_decode { "decode" } else { "prefill" },
            num_sequences: plan.advances.len(),
            starts: !plan.new_sequences.is_empty(),
            joins: !plan.new_sequences.is_empty() && plan.new_sequences.len() < plan.advances.len(),
            woken_at,
            sent_at: woken_at,
            schedule: Duration::ZERO,
        }
    }

    pub fn sent(&mut self, planning_since: Instant, sent_at: Instant) {
        self.schedule = sent_at - planning_since;
        self.sent_at = sent_at;
    }

    /// When the worker could begin with this step: not before the one ahead of it was reported.
    pub fn since(&self, last_report_at: Instant) -> Instant {
        self.sent_at.max(last_report_at)
    }

    /// What it added to the time its sequences waited: since the report before it, or since it was called for.
    pub fn interval(&self, previous_report_at: Instant, arrived_at: Instant) -> Duration {
        arrived_at - self.woken_at.max(previous_report_at)
    }
}

impl StepRecord {
    pub fn new(
        step: &StepInFlight,
        worker: WorkerTiming,
        interval: Duration,
        arrived_at: Instant,
        forecast: Option<Forecast>,
    ) -> Self {
        Self {
            method: step.method,
            num_sequences: step.num_sequences,
            starts: step.starts,
            joins: step.joins,
            schedule: step.schedule,
            round_trip: arrived_at - step.sent_at,
            apply: arrived_at.elapsed(),
            interval,
            worker,
            forecast,
        }
    }

    /// Everything but the model, as far as it was not hidden behind it.
    fn overhead(&self) -> Duration {
        self.interval.saturating_sub(self.worker.forward)
    }

    pub fn export(&self) {
        if self.num_sequences == 0 {
            return; // A plan that only frees is not a step of the model.
        }
        metrics::batch_inference(self.method, self.worker.forward, self.interval);
        metrics::batch_changed(self.method, self.schedule, self.joins, self.apply);
        if let Some(expected) = self.forecast.and_then(|forecast| forecast.duration) {
            metrics::step_forecast(self.method, expected.abs_diff(self.interval));
        }
        if let Some(target) = self.forecast.and_then(|forecast| forecast.target) {
            metrics::inter_token_target(target);
        }
        if self.starts {
            metrics::batch_next_size(self.num_sequences);
        }
        for (part, duration) in [
            (StepPart::Overhead, self.overhead()),
            (StepPart::Interval, self.interval),
            (StepPart::RoundTrip, self.round_trip),
            (StepPart::Schedule, self.schedule),
            (StepPart::Apply, self.apply),
            (StepPart::WorkerPrepare, self.worker.prepare),
            (StepPart::WorkerForward, self.worker.forward),
            (StepPart::WorkerSample, self.worker.sample),
            (StepPart::WorkerIdle, self.worker.idle),
        ] {
            metrics::step_duration(part, self.method, duration);
        }
    }
}

/// Counts the steps that were lost with their workers.
pub(super) fn worker_failed(in_flight: &VecDeque<StepInFlight>) {
    for step in in_flight {
        metrics::batch_failure(step.method);
    }
}
