//! Recording: the one function for each metric of `table.rs`, and the exporter that renders what was recorded.

use std::time::Duration;

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use penstock_scheduler::Stats;

use super::table::{self as name, Buckets, Kind, METRICS};
use crate::config::RequestLimits;

pub use super::table::reference;

/// Renders what was recorded since [`Exporter::install`].
#[derive(Clone, Debug)]
pub struct Exporter {
    handle: PrometheusHandle,
}

#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    #[error("cannot set up metrics: {0}")]
    Buckets(#[from] BuildError),
    #[error("cannot set up metrics: this process has a recorder already")]
    Installed,
}

impl Exporter {
    /// Makes this process record its metrics. Once per process, before anything is recorded.
    pub fn install(limits: &RequestLimits) -> Result<Self, ExporterError> {
        let recorder = recorder(limits)?;
        let exporter = Self { handle: recorder.handle() };
        metrics::set_global_recorder(recorder).map_err(|_| ExporterError::Installed)?;
        describe();
        Ok(exporter)
    }

    /// Prometheus text format.
    pub fn render(&self) -> String {
        self.handle.render()
    }

    /// Folds recorded samples into buckets. Call it now and then, or memory grows while nobody scrapes.
    pub fn run_upkeep(&self) {
        self.handle.run_upkeep();
    }
}

fn recorder(limits: &RequestLimits) -> Result<PrometheusRecorder, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for metric in METRICS {
        if let Kind::Histogram(buckets) = metric.kind {
            builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.into()), &bounds(buckets, limits))?;
        }
    }
    Ok(builder.build_recorder())
}

fn bounds(buckets: Buckets, limits: &RequestLimits) -> Vec<f64> {
    let linear = |max: usize| (1..=100).map(|step| max as f64 * f64::from(step) / 100.0).collect();
    match buckets {
        Buckets::Duration => (1..=35).map(|exponent| 0.0001 * 1.5_f64.powi(exponent)).collect(),
        Buckets::Step => (0..30).map(|exponent| 0.00001 * 1.57_f64.powi(exponent)).collect(),
        Buckets::InputTokens => linear(limits.max_input_tokens),
        Buckets::TotalTokens => linear(limits.max_total_tokens),
        Buckets::Sequences => (1..=1024).map(f64::from).collect(),
        Buckets::SkippedTokens => (0..=16).map(f64::from).collect(),
    }
}

fn describe() {
    for metric in METRICS {
        match metric.kind {
            Kind::Counter => describe_counter!(metric.name, metric.help),
            Kind::Gauge => describe_gauge!(metric.name, metric.help),
            Kind::Histogram(_) => describe_histogram!(metric.name, metric.help),
        }
    }
}

/// A request asked for generation.
pub(crate) fn request_received() {
    counter!(name::REQUEST_COUNT).increment(1);
}

/// Why a request was not answered in full: the values of the label `err`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    Overloaded,
    Validation,
    Template,
    Generation,
    Incomplete,
    /// The client left.
    Dropped,
}

impl Failure {
    fn label(self) -> &'static str {
        match self {
            Self::Overloaded => "overloaded",
            Self::Validation => "validation",
            Self::Template => "template",
            Self::Generation => "generation",
            Self::Incomplete => "incomplete",
            Self::Dropped => "dropped",
        }
    }
}

pub(crate) fn request_failed(failure: Failure) {
    counter!(name::REQUEST_FAILURE, "err" => failure.label()).increment(1);
}

/// What there was no room in: the values of the label `reason`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RefusalReason {
    Requests,
    QueuedTokens,
    QueueTimeout,
    ShuttingDown,
}

impl RefusalReason {
    fn label(self) -> &'static str {
        match self {
            Self::Requests => "requests",
            Self::QueuedTokens => "queued_tokens",
            Self::QueueTimeout => "queue_timeout",
            Self::ShuttingDown => "shutting_down",
        }
    }
}

pub(crate) fn request_refused(reason: RefusalReason) {
    counter!(name::REQUESTS_REFUSED, "reason" => reason.label()).increment(1);
}

/// A client took nothing of what waited for it for too long.
pub(crate) fn client_given_up() {
    counter!(name::CLIENTS_GIVEN_UP).increment(1);
}

/// How long the parts of an answered request took.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestDurations {
    pub(crate) validation: Duration,
    pub(crate) queue: Duration,
    pub(crate) inference: Duration,
    pub(crate) total: Duration,
    pub(crate) per_token: Duration,
}

pub(crate) fn request_succeeded(durations: RequestDurations, num_generated_tokens: usize) {
    counter!(name::REQUEST_SUCCESS).increment(1);
    histogram!(name::REQUEST_DURATION).record(durations.total);
    histogram!(name::REQUEST_VALIDATION_DURATION).record(durations.validation);
    histogram!(name::REQUEST_QUEUE_DURATION).record(durations.queue);
    histogram!(name::REQUEST_INFERENCE_DURATION).record(durations.inference);
    histogram!(name::REQUEST_TIME_PER_TOKEN).record(durations.per_token);
    histogram!(name::REQUEST_GENERATED_TOKENS).record(num_generated_tokens as f64);
}

/// A prompt passed validation.
pub(crate) fn prompt_accepted(num_input_tokens: usize, max_new_tokens: u32) {
    histogram!(name::REQUEST_INPUT_LENGTH).record(num_input_tokens as f64);
    histogram!(name::REQUEST_MAX_NEW_TOKENS).record(f64::from(max_new_tokens));
}

/// How full the engine is, at this moment, and how many tokens wait for it.
pub(crate) fn load(stats: &Stats, queued_tokens: u64) {
    gauge!(name::QUEUE_TOKENS).set(queued_tokens as f64);
    gauge!(name::QUEUE_SIZE).set(stats.num_queued as f64);
    gauge!(name::BATCH_CURRENT_SIZE).set(stats.num_running as f64);
    gauge!(name::BATCH_CURRENT_MAX_TOKENS).set(stats.max_running_tokens as f64);
    gauge!(name::KV_BLOCKS).set(stats.num_blocks as f64);
    gauge!(name::KV_FREE_BLOCKS).set(stats.num_allocatable_blocks as f64);
    gauge!(name::KV_CACHED_BLOCKS).set(stats.num_cached_blocks as f64);
    counter!(name::PREFIX_QUERIED).absolute(stats.num_queried_tokens);
    counter!(name::PREFIX_HIT).absolute(stats.num_hit_tokens);
}

/// Sequences in a step that starts new ones.
pub(crate) fn batch_next_size(num_sequences: usize) {
    histogram!(name::BATCH_NEXT_SIZE).record(num_sequences as f64);
}

/// Tokens that the KV pool can hold; known after warm-up.
pub fn batch_total_tokens(num_tokens: usize) {
    gauge!(name::BATCH_MAX_TOTAL_TOKENS).set(num_tokens as f64);
    gauge!(name::BATCH_TOTAL_TOKENS).set(num_tokens as f64);
}

/// A step came back whose sequences had so many tokens each: those beyond the first were guessed and accepted.
pub(crate) fn tokens_accepted(num_tokens: impl Iterator<Item = usize>) {
    let mut num_single = 0;
    for num_tokens in num_tokens {
        match num_tokens {
            0 => {}
            1 => num_single += 1,
            several => histogram!(name::REQUEST_SKIPPED_TOKENS).record((several - 1) as f64),
        }
    }
    if num_single > 0 {
        histogram!(name::REQUEST_SKIPPED_TOKENS).record_many(0.0, num_single);
    }
}

/// The router's part of a step: choosing it, during which others may have been `joined`, and handing out its tokens.
pub(crate) fn batch_changed(method: &'static str, schedule: Duration, joined: bool, apply: Duration) {
    histogram!(name::BATCH_FILTER_DURATION, "method" => method).record(schedule);
    histogram!(name::BATCH_DECODE_DURATION, "method" => method).record(apply);
    if joined {
        counter!(name::BATCH_CONCAT, "reason" => "chunking").increment(1);
        // COMPAT: TGI's label is this one whatever the step does.
        histogram!(name::BATCH_CONCAT_DURATION, "method" => "decode").record(schedule);
    }
}

/// A step came back. `method`: `prefill` when any sequence in it was computing its prompt, else `decode`.
pub(crate) fn batch_inference(method: &'static str, forward: Duration, total: Duration) {
    counter!(name::BATCH_INFERENCE_COUNT, "method" => method).increment(1);
    counter!(name::BATCH_INFERENCE_SUCCESS, "method" => method).increment(1);
    histogram!(name::BATCH_FORWARD_DURATION, "method" => method).record(forward);
    histogram!(name::BATCH_INFERENCE_DURATION, "method" => method).record(total);
}

/// A step did not come back.
pub(crate) fn batch_failure(method: &'static str) {
    counter!(name::BATCH_INFERENCE_COUNT, "method" => method).increment(1);
    counter!(name::BATCH_INFERENCE_FAILURE, "method" => method).increment(1);
}

/// A part of a step's time. Durations of the same step overlap: the interval holds all the others.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StepPart {
    Overhead,
    Interval,
    RoundTrip,
    Schedule,
    Apply,
    WorkerPrepare,
    WorkerForward,
    WorkerSample,
    WorkerIdle,
}

impl StepPart {
    fn metric(self) -> &'static str {
        match self {
            Self::Overhead => name::STEP_OVERHEAD,
            Self::Interval => name::STEP_INTERVAL,
            Self::RoundTrip => name::STEP_ROUND_TRIP,
            Self::Schedule => name::STEP_SCHEDULE,
            Self::Apply => name::STEP_APPLY,
            Self::WorkerPrepare => name::STEP_WORKER_PREPARE,
            Self::WorkerForward => name::STEP_WORKER_FORWARD,
            Self::WorkerSample => name::STEP_WORKER_SAMPLE,
            Self::WorkerIdle => name::STEP_WORKER_IDLE,
        }
    }
}

pub(crate) fn step_duration(part: StepPart, method: &'static str, duration: Duration) {
    histogram!(part.metric(), "method" => method).record(duration);
}

/// By how much a step took more or less than was expected.
pub(crate) fn step_forecast(method: &'static str, error: Duration) {
    histogram!(name::STEP_FORECAST_ERROR, "method" => method).record(error);
}

/// How long a step with prompts beside its decodes may take, at this moment.
pub(crate) fn inter_token_target(target: Duration) {
    gauge!(name::INTER_TOKEN_TARGET).set(target);
}

/// A part of the time without workers: the values of the label `phase`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RestartPhase {
    /// Until the loss was noticed.
    Notice,
    /// Until the restart that succeeded.
    Backoff,
    Stop,
    Spawn,
    Connect,
    Load,
    WarmUp,
    /// Computing again what had been computed.
    FirstToken,
}

impl RestartPhase {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Notice => "notice",
            Self::Backoff => "backoff",
            Self::Stop => "stop",
            Self::Spawn => "spawn",
            Self::Connect => "connect",
            Self::Load => "load",
            Self::WarmUp => "warm_up",
            Self::FirstToken => "first_token",
        }
    }
}

pub(crate) fn workers_restarted() {
    counter!(name::WORKER_RESTARTS).increment(1);
}

/// The workers that took the place of lost ones work.
pub(crate) fn downtime(phases: &[(RestartPhase, Duration)], total: Duration) {
    histogram!(name::WORKER_DOWNTIME).record(total);
    for (phase, duration) in phases {
        histogram!(name::WORKER_RESTART, "phase" => phase.label()).record(*duration);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: RequestLimits = RequestLimits {
        max_concurrent_requests: 1,
        max_best_of: 1,
        max_stop_sequences: 1,
        max_top_n_tokens: 1,
        max_input_tokens: 200,
        max_total_tokens: 400,
        max_new_tokens: None,
        max_client_batch_size: 1,
    };

    fn rendered(record: impl FnOnce()) -> String {
        let recorder = recorder(&LIMITS).unwrap();
        let handle = recorder.handle();
        metrics::with_local_recorder(&recorder, || {
            describe();
            record();
        });
        handle.render()
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = METRICS.iter().map(|metric| metric.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), METRICS.len());
    }

    #[test]
    fn names_labels_and_buckets_are_those_of_tgi() {
        let text = rendered(|| {
            request_received();
            request_failed(Failure::Overloaded);
            prompt_accepted(3, 20);
            request_succeeded(RequestDurations::default(), 7);
            batch_inference("prefill", Duration::from_millis(1), Duration::from_millis(2));
        });
        for line in [
            "tgi_request_count 1",
            "tgi_request_success 1",
            "tgi_request_failure{err=\"overloaded\"} 1",
            "tgi_request_input_length_bucket{le=\"2\"} 0",
            "tgi_request_input_length_bucket{le=\"4\"} 1",
            "tgi_request_generated_tokens_bucket{le=\"8\"} 1",
            "tgi_batch_inference_count{method=\"prefill\"} 1",
            "tgi_batch_forward_duration_count{method=\"prefill\"} 1",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert_eq!(text.lines().filter(|line| line.starts_with("tgi_request_duration_bucket")).count(), 36);
    }
}
