//! Records what happens, in the metrics of `table.rs`, and renders it for Prometheus.

use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};
use penstock_scheduler::Stats;

use super::label::{DRAFT_POSITIONS, REPLICA, REPLICAS};
pub(crate) use super::label::{Failure, ImageFetch, Method, RefusalReason, RestartPhase, SpanLoss};
use super::metric::{Kind, Metric};
use super::summary::RequestSummary;
use super::table::*;
use crate::generator::ReplicaReport;
use crate::limits::RequestLimits;
use crate::sequence::DraftCount;

/// Renders what was recorded since [`Exporter::install`].
#[derive(Clone, Debug)]
pub struct Exporter {
    handle: PrometheusHandle,
}

/// Why no exporter was installed.
#[derive(Debug, thiserror::Error)]
pub enum ExporterError {
    /// The buckets of a histogram are invalid.
    #[error("cannot set up metrics: {0}")]
    Buckets(#[from] BuildError),
    /// The process has a recorder already.
    #[error("cannot set up metrics: this process has a recorder already")]
    Installed,
}

impl Exporter {
    /// Makes this process record its metrics. To be called once, before anything is recorded.
    pub fn install(limits: &RequestLimits) -> Result<Self, ExporterError> {
        let recorder = recorder(limits)?;
        let exporter = Self { handle: recorder.handle() };
        metrics::set_global_recorder(recorder).map_err(|_| ExporterError::Installed)?;
        METRICS.iter().for_each(Metric::begin);
        Ok(exporter)
    }

    /// All metrics in Prometheus text format.
    pub(crate) fn render(&self) -> String {
        self.handle.render()
    }

    /// Folds recorded samples into buckets. To be called regularly: without a scrape, samples take memory until then.
    pub(crate) fn run_upkeep(&self) {
        self.handle.run_upkeep();
    }
}

fn recorder(limits: &RequestLimits) -> Result<PrometheusRecorder, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for metric in METRICS {
        if let Kind::Histogram(buckets) = metric.kind {
            builder = builder.set_buckets_for_metric(Matcher::Full(metric.name.into()), &buckets.bounds(limits))?;
        }
    }
    Ok(builder.build_recorder())
}

const INTRODUCTION: &str = "\
# Metrics

Generated from the code by `make docs`; do not edit. `GET /metrics` returns the Prometheus text format and needs no API key.
Counters and histograms begin at 0; a gauge appears with its first value. Durations are in seconds.
Metrics that begin with `tgi_` have the names, labels and buckets of text-generation-inference; the last column says where
their meaning differs. Those that begin with `vllm:` are vLLM's: the ones that the endpoint picker of Kubernetes' Gateway API Inference
Extension reads, by its default names, and those of speculation.

| metric | type | labels | meaning | unlike TGI |
|---|---|---|---|---|
";

/// The page docs/metrics.md.
pub fn reference() -> String {
    let mut page = INTRODUCTION.to_owned();
    for Metric { name, kind, label, help, difference, .. } in METRICS {
        let label = match label {
            None => match kind {
                Kind::Info(labels) => {
                    labels.iter().map(|label| format!("`{label}`: any")).collect::<Vec<_>>().join(", ")
                }
                _ => String::new(),
            },
            Some((label, [first, .., last])) if *label == REPLICA.0 => format!("`{label}`: {first} to {last}"),
            Some((label, values)) => format!("`{label}`: {}", values.join(", ")),
        };
        let difference = match name.split_once(['_', ':']) {
            Some(("tgi", _)) => difference,
            Some(("vllm", _)) => "vLLM's",
            _ => "ours",
        };
        let kind = kind.describe();
        let _ = writeln!(page, "| `{name}` | {kind} | {label} | {help} | {difference} |");
    }
    page
}

/// A generation request arrived.
pub(crate) fn request_received() {
    REQUEST_COUNT.increment();
}

/// A generation request was not answered in full.
pub(crate) fn request_failed(failure: Failure) {
    REQUEST_FAILURE.with(failure.value()).increment();
}

/// A request exceeded a limit of the server.
pub(crate) fn request_refused(reason: RefusalReason) {
    REQUESTS_REFUSED.with(reason.value()).increment();
}

/// A connection was closed because its client did nothing for too long.
pub(crate) fn client_given_up() {
    CLIENTS_GIVEN_UP.increment();
}

/// A connection was closed at once because too many connections were open.
pub(crate) fn connection_refused() {
    CONNECTIONS_REFUSED.increment();
}

/// The trace collector took spans.
pub(crate) fn spans_exported(num_spans: u64) {
    SPANS_EXPORTED.add(num_spans);
}

/// Spans were dropped.
pub(crate) fn spans_lost(loss: SpanLoss, num_spans: u64) {
    SPANS_LOST.with(loss.value()).add(num_spans);
}

/// The fetch of an image ended.
pub(crate) fn image_fetched(outcome: ImageFetch, num_bytes: usize) {
    IMAGE_FETCHES.with(outcome.value()).increment();
    IMAGE_FETCHED_BYTES.add(num_bytes as u64);
}

/// A generation request was answered in full.
pub(crate) fn request_succeeded(summary: &RequestSummary) {
    REQUEST_SUCCESS.increment();
    REQUEST_DURATION.record(summary.total());
    REQUEST_VALIDATION_DURATION.record(summary.validation);
    REQUEST_QUEUE_DURATION.record(summary.queue);
    REQUEST_INFERENCE_DURATION.record(summary.inference);
    REQUEST_TIME_PER_TOKEN.record(summary.per_token());
    REQUEST_GENERATED_TOKENS.record(summary.num_generated_tokens as f64);
}

/// A prompt passed validation.
pub(crate) fn prompt_accepted(num_input_tokens: usize, max_new_tokens: u32) {
    REQUEST_INPUT_LENGTH.record(num_input_tokens as f64);
    REQUEST_MAX_NEW_TOKENS.record(max_new_tokens);
}

/// A generation's first token came this long after its request.
pub(crate) fn first_token(after: Duration) {
    TIME_TO_FIRST_TOKEN.record(after);
}

/// Running sequences got their next tokens; each waited this long for it.
pub(crate) fn next_tokens(gaps: &[Duration]) {
    // Most sequences got their previous token from the same step.
    for equal in gaps.chunk_by(|one, other| one == other) {
        INTER_TOKEN.record_many(equal[0], equal.len());
    }
}

/// The load at this moment: the scheduler's statistics, and the tokens of all queued generations.
pub(crate) fn load(stats: &Stats, queued_tokens: u64) {
    QUEUE_TOKENS.set(queued_tokens as f64);
    QUEUE_SIZE.set(stats.num_queued as f64);
    BATCH_CURRENT_SIZE.set(stats.num_running as f64);
    BATCH_CURRENT_MAX_TOKENS.set(stats.max_running_tokens as f64);
    KV_BLOCKS.set(stats.num_blocks as f64);
    KV_FREE_BLOCKS.set(stats.num_allocatable_blocks as f64);
    KV_CACHED_BLOCKS.set(stats.num_cached_blocks as f64);
    KV_OFFLOADED_BLOCKS.with("memory").set(stats.num_full_memory_slots as f64);
    KV_OFFLOADED_BLOCKS.with("disk").set(stats.num_full_disk_slots as f64);
    STATE_SLOTS.set(stats.num_state_slots as f64);
    STATE_SNAPSHOTS.set(stats.num_snapshots as f64);
    STATE_FULL_SNAPSHOTS.set(stats.num_full_snapshots as f64);
    VLLM_WAITING.set(stats.num_queued as f64);
    VLLM_RUNNING.set(stats.num_running as f64);
    let num_held = stats.num_blocks - stats.num_allocatable_blocks;
    VLLM_KV_USAGE.set(num_held as f64 / stats.num_blocks.max(1) as f64);
    PREFIX_QUERIED.set_total(stats.num_queried_tokens);
    PREFIX_HIT.set_total(stats.num_hit_tokens);
    PREEMPTIONS.set_total(stats.num_preemptions);
}

/// The replicas at this moment, and what went to each.
pub(crate) fn replicas(reports: &[ReplicaReport]) {
    for report in reports {
        let number = REPLICAS[report.number];
        let gauge = |metric: Metric, value: f64| metric.with(number).set(value);
        gauge(REPLICA_HEALTH, report.is_healthy.map_or(-1.0, |is_healthy| f64::from(u8::from(is_healthy))));
        gauge(REPLICA_RUNNING, report.stats.num_running as f64);
        gauge(REPLICA_QUEUED, report.stats.num_queued as f64);
        gauge(REPLICA_WORK, report.routed.num_work_tokens as f64);
        gauge(REPLICA_SECONDS_PER_TOKEN, report.seconds_per_token.unwrap_or(f64::NAN));
        REPLICA_SEQUENCES.with(number).set_total(report.routed.num_sequences);
        REPLICA_HANDOVERS.with(number).set_total(report.routed.num_handovers);
        REPLICA_PROMPT_TOKENS.with(number).set_total(report.routed.num_prompt_tokens);
        REPLICA_CACHED_TOKENS.with(number).set_total(report.routed.num_cached_tokens);
    }
}

/// The LoRA adapters at this moment, in Prometheus text format. They have a recorder of their own: in that of the process, the series of
/// every earlier moment would stay.
pub(crate) fn adapters(max_loaded: usize, loaded: &[Arc<str>], waiting: &[Arc<str>], unix_seconds: u64) -> String {
    let recorder = PrometheusBuilder::new().build_recorder();
    metrics::with_local_recorder(&recorder, || {
        VLLM_LORA.begin();
        VLLM_LORA.set_info([max_loaded.to_string(), loaded.join(","), waiting.join(",")], unix_seconds as f64);
    });
    recorder.handle().render()
}

/// The KV pool; known after warm-up.
pub fn kv_pool(num_blocks: usize, block_tokens: u32) {
    let num_tokens = num_blocks * block_tokens as usize;
    BATCH_MAX_TOTAL_TOKENS.set(num_tokens as f64);
    BATCH_TOTAL_TOKENS.set(num_tokens as f64);
    VLLM_CACHE_CONFIG.set_info([block_tokens.to_string(), num_blocks.to_string()], 1.0);
}

/// A step gave each of its sequences this many tokens; those after the first were speculated.
pub(crate) fn tokens_accepted(num_tokens: impl Iterator<Item = usize>) {
    let mut num_single = 0;
    for num_tokens in num_tokens {
        match num_tokens {
            0 => {}
            1 => num_single += 1,
            several => REQUEST_SKIPPED_TOKENS.record((several - 1) as f64),
        }
    }
    if num_single > 0 {
        REQUEST_SKIPPED_TOKENS.record_many(0.0, num_single);
    }
}

/// A step verified a draft for each of these sequences.
pub(crate) fn drafts_verified(drafts: impl Iterator<Item = DraftCount>) {
    let (mut num_drafts, mut total) = (0, DraftCount::default());
    let mut num_accepted_at = [0; DRAFT_POSITIONS.len()];
    for draft in drafts.filter(|draft| draft.num_verified > 0) {
        num_drafts += 1;
        total += draft;
        num_accepted_at.iter_mut().take(draft.num_right as usize).for_each(|num| *num += 1);
    }
    if num_drafts == 0 {
        return;
    }
    VLLM_DRAFTS.add(num_drafts);
    for metric in [DRAFT_TOKENS, VLLM_DRAFT_TOKENS] {
        metric.add(u64::from(total.num_verified));
    }
    for metric in [ACCEPTED_DRAFT_TOKENS, VLLM_ACCEPTED_TOKENS] {
        metric.add(u64::from(total.num_right));
    }
    for (position, num) in DRAFT_POSITIONS.iter().zip(num_accepted_at) {
        VLLM_ACCEPTED_PER_POSITION.with(position).add(num);
    }
}

/// A finished step and how long its parts took. Parts of different steps overlap.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepTimes {
    pub(crate) method: Method,
    pub(crate) num_sequences: usize,
    /// Sequences that the step started.
    pub(crate) num_new_sequences: usize,
    /// What the step added to the time that its sequences waited.
    pub(crate) interval: Duration,
    /// From sending the step to its result.
    pub(crate) round_trip: Duration,
    /// Planning and sending.
    pub(crate) schedule: Duration,
    /// Applying the result.
    pub(crate) apply: Duration,
    pub(crate) worker_prepare: Duration,
    pub(crate) worker_forward: Duration,
    pub(crate) worker_sample: Duration,
    pub(crate) worker_idle: Duration,
    /// The interval that was expected, and the longest one that was wanted, if known.
    pub(crate) forecast: Option<Duration>,
    pub(crate) target: Option<Duration>,
}

/// A step was finished.
pub(crate) fn step_finished(times: &StepTimes) {
    let method = times.method.value();
    BATCH_INFERENCE_COUNT.with(method).increment();
    BATCH_INFERENCE_SUCCESS.with(method).increment();
    if times.num_new_sequences > 0 {
        BATCH_NEXT_SIZE.record(times.num_sequences as f64);
    }
    if (1..times.num_sequences).contains(&times.num_new_sequences) {
        BATCH_CONCAT.with("chunking").increment();
        // COMPAT: TGI's label is this one in every step.
        BATCH_CONCAT_DURATION.with(Method::Decode.value()).record(times.schedule);
    }
    if let Some(target) = times.target {
        INTER_TOKEN_TARGET.set(target);
    }
    if let Some(forecast) = times.forecast {
        STEP_FORECAST_ERROR.with(method).record(forecast.abs_diff(times.interval));
    }
    for (metric, duration) in [
        (BATCH_INFERENCE_DURATION, times.interval),
        (BATCH_FORWARD_DURATION, times.worker_forward),
        (BATCH_FILTER_DURATION, times.schedule),
        (BATCH_DECODE_DURATION, times.apply),
        (STEP_OVERHEAD, times.interval.saturating_sub(times.worker_forward)),
        (STEP_INTERVAL, times.interval),
        (STEP_ROUND_TRIP, times.round_trip),
        (STEP_SCHEDULE, times.schedule),
        (STEP_APPLY, times.apply),
        (STEP_WORKER_PREPARE, times.worker_prepare),
        (STEP_WORKER_FORWARD, times.worker_forward),
        (STEP_WORKER_SAMPLE, times.worker_sample),
        (STEP_WORKER_IDLE, times.worker_idle),
    ] {
        metric.with(method).record(duration);
    }
}

/// A step was lost with its worker group.
pub(crate) fn step_lost(method: Method) {
    BATCH_INFERENCE_COUNT.with(method.value()).increment();
    BATCH_INFERENCE_FAILURE.with(method.value()).increment();
}

/// A worker group was started in place of a lost one.
pub(crate) fn workers_restarted() {
    WORKER_RESTARTS.increment();
}

/// Worker groups that are ready to replace a lost one.
pub fn standby_groups(num_groups: usize) {
    STANDBY_GROUPS.set(num_groups as f64);
}

/// The time without a worker group is over.
pub(crate) fn downtime(phases: &[(RestartPhase, Duration)], total: Duration) {
    WORKER_DOWNTIME.record(total);
    for (phase, duration) in phases {
        WORKER_RESTART.with(phase.value()).record(*duration);
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
        metrics::with_local_recorder(&recorder, record);
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
    fn counters_and_histograms_begin_at_0() {
        let text = rendered(|| METRICS.iter().for_each(Metric::begin));
        for line in [
            "tgi_request_count 0",
            "penstock_requests_refused{reason=\"queue_timeout\"} 0",
            "penstock_worker_downtime_seconds_count 0",
            "tgi_batch_forward_duration_bucket{method=\"decode\",le=\"+Inf\"} 0",
            "penstock_inter_token_seconds_bucket{le=\"0.2\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
        assert!(!text.contains("# TYPE tgi_queue_size"), "a gauge has no value yet");
    }

    #[test]
    fn equal_gaps_are_recorded_together() {
        let gaps = [20, 20, 30, 20].map(Duration::from_millis);
        let text = rendered(|| next_tokens(&gaps));
        for line in [
            "penstock_inter_token_seconds_bucket{le=\"0.02\"} 3",
            "penstock_inter_token_seconds_bucket{le=\"0.03\"} 4",
            "penstock_inter_token_seconds_count 4",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn an_endpoint_picker_finds_the_load_by_the_names_of_vllm() {
        let stats =
            Stats { num_queued: 3, num_running: 2, num_blocks: 8, num_allocatable_blocks: 6, ..Stats::default() };
        let text = rendered(|| load(&stats, 0));
        for line in ["vllm:num_requests_waiting 3", "vllm:num_requests_running 2", "vllm:kv_cache_usage_perc 0.25"] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn an_endpoint_picker_finds_the_kv_pool_and_the_adapters_of_this_moment_only() {
        let text = rendered(|| kv_pool(8, 16));
        assert!(text.contains("\nvllm:cache_config_info{block_size=\"16\",num_gpu_blocks=\"8\"} 1\n"), "{text}");
        let lora = |loaded: &[&str], waiting: &[&str]| {
            let [loaded, waiting] =
                [loaded, waiting].map(|names| names.iter().map(|name| Arc::from(*name)).collect::<Vec<_>>());
            let text = adapters(4, &loaded, &waiting, 1_764_000_000);
            text.lines()
                .filter(|line| !line.is_empty() && !line.starts_with('#'))
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let line = |labels| vec![format!("vllm:lora_requests_info{{max_lora=\"4\",{labels}}} 1764000000")];
        assert_eq!(
            lora(&["poet", "sql"], &["a\"b"]),
            line("running_lora_adapters=\"poet,sql\",waiting_lora_adapters=\"a\\\"b\"")
        );
        assert_eq!(lora(&[], &[]), line("running_lora_adapters=\"\",waiting_lora_adapters=\"\""));
    }

    #[test]
    fn the_tokens_of_a_sequence_behind_its_first_one_in_a_step_were_skipped() {
        let text = rendered(|| tokens_accepted([0, 1, 4, 1].into_iter()));
        for line in [
            "tgi_request_skipped_tokens_bucket{le=\"0\"} 2",
            "tgi_request_skipped_tokens_bucket{le=\"2\"} 2",
            "tgi_request_skipped_tokens_bucket{le=\"3\"} 3",
            "tgi_request_skipped_tokens_sum 3",
            "tgi_request_skipped_tokens_count 3",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn drafts_are_counted_under_our_names_and_those_of_vllm() {
        let drafts = [(3, 3), (3, 1), (2, 0), (0, 0)];
        let drafts = drafts.map(|(num_verified, num_right)| DraftCount { num_verified, num_right });
        let text = rendered(|| drafts_verified(drafts.into_iter()));
        for line in [
            "penstock_draft_tokens 8",
            "penstock_accepted_draft_tokens 4",
            "vllm:spec_decode_num_drafts_total 3",
            "vllm:spec_decode_num_draft_tokens_total 8",
            "vllm:spec_decode_num_accepted_tokens_total 4",
            "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"0\"} 2",
            "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"2\"} 1",
            "vllm:spec_decode_num_accepted_tokens_per_pos_total{position=\"15\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn names_labels_and_buckets_are_those_of_tgi() {
        let text = rendered(|| {
            request_received();
            request_failed(Failure::Overloaded);
            prompt_accepted(3, 20);
            request_succeeded(&RequestSummary { num_generated_tokens: 7, ..RequestSummary::default() });
            step_lost(Method::Prefill);
            BATCH_FORWARD_DURATION.with(Method::Prefill.value()).record(0.001);
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
