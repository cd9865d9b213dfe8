//! Every metric: its name, kind, labels, buckets and meaning; and the page of docs/ that says so.
//!
//! Names, labels and buckets are those that TGI's dashboards query. Ours are beside them, with units in the name.

use std::fmt::Write;

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram(Buckets),
}

#[derive(Clone, Copy)]
pub(super) enum Buckets {
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

pub(super) struct Metric {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) labels: Labels,
    pub(super) help: &'static str,
    /// Where TGI's metric of this name means something else.
    difference: &'static str,
}

/// A label's name, and the values that it takes.
pub(super) type Labels = Option<(&'static str, &'static [&'static str])>;

const METHOD: Labels = Some(("method", &["prefill", "decode"]));
const DECODE: Labels = Some(("method", &["decode"]));
const REFUSAL: Labels = Some(("reason", &["requests", "queued_tokens", "queue_timeout", "shutting_down"]));
const REASON: Labels = Some(("reason", &["chunking"]));
const PHASE: Labels =
    Some(("phase", &["notice", "backoff", "stop", "spawn", "connect", "load", "warm_up", "first_token"]));
const ERR: Labels = Some(("err", &["overloaded", "validation", "template", "generation", "incomplete", "dropped"]));

pub(super) const REQUEST_COUNT: &str = "tgi_request_count";
pub(super) const REQUEST_SUCCESS: &str = "tgi_request_success";
pub(super) const REQUEST_FAILURE: &str = "tgi_request_failure";
pub(super) const REQUEST_DURATION: &str = "tgi_request_duration";
pub(super) const REQUEST_VALIDATION_DURATION: &str = "tgi_request_validation_duration";
pub(super) const REQUEST_QUEUE_DURATION: &str = "tgi_request_queue_duration";
pub(super) const REQUEST_INFERENCE_DURATION: &str = "tgi_request_inference_duration";
pub(super) const REQUEST_TIME_PER_TOKEN: &str = "tgi_request_mean_time_per_token_duration";
pub(super) const REQUEST_GENERATED_TOKENS: &str = "tgi_request_generated_tokens";
pub(super) const REQUEST_INPUT_LENGTH: &str = "tgi_request_input_length";
pub(super) const REQUEST_MAX_NEW_TOKENS: &str = "tgi_request_max_new_tokens";
pub(super) const REQUEST_SKIPPED_TOKENS: &str = "tgi_request_skipped_tokens";
pub(super) const QUEUE_SIZE: &str = "tgi_queue_size";
pub(super) const QUEUE_TOKENS: &str = "penstock_queue_tokens";
pub(super) const REQUESTS_REFUSED: &str = "penstock_requests_refused";
pub(super) const CLIENTS_GIVEN_UP: &str = "penstock_clients_given_up";
pub(super) const BATCH_CURRENT_SIZE: &str = "tgi_batch_current_size";
pub(super) const BATCH_CURRENT_MAX_TOKENS: &str = "tgi_batch_current_max_tokens";
pub(super) const BATCH_NEXT_SIZE: &str = "tgi_batch_next_size";
pub(super) const BATCH_INFERENCE_COUNT: &str = "tgi_batch_inference_count";
pub(super) const BATCH_INFERENCE_SUCCESS: &str = "tgi_batch_inference_success";
pub(super) const BATCH_INFERENCE_FAILURE: &str = "tgi_batch_inference_failure";
pub(super) const BATCH_INFERENCE_DURATION: &str = "tgi_batch_inference_duration";
pub(super) const BATCH_FORWARD_DURATION: &str = "tgi_batch_forward_duration";
pub(super) const BATCH_DECODE_DURATION: &str = "tgi_batch_decode_duration";
pub(super) const BATCH_FILTER_DURATION: &str = "tgi_batch_filter_duration";
pub(super) const BATCH_CONCAT_DURATION: &str = "tgi_batch_concat_duration";
pub(super) const BATCH_CONCAT: &str = "tgi_batch_concat";
pub(super) const BATCH_MAX_TOTAL_TOKENS: &str = "tgi_batch_max_total_tokens";
pub(super) const BATCH_TOTAL_TOKENS: &str = "tgi_batch_total_tokens";
pub(super) const KV_BLOCKS: &str = "penstock_kv_blocks";
pub(super) const KV_FREE_BLOCKS: &str = "penstock_kv_free_blocks";
pub(super) const KV_CACHED_BLOCKS: &str = "penstock_kv_cached_blocks";
pub(super) const PREFIX_QUERIED: &str = "penstock_prefix_queried_tokens";
pub(super) const PREFIX_HIT: &str = "penstock_prefix_hit_tokens";
pub(super) const STEP_OVERHEAD: &str = "penstock_step_overhead_seconds";
pub(super) const STEP_INTERVAL: &str = "penstock_step_interval_seconds";
pub(super) const STEP_ROUND_TRIP: &str = "penstock_step_round_trip_seconds";
pub(super) const STEP_SCHEDULE: &str = "penstock_step_schedule_seconds";
pub(super) const STEP_APPLY: &str = "penstock_step_apply_seconds";
pub(super) const STEP_WORKER_PREPARE: &str = "penstock_step_worker_prepare_seconds";
pub(super) const STEP_WORKER_FORWARD: &str = "penstock_step_worker_forward_seconds";
pub(super) const STEP_WORKER_SAMPLE: &str = "penstock_step_worker_sample_seconds";
pub(super) const STEP_WORKER_IDLE: &str = "penstock_step_worker_idle_seconds";
pub(super) const STEP_FORECAST_ERROR: &str = "penstock_step_forecast_error_seconds";
pub(super) const INTER_TOKEN_TARGET: &str = "penstock_inter_token_target_seconds";
pub(super) const WORKER_RESTARTS: &str = "penstock_worker_restarts";
pub(super) const WORKER_DOWNTIME: &str = "penstock_worker_downtime_seconds";
pub(super) const WORKER_RESTART: &str = "penstock_worker_restart_seconds";

impl Metric {
    const fn by(mut self, labels: Labels) -> Self {
        self.labels = labels;
        self
    }

    const fn unlike(mut self, difference: &'static str) -> Self {
        self.difference = difference;
        self
    }
}

const fn metric(name: &'static str, kind: Kind, help: &'static str) -> Metric {
    Metric { name, kind, labels: None, help, difference: "" }
}

const fn counter_of(name: &'static str, help: &'static str) -> Metric {
    metric(name, Kind::Counter, help)
}

const fn gauge_of(name: &'static str, help: &'static str) -> Metric {
    metric(name, Kind::Gauge, help)
}

const fn histogram_of(name: &'static str, buckets: Buckets, help: &'static str) -> Metric {
    metric(name, Kind::Histogram(buckets), help)
}

pub(super) const METRICS: &[Metric] = &[
    counter_of(REQUEST_COUNT, "Requests that asked for generation")
        .unlike("a request counts once, whatever its route; TGI counted a chat twice and each prompt of a list"),
    counter_of(REQUEST_SUCCESS, "Requests answered in full").unlike("once per request; TGI counted every generation"),
    counter_of(REQUEST_FAILURE, "Requests not answered in full, by reason")
        .by(ERR)
        .unlike("once per request, whatever its route"),
    histogram_of(REQUEST_DURATION, Buckets::Duration, "Seconds from a request's arrival to its last token"),
    histogram_of(REQUEST_VALIDATION_DURATION, Buckets::Duration, "Seconds spent on templates, tokenizing and checks"),
    histogram_of(REQUEST_QUEUE_DURATION, Buckets::Duration, "Seconds waited until the first step"),
    histogram_of(REQUEST_INFERENCE_DURATION, Buckets::Duration, "Seconds from the first step to the last token"),
    histogram_of(REQUEST_TIME_PER_TOKEN, Buckets::Duration, "Seconds of inference per generated token, mean"),
    histogram_of(REQUEST_GENERATED_TOKENS, Buckets::TotalTokens, "Tokens generated for a request"),
    histogram_of(REQUEST_INPUT_LENGTH, Buckets::InputTokens, "Tokens in a prompt"),
    histogram_of(REQUEST_MAX_NEW_TOKENS, Buckets::TotalTokens, "Most tokens that a request allows to generate")
        .unlike("what the request allows; TGI recorded pieces of at most 1024"),
    histogram_of(REQUEST_SKIPPED_TOKENS, Buckets::SkippedTokens, "Tokens accepted beyond the first in one step")
        .unlike("a histogram, which TGI's own dashboard asks for; TGI had a summary. 0 without speculation"),
    gauge_of(QUEUE_SIZE, "Sequences waiting for their first step"),
    gauge_of(BATCH_CURRENT_SIZE, "Sequences that are running"),
    gauge_of(BATCH_CURRENT_MAX_TOKENS, "Tokens that the blocks of the running sequences can hold"),
    histogram_of(BATCH_NEXT_SIZE, Buckets::Sequences, "Sequences in a step that has new ones")
        .unlike("of a step that starts sequences, those that run included"),
    counter_of(BATCH_INFERENCE_COUNT, "Steps, by method")
        .by(METHOD)
        .unlike("a step that computes any prompt counts as `prefill`"),
    counter_of(BATCH_INFERENCE_SUCCESS, "Steps that came back, by method").by(METHOD),
    counter_of(BATCH_INFERENCE_FAILURE, "Steps that did not come back, by method").by(METHOD),
    histogram_of(
        BATCH_INFERENCE_DURATION,
        Buckets::Duration,
        "Seconds that a step added to the time its sequences waited",
    )
    .by(METHOD)
    .unlike("steps overlap, so their durations from call to answer would count time twice"),
    histogram_of(BATCH_FORWARD_DURATION, Buckets::Duration, "Seconds a step spent in the model").by(METHOD),
    histogram_of(
        BATCH_DECODE_DURATION,
        Buckets::Duration,
        "Seconds spent on handing a step's tokens to their requests",
    )
    .by(METHOD)
    .unlike("text is made in each request's own task, beside the steps; TGI made it in the step"),
    histogram_of(
        BATCH_FILTER_DURATION,
        Buckets::Duration,
        "Seconds spent on choosing the next step, which finished sequences leave",
    )
    .by(METHOD)
    .unlike("no batch is copied to remove anybody: leaving is a part of the plan"),
    histogram_of(
        BATCH_CONCAT_DURATION,
        Buckets::Duration,
        "Seconds spent on choosing a step that new sequences join while others run",
    )
    .by(DECODE)
    .unlike("no batches are copied together: joining is a part of the plan"),
    counter_of(BATCH_CONCAT, "Steps that new sequences join while others run")
        .by(REASON)
        .unlike("always `chunking`: newcomers never wait for a ratio or a number of tokens"),
    gauge_of(BATCH_MAX_TOTAL_TOKENS, "Tokens that the KV pool can hold").unlike("TGI set it too early to be seen"),
    gauge_of(BATCH_TOTAL_TOKENS, "Tokens that the KV pool can hold").unlike("TGI described it and never set it"),
    gauge_of(QUEUE_TOKENS, "Tokens, prompt and most new ones, of the generations that wait for their first step"),
    counter_of(
        REQUESTS_REFUSED,
        "Requests for which there was no room: bounded by --max-concurrent-requests, --max-queued-tokens or \
         --queue-timeout, or the server was shutting down",
    )
    .by(REFUSAL),
    counter_of(
        CLIENTS_GIVEN_UP,
        "Clients that took nothing of their answer, or did not show that they are still there, for 40 s",
    ),
    gauge_of(KV_BLOCKS, "Blocks of the KV pool"),
    gauge_of(KV_FREE_BLOCKS, "Blocks of the KV pool that can be handed out now, those that are only kept included"),
    gauge_of(KV_CACHED_BLOCKS, "Blocks of the KV pool that are kept, in case that a prompt begins like theirs"),
    counter_of(PREFIX_QUERIED, "Tokens for which the KV pool was searched, when their sequence started"),
    counter_of(PREFIX_HIT, "Tokens of those that were found, and not computed again"),
    histogram_of(
        STEP_OVERHEAD,
        Buckets::Step,
        "Seconds a step added beside the model, as far as they were not hidden behind it",
    )
    .by(METHOD),
    histogram_of(STEP_INTERVAL, Buckets::Step, "Seconds that a step added to the time its sequences waited").by(METHOD),
    histogram_of(STEP_ROUND_TRIP, Buckets::Step, "Seconds from sending a step to its result").by(METHOD),
    histogram_of(STEP_SCHEDULE, Buckets::Step, "Seconds spent on choosing a step and handing it over").by(METHOD),
    histogram_of(STEP_APPLY, Buckets::Step, "Seconds spent on applying a step's result").by(METHOD),
    histogram_of(STEP_WORKER_PREPARE, Buckets::Step, "Seconds the worker spent on turning a step into tensors")
        .by(METHOD),
    histogram_of(STEP_WORKER_FORWARD, Buckets::Step, "Seconds the worker spent in the model").by(METHOD),
    histogram_of(STEP_WORKER_SAMPLE, Buckets::Step, "Seconds the worker spent on choosing tokens").by(METHOD),
    histogram_of(STEP_WORKER_IDLE, Buckets::Step, "Seconds the worker waited for the step").by(METHOD),
    histogram_of(STEP_FORECAST_ERROR, Buckets::Step, "Seconds by which a step was longer or shorter than expected")
        .by(METHOD),
    gauge_of(INTER_TOKEN_TARGET, "Seconds that the newest step with decodes could take before its prompts had to wait"),
    counter_of(WORKER_RESTARTS, "Times that workers were started in the place of lost ones"),
    histogram_of(
        WORKER_DOWNTIME,
        Buckets::Duration,
        "Seconds from the last sign of life of lost workers to the next token, or until others were ready",
    ),
    histogram_of(WORKER_RESTART, Buckets::Duration, "Seconds of that, by phase").by(PHASE),
];

const INTRODUCTION: &str = "\
# Metrics

Made from the code by `make docs`; do not edit. `GET /metrics` answers in Prometheus text format, without an API key.
A series appears when something is first recorded in it. Durations are seconds.
Names, labels and buckets that begin with `tgi_` are text-generation-inference's; the last column says where one means
something else here.

| metric | type | labels | meaning | unlike TGI |
|---|---|---|---|---|
";

/// docs/metrics.md.
pub fn reference() -> String {
    let mut page = INTRODUCTION.to_owned();
    for Metric { name, kind, labels, help, difference } in METRICS {
        let kind = kind.describe();
        let labels = labels.map_or(String::new(), |(label, values)| format!("`{label}`: {}", values.join(", ")));
        let difference = if name.starts_with("tgi_") { difference } else { "ours" };
        let _ = writeln!(page, "| `{name}` | {kind} | {labels} | {help} | {difference} |");
    }
    page
}

impl Kind {
    fn describe(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram(Buckets::Duration) => "histogram, 35 geometric bounds from 0.15 ms to 146 s",
            Self::Histogram(Buckets::InputTokens) => "histogram, 100 linear bounds up to max-input-tokens",
            Self::Histogram(Buckets::TotalTokens) => "histogram, 100 linear bounds up to max-total-tokens",
            Self::Histogram(Buckets::Sequences) => "histogram, bounds 1 to 1024, one by one",
            Self::Histogram(Buckets::Step) => "histogram, 30 geometric bounds from 10 µs to 5 s",
            Self::Histogram(Buckets::SkippedTokens) => "histogram, bounds 0 to 16, one by one",
        }
    }
}
