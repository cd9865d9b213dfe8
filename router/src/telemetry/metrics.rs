//! Every metric, once: its name, kind, help and buckets, and the one function that records it.
//!
//! Names, labels and buckets are those that TGI's dashboards query. Unlike TGI a request is counted once, whatever
//! route it came by, and `tgi_request_skipped_tokens` is a histogram. Ours are beside them, with units in the name.

use std::time::Duration;

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use crate::config::RequestLimits;
use crate::engine::Load;

enum Kind {
    Counter,
    Gauge,
    Histogram(Buckets),
}

#[derive(Clone, Copy)]
enum Buckets {
    /// 35 geometric bounds from 0.15 ms to 146 s.
    Duration,
    /// 100 linear bounds up to the longest input.
    InputTokens,
    /// 100 linear bounds up to the longest sequence.
    TotalTokens,
    /// 1 to 1024, one by one.
    Sequences,
    /// 30 geometric bounds from 10 µs to 5 s.
    Step,
    /// 0 to 16, one by one.
    SkippedTokens,
}

struct Metric {
    name: &'static str,
    kind: Kind,
    help: &'static str,
}

const REQUEST_COUNT: &str = "tgi_request_count";
const REQUEST_SUCCESS: &str = "tgi_request_success";
const REQUEST_FAILURE: &str = "tgi_request_failure";
const REQUEST_DURATION: &str = "tgi_request_duration";
const REQUEST_VALIDATION_DURATION: &str = "tgi_request_validation_duration";
const REQUEST_QUEUE_DURATION: &str = "tgi_request_queue_duration";
const REQUEST_INFERENCE_DURATION: &str = "tgi_request_inference_duration";
const REQUEST_TIME_PER_TOKEN: &str = "tgi_request_mean_time_per_token_duration";
const REQUEST_GENERATED_TOKENS: &str = "tgi_request_generated_tokens";
const REQUEST_INPUT_LENGTH: &str = "tgi_request_input_length";
const REQUEST_MAX_NEW_TOKENS: &str = "tgi_request_max_new_tokens";
const REQUEST_SKIPPED_TOKENS: &str = "tgi_request_skipped_tokens";
const QUEUE_SIZE: &str = "tgi_queue_size";
const BATCH_CURRENT_SIZE: &str = "tgi_batch_current_size";
const BATCH_CURRENT_MAX_TOKENS: &str = "tgi_batch_current_max_tokens";
const BATCH_NEXT_SIZE: &str = "tgi_batch_next_size";
const BATCH_INFERENCE_COUNT: &str = "tgi_batch_inference_count";
const BATCH_INFERENCE_SUCCESS: &str = "tgi_batch_inference_success";
const BATCH_INFERENCE_FAILURE: &str = "tgi_batch_inference_failure";
const BATCH_INFERENCE_DURATION: &str = "tgi_batch_inference_duration";
const BATCH_FORWARD_DURATION: &str = "tgi_batch_forward_duration";
const BATCH_DECODE_DURATION: &str = "tgi_batch_decode_duration";
const BATCH_FILTER_DURATION: &str = "tgi_batch_filter_duration";
const BATCH_CONCAT_DURATION: &str = "tgi_batch_concat_duration";
const BATCH_CONCAT: &str = "tgi_batch_concat";
const BATCH_MAX_TOTAL_TOKENS: &str = "tgi_batch_max_total_tokens";
const BATCH_TOTAL_TOKENS: &str = "tgi_batch_total_tokens";
const KV_BLOCKS: &str = "penstock_kv_blocks";
const KV_FREE_BLOCKS: &str = "penstock_kv_free_blocks";
const STEP_OVERHEAD: &str = "penstock_step_overhead_seconds";
const STEP_INTERVAL: &str = "penstock_step_interval_seconds";
const STEP_ROUND_TRIP: &str = "penstock_step_round_trip_seconds";
const STEP_SCHEDULE: &str = "penstock_step_schedule_seconds";
const STEP_APPLY: &str = "penstock_step_apply_seconds";
const STEP_WORKER_PREPARE: &str = "penstock_step_worker_prepare_seconds";
const STEP_WORKER_FORWARD: &str = "penstock_step_worker_forward_seconds";
const STEP_WORKER_SAMPLE: &str = "penstock_step_worker_sample_seconds";
const STEP_WORKER_IDLE: &str = "penstock_step_worker_idle_seconds";

const fn counter_of(name: &'static str, help: &'static str) -> Metric {
    Metric { name, kind: Kind::Counter, help }
}

const fn gauge_of(name: &'static str, help: &'static str) -> Metric {
    Metric { name, kind: Kind::Gauge, help }
}

const fn histogram_of(name: &'static str, buckets: Buckets, help: &'static str) -> Metric {
    Metric { name, kind: Kind::Histogram(buckets), help }
}

const METRICS: &[Metric] = &[
    counter_of(REQUEST_COUNT, "Requests that asked for generation"),
    counter_of(REQUEST_SUCCESS, "Requests answered in full"),
    counter_of(REQUEST_FAILURE, "Requests not answered in full, by reason (label err)"),
    histogram_of(REQUEST_DURATION, Buckets::Duration, "Seconds from a request's arrival to its last token"),
    histogram_of(REQUEST_VALIDATION_DURATION, Buckets::Duration, "Seconds spent on templates, tokenizing and checks"),
    histogram_of(REQUEST_QUEUE_DURATION, Buckets::Duration, "Seconds waited until the first step"),
    histogram_of(REQUEST_INFERENCE_DURATION, Buckets::Duration, "Seconds from the first step to the last token"),
    histogram_of(REQUEST_TIME_PER_TOKEN, Buckets::Duration, "Seconds of inference per generated token, mean"),
    histogram_of(REQUEST_GENERATED_TOKENS, Buckets::TotalTokens, "Tokens generated for a request"),
    histogram_of(REQUEST_INPUT_LENGTH, Buckets::InputTokens, "Tokens in a prompt"),
    histogram_of(REQUEST_MAX_NEW_TOKENS, Buckets::TotalTokens, "Most tokens that a request allows to generate"),
    histogram_of(REQUEST_SKIPPED_TOKENS, Buckets::SkippedTokens, "Tokens accepted beyond the first in one step"),
    gauge_of(QUEUE_SIZE, "Sequences waiting for their first step"),
    gauge_of(BATCH_CURRENT_SIZE, "Sequences that are running"),
    gauge_of(BATCH_CURRENT_MAX_TOKENS, "Tokens that the blocks of the running sequences can hold"),
    histogram_of(BATCH_NEXT_SIZE, Buckets::Sequences, "Sequences in a step that has new ones"),
    counter_of(BATCH_INFERENCE_COUNT, "Steps, by method"),
    counter_of(BATCH_INFERENCE_SUCCESS, "Steps that came back, by method"),
    counter_of(BATCH_INFERENCE_FAILURE, "Steps that did not come back, by method"),
    histogram_of(BATCH_INFERENCE_DURATION, Buckets::Duration, "Seconds from sending a step to applying its result"),
    histogram_of(BATCH_FORWARD_DURATION, Buckets::Duration, "Seconds a step spent in the model"),
    histogram_of(BATCH_DECODE_DURATION, Buckets::Duration, "Seconds a step spent on detokenizing"),
    histogram_of(BATCH_FILTER_DURATION, Buckets::Duration, "Seconds spent on removing finished sequences"),
    histogram_of(BATCH_CONCAT_DURATION, Buckets::Duration, "Seconds spent on joining batches"),
    counter_of(BATCH_CONCAT, "Batches joined, by reason"),
    gauge_of(BATCH_MAX_TOTAL_TOKENS, "Tokens that the KV pool can hold"),
    gauge_of(BATCH_TOTAL_TOKENS, "Tokens that the KV pool can hold"),
    gauge_of(KV_BLOCKS, "Blocks of the KV pool"),
    gauge_of(KV_FREE_BLOCKS, "Blocks of the KV pool that nobody uses"),
    histogram_of(
        STEP_OVERHEAD,
        Buckets::Step,
        "Seconds a step added beside the model, as far as they were not hidden behind it",
    ),
    histogram_of(STEP_INTERVAL, Buckets::Step, "Seconds that a step added to the time its sequences waited"),
    histogram_of(STEP_ROUND_TRIP, Buckets::Step, "Seconds from sending a step to its result"),
    histogram_of(STEP_SCHEDULE, Buckets::Step, "Seconds spent on choosing a step and handing it over"),
    histogram_of(STEP_APPLY, Buckets::Step, "Seconds spent on applying a step's result"),
    histogram_of(STEP_WORKER_PREPARE, Buckets::Step, "Seconds the worker spent on turning a step into tensors"),
    histogram_of(STEP_WORKER_FORWARD, Buckets::Step, "Seconds the worker spent in the model"),
    histogram_of(STEP_WORKER_SAMPLE, Buckets::Step, "Seconds the worker spent on choosing tokens"),
    histogram_of(STEP_WORKER_IDLE, Buckets::Step, "Seconds the worker waited for the step"),
];

/// docs/metrics.md.
pub fn reference() -> String {
    String::new()
}

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
    counter!(REQUEST_COUNT).increment(1);
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
    counter!(REQUEST_FAILURE, "err" => failure.label()).increment(1);
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
    counter!(REQUEST_SUCCESS).increment(1);
    histogram!(REQUEST_DURATION).record(durations.total);
    histogram!(REQUEST_VALIDATION_DURATION).record(durations.validation);
    histogram!(REQUEST_QUEUE_DURATION).record(durations.queue);
    histogram!(REQUEST_INFERENCE_DURATION).record(durations.inference);
    histogram!(REQUEST_TIME_PER_TOKEN).record(durations.per_token);
    histogram!(REQUEST_GENERATED_TOKENS).record(num_generated_tokens as f64);
}

/// A prompt passed validation.
pub(crate) fn prompt_accepted(num_input_tokens: usize, max_new_tokens: u32) {
    histogram!(REQUEST_INPUT_LENGTH).record(num_input_tokens as f64);
    histogram!(REQUEST_MAX_NEW_TOKENS).record(f64::from(max_new_tokens));
}

/// How full the engine is, at this moment.
pub(crate) fn load(load: Load) {
    gauge!(QUEUE_SIZE).set(load.queued_sequences as f64);
    gauge!(BATCH_CURRENT_SIZE).set(load.running_sequences as f64);
    gauge!(BATCH_CURRENT_MAX_TOKENS).set(load.max_running_tokens as f64);
    gauge!(KV_BLOCKS).set(load.num_blocks as f64);
    gauge!(KV_FREE_BLOCKS).set(load.free_blocks as f64);
}

/// Sequences in a step that starts new ones.
pub(crate) fn batch_next_size(num_sequences: usize) {
    histogram!(BATCH_NEXT_SIZE).record(num_sequences as f64);
}

/// Tokens that the KV pool can hold; known after warm-up.
pub fn batch_total_tokens(num_tokens: usize) {
    gauge!(BATCH_MAX_TOTAL_TOKENS).set(num_tokens as f64);
    gauge!(BATCH_TOTAL_TOKENS).set(num_tokens as f64);
}

/// A step came back. `method`: `prefill` when any sequence in it was computing its prompt, else `decode`.
pub(crate) fn batch_inference(method: &'static str, forward: Duration, total: Duration) {
    counter!(BATCH_INFERENCE_COUNT, "method" => method).increment(1);
    counter!(BATCH_INFERENCE_SUCCESS, "method" => method).increment(1);
    histogram!(BATCH_FORWARD_DURATION, "method" => method).record(forward);
    histogram!(BATCH_INFERENCE_DURATION, "method" => method).record(total);
}

/// A step did not come back.
pub(crate) fn batch_failure(method: &'static str) {
    counter!(BATCH_INFERENCE_COUNT, "method" => method).increment(1);
    counter!(BATCH_INFERENCE_FAILURE, "method" => method).increment(1);
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
            Self::Overhead => STEP_OVERHEAD,
            Self::Interval => STEP_INTERVAL,
            Self::RoundTrip => STEP_ROUND_TRIP,
            Self::Schedule => STEP_SCHEDULE,
            Self::Apply => STEP_APPLY,
            Self::WorkerPrepare => STEP_WORKER_PREPARE,
            Self::WorkerForward => STEP_WORKER_FORWARD,
            Self::WorkerSample => STEP_WORKER_SAMPLE,
            Self::WorkerIdle => STEP_WORKER_IDLE,
        }
    }
}

pub(crate) fn step_duration(part: StepPart, method: &'static str, duration: Duration) {
    histogram!(part.metric(), "method" => method).record(duration);
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
