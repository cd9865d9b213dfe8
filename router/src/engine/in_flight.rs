//! Steps that were sent and not reported yet, and how long each step took: the figures behind "time per step outside the
//! model".

use std::collections::VecDeque;
use std::time::Duration;

use penstock_scheduler::{Forecast, Plan};
use tokio::time::Instant;

use super::timelines::TracedAdvance;
use crate::sequence::StepShare;
use crate::telemetry::metrics::{self, Method, StepTimes};
use crate::worker::{StepReport, WorkerTiming};

/// The steps in flight, oldest first.
pub(super) struct InFlightSteps {
    steps: VecDeque<InFlightStep>,
    /// When the newest report arrived, or else when the group was ready.
    last_report_at: Instant,
}

/// A step whose report has not arrived.
#[derive(Debug)]
pub(super) struct InFlightStep {
    method: Method,
    num_sequences: usize,
    num_new_sequences: usize,
    traced: Vec<TracedAdvance>,
    /// When the report or the command arrived that made this step possible.
    woken_at: Instant,
    planned_since: Instant,
    sent_at: Instant,
}

/// A step whose report has arrived.
#[derive(Debug)]
pub(super) struct ReportedStep {
    step: InFlightStep,
    reported_at: Instant,
    /// What the step added to the time that its sequences waited: since the previous report, or since the step became possible.
    pub(super) interval: Duration,
}

impl InFlightSteps {
    pub(super) fn new() -> Self {
        Self { steps: VecDeque::new(), last_report_at: Instant::now() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    /// Adds a step that was sent just now.
    pub(super) fn push(&mut self, step: InFlightStep) {
        self.steps.push_back(InFlightStep { sent_at: Instant::now(), ..step });
    }

    /// Takes the oldest step, whose report has arrived. `None`: no step is in flight.
    pub(super) fn pop(&mut self, reported_at: Instant) -> Option<ReportedStep> {
        let step = self.steps.pop_front()?;
        let interval = reported_at - step.woken_at.max(self.last_report_at);
        self.last_report_at = reported_at;
        Some(ReportedStep { step, reported_at, interval })
    }

    /// Drops all steps, because the group was lost. Returns the last sign of life: when the workers could have begun the oldest
    /// step. `None`: no step was in flight.
    pub(super) fn lose(&mut self) -> Option<Instant> {
        let last_sign_of_life = self.steps.front().map(|oldest| oldest.sent_at.max(self.last_report_at));
        for step in self.steps.drain(..) {
            metrics::step_lost(step.method);
        }
        last_sign_of_life
    }

    /// A new group is ready: its first step does not count from the lost group's last report.
    pub(super) fn group_ready(&mut self, now: Instant) {
        self.last_report_at = now;
    }
}

impl InFlightStep {
    pub(super) fn new(plan: &Plan, traced: Vec<TracedAdvance>, woken_at: Instant, planned_since: Instant) -> Self {
        let num_new_sequences = plan.new_sequences.len();
        // COMPAT: a mixed step counts as a prefill, as in TGI's chunked mode.
        let is_decode = num_new_sequences == 0 && plan.advances.iter().all(|advance| advance.num_tokens == 1);
        Self {
            method: if is_decode { Method::Decode } else { Method::Prefill },
            num_sequences: plan.advances.len(),
            num_new_sequences,
            traced,
            woken_at,
            planned_since,
            sent_at: planned_since,
        }
    }
}

impl ReportedStep {
    /// Notes the step in the timelines of its traced sequences.
    pub(super) fn trace(&self, report: &StepReport) {
        let Self { step, reported_at, interval } = self;
        if step.traced.is_empty() {
            return;
        }
        let share = StepShare {
            step: report.step,
            reported: reported_at.into_std(),
            interval: *interval,
            worker_forward: report.timing.forward,
            num_sequences: step.num_sequences,
            num_tokens: 0,
            samples: false,
        };
        step.traced.iter().for_each(|advance| advance.report(&share));
    }

    /// Records the step's metrics. `forecast` is what the scheduler had expected, once it has learned from some steps.
    pub(super) fn record(&self, worker: WorkerTiming, forecast: Option<Forecast>) {
        let Self { step, reported_at, interval } = self;
        let (reported_at, interval) = (*reported_at, *interval);
        if step.num_sequences == 0 {
            return; // A plan that only frees is not a step of the model.
        }
        metrics::step_finished(&StepTimes {
            method: step.method,
            num_sequences: step.num_sequences,
            num_new_sequences: step.num_new_sequences,
            interval,
            round_trip: reported_at - step.sent_at,
            schedule: step.sent_at - step.planned_since,
            apply: reported_at.elapsed(),
            worker_prepare: worker.prepare,
            worker_forward: worker.forward,
            worker_sample: worker.sample,
            worker_idle: worker.idle,
            forecast: forecast.and_then(|forecast| forecast.duration),
            target: forecast.and_then(|forecast| forecast.target),
        });
    }
}
