//! Every metric, declared once: name, kind, label, buckets and meaning. `docs/metrics.md` is generated from it.
//!
//! COMPAT: names, labels and buckets that begin with `tgi_` are those of text-generation-inference, which its dashboards query.
//! Names that begin with `vllm:` are vLLM's: what the endpoint picker of Kubernetes' Gateway API Inference Extension reads, by its default
//! names, and what vLLM's dashboards read of speculation. Ours begin with `penstock_` and have the unit in the name.

use super::label::{
    DRAFT_POSITIONS, Failure, ImageFetch, Label, Method, REPLICA, RefusalReason, RestartPhase, SpanLoss,
};
use super::metric::Buckets::{Duration, InputTokens, Latency, Sequences, SkippedTokens, Step, TotalTokens};
use super::metric::Metric;

const METHOD: Label = ("method", Method::VALUES);
const PHASE: Label = ("phase", RestartPhase::VALUES);

/// Declares each metric as a constant, and all of them as `METRICS`.
macro_rules! metrics {
    ($($name:ident = $metric:expr;)*) => {
        $(pub(super) const $name: Metric = $metric;)*

        /// All metrics, in the order of the documentation.
        pub(super) const METRICS: &[Metric] = &[$($name),*];
    };
}

metrics! {
    REQUEST_COUNT = Metric::counter("tgi_request_count", "Generation requests received")
        .unlike_tgi("counts a request once on every route; TGI counted a chat twice and each prompt of a list");
    REQUEST_SUCCESS = Metric::counter("tgi_request_success", "Generation requests answered in full")
        .unlike_tgi("counts requests; TGI counted generations");
    REQUEST_FAILURE = Metric::counter("tgi_request_failure", "Generation requests not answered in full, by reason")
        .by(("err", Failure::VALUES))
        .unlike_tgi("counts a request once, on every route");
    REQUEST_DURATION = Metric::histogram("tgi_request_duration", Duration,
        "Seconds from a request's arrival to its last token");
    REQUEST_VALIDATION_DURATION = Metric::histogram("tgi_request_validation_duration", Duration,
        "Seconds from a request's arrival to its place in the queue: template, tokenization, checks");
    REQUEST_QUEUE_DURATION = Metric::histogram("tgi_request_queue_duration", Duration,
        "Seconds a request waited in the queue for its first step");
    REQUEST_INFERENCE_DURATION = Metric::histogram("tgi_request_inference_duration", Duration,
        "Seconds from a request's first step to its last token");
    REQUEST_TIME_PER_TOKEN = Metric::histogram("tgi_request_mean_time_per_token_duration", Duration,
        "Seconds of inference per generated token, averaged over a request");
    REQUEST_GENERATED_TOKENS = Metric::histogram("tgi_request_generated_tokens", TotalTokens,
        "Tokens generated for a request");
    REQUEST_INPUT_LENGTH = Metric::histogram("tgi_request_input_length", InputTokens, "Tokens in a prompt");
    REQUEST_MAX_NEW_TOKENS = Metric::histogram("tgi_request_max_new_tokens", TotalTokens,
        "Most tokens that a generation may have")
        .unlike_tgi("the request's limit; TGI recorded chunks of at most 1024");
    REQUEST_SKIPPED_TOKENS = Metric::histogram("tgi_request_skipped_tokens", SkippedTokens,
        "Speculated tokens accepted in a step: those after the first, per sequence")
        .unlike_tgi("a histogram, as TGI's dashboard expects; TGI exported a summary. 0 without draft tokens");
    QUEUE_SIZE = Metric::gauge("tgi_queue_size", "Sequences waiting in the queue");
    BATCH_CURRENT_SIZE = Metric::gauge("tgi_batch_current_size", "Running sequences");
    BATCH_CURRENT_MAX_TOKENS = Metric::gauge("tgi_batch_current_max_tokens",
        "Most tokens, prompt and generated, that the running sequences can have");
    BATCH_NEXT_SIZE = Metric::histogram("tgi_batch_next_size", Sequences, "Sequences in a step that starts a sequence")
        .unlike_tgi("includes the sequences that were running before");
    BATCH_INFERENCE_COUNT = Metric::counter("tgi_batch_inference_count", "Steps finished or lost, by method").by(METHOD)
        .unlike_tgi("a step that computes any prompt is `prefill`");
    BATCH_INFERENCE_SUCCESS = Metric::counter("tgi_batch_inference_success", "Steps finished, by method").by(METHOD);
    BATCH_INFERENCE_FAILURE = Metric::counter("tgi_batch_inference_failure",
        "Steps lost with their worker group, by method").by(METHOD);
    BATCH_INFERENCE_DURATION = Metric::histogram("tgi_batch_inference_duration", Duration,
        "Seconds that a step added to the time its sequences waited").by(METHOD)
        .unlike_tgi("steps overlap, so the sum of their round trips would count time twice");
    BATCH_FORWARD_DURATION = Metric::histogram("tgi_batch_forward_duration", Duration,
        "Seconds a step spent in the model").by(METHOD);
    BATCH_DECODE_DURATION = Metric::histogram("tgi_batch_decode_duration", Duration,
        "Seconds spent on passing a step's tokens to their requests").by(METHOD)
        .unlike_tgi("tokens become text in the requests' own tasks, in parallel to the steps; in TGI, within the step");
    BATCH_FILTER_DURATION = Metric::histogram("tgi_batch_filter_duration", Duration,
        "Seconds spent on planning a step, which also removes finished sequences").by(METHOD)
        .unlike_tgi("no batch is copied to remove a sequence: removal is part of the plan");
    BATCH_CONCAT_DURATION = Metric::histogram("tgi_batch_concat_duration", Duration,
        "Seconds spent on planning a step in which sequences join running ones").by(("method", &["decode"]))
        .unlike_tgi("no batches are concatenated: joining is part of the plan");
    BATCH_CONCAT = Metric::counter("tgi_batch_concat", "Steps in which sequences join running ones")
        .by(("reason", &["chunking"]))
        .unlike_tgi("always `chunking`: a new sequence never waits for a ratio or a number of tokens");
    BATCH_MAX_TOTAL_TOKENS = Metric::gauge("tgi_batch_max_total_tokens", "Tokens that the KV pool can hold")
        .unlike_tgi("TGI set it before its exporter was installed, so it never appeared");
    BATCH_TOTAL_TOKENS = Metric::gauge("tgi_batch_total_tokens", "Tokens that the KV pool can hold")
        .unlike_tgi("TGI described it and never set it");
    TIME_TO_FIRST_TOKEN = Metric::histogram("penstock_time_to_first_token_seconds", Latency,
        "Seconds from a request's arrival to the first token of each of its generations");
    INTER_TOKEN = Metric::histogram("penstock_inter_token_seconds", Latency,
        "Seconds between two tokens of a sequence, pauses by preemption and worker restarts included");
    QUEUE_TOKENS = Metric::gauge("penstock_queue_tokens",
        "Tokens of the queued generations, those of routers included: prompt and most new tokens");
    REQUESTS_REFUSED = Metric::counter("penstock_requests_refused",
        "Requests refused because of --max-concurrent-requests, --max-queued-tokens, --queue-timeout, images that wait, or a shutdown")
        .by(("reason", RefusalReason::VALUES));
    CLIENTS_GIVEN_UP = Metric::counter("penstock_clients_given_up",
        "Connections closed because the client read nothing, or did not answer keep-alive probes, for 40 s");
    CONNECTIONS_REFUSED = Metric::counter("penstock_connections_refused",
        "Connections closed at once because too many connections were open");
    SPANS_EXPORTED = Metric::counter("penstock_spans_exported", "Trace spans that the collector took");
    SPANS_LOST = Metric::counter("penstock_spans_lost",
        "Trace spans that were dropped: the queue of 8192 spans was full, or an export failed with all its retries")
        .by(("reason", SpanLoss::VALUES));
    IMAGE_FETCHES = Metric::counter("penstock_image_fetches", "Images fetched, or not, from URLs (`--allow-image-urls`)")
        .by(("outcome", ImageFetch::VALUES));
    IMAGE_FETCHED_BYTES = Metric::counter("penstock_image_fetched_bytes", "Bytes of the images fetched from URLs");
    KV_BLOCKS = Metric::gauge("penstock_kv_blocks", "Blocks of the KV pool");
    KV_FREE_BLOCKS = Metric::gauge("penstock_kv_free_blocks",
        "Blocks of the KV pool that can be allocated now, including cached blocks that no sequence uses");
    KV_OFFLOADED_BLOCKS = Metric::gauge("penstock_kv_offloaded_blocks",
        "Evicted blocks that are kept beside the KV pool (`--kv-offload-gib`, `--kv-offload-disk-gib`)").by(("tier", &["memory", "disk"]));
    KV_CACHED_BLOCKS = Metric::gauge("penstock_kv_cached_blocks", "Blocks of the KV pool in the prefix cache");
    STATE_SLOTS = Metric::gauge("penstock_state_slots",
        "Sequences whose states between tokens have room; 0 for models that keep none");
    STATE_SNAPSHOTS = Metric::gauge("penstock_state_snapshots", "Snapshots of states, at which prefixes are reused");
    STATE_FULL_SNAPSHOTS = Metric::gauge("penstock_state_full_snapshots", "Snapshots of states that are in use");
    PREFIX_QUERIED = Metric::counter("penstock_prefix_queried_tokens", "Tokens looked up in the prefix cache");
    PREFIX_HIT = Metric::counter("penstock_prefix_hit_tokens", "Tokens found in the prefix cache");
    DRAFT_TOKENS = Metric::counter("penstock_draft_tokens", "Draft tokens verified by steps: of `--speculate`, or forced by grammars");
    ACCEPTED_DRAFT_TOKENS = Metric::counter("penstock_accepted_draft_tokens", "Draft tokens that were right");
    PREEMPTIONS = Metric::counter("penstock_preemptions",
        "Running sequences that went back to the queue, mostly for want of blocks, and are computed again");
    VLLM_WAITING = Metric::gauge("vllm:num_requests_waiting", "The same as `tgi_queue_size`");
    VLLM_RUNNING = Metric::gauge("vllm:num_requests_running", "The same as `tgi_batch_current_size`");
    VLLM_KV_USAGE = Metric::gauge("vllm:kv_cache_usage_perc",
        "Fraction of the KV pool that running sequences hold, from 0 to 1");
    VLLM_CACHE_CONFIG = Metric::info("vllm:cache_config_info", &["block_size", "num_gpu_blocks"],
        "Tokens of a block, and blocks of the KV pool, on CPUs too. Always 1");
    VLLM_LORA = Metric::info("vllm:lora_requests_info",
        &["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        "The most LoRA adapters that are loaded at a time, those that are, and those that requests wait for, separated by commas. Its value is the Unix time of the scrape. Present with LoRA adapters");
    VLLM_DRAFTS = Metric::counter("vllm:spec_decode_num_drafts_total",
        "Drafts verified by steps: sequences with at least one draft token, in each step");
    VLLM_DRAFT_TOKENS = Metric::counter("vllm:spec_decode_num_draft_tokens_total", "The same as `penstock_draft_tokens`");
    VLLM_ACCEPTED_TOKENS = Metric::counter("vllm:spec_decode_num_accepted_tokens_total",
        "The same as `penstock_accepted_draft_tokens`");
    VLLM_ACCEPTED_PER_POSITION = Metric::counter("vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "Draft tokens that were right, by their position in the draft, from 0").by(("position", DRAFT_POSITIONS));
    STEP_OVERHEAD = Metric::histogram("penstock_step_overhead_seconds", Step,
        "Seconds a step added outside the model, as far as they did not overlap with another step").by(METHOD);
    STEP_INTERVAL = Metric::histogram("penstock_step_interval_seconds", Step,
        "Seconds that a step added to the time its sequences waited").by(METHOD);
    STEP_ROUND_TRIP = Metric::histogram("penstock_step_round_trip_seconds", Step,
        "Seconds from sending a step to its result").by(METHOD);
    STEP_SCHEDULE = Metric::histogram("penstock_step_schedule_seconds", Step,
        "Seconds spent on planning and sending a step").by(METHOD);
    STEP_APPLY = Metric::histogram("penstock_step_apply_seconds", Step,
        "Seconds spent on applying a step's result").by(METHOD);
    STEP_WORKER_PREPARE = Metric::histogram("penstock_step_worker_prepare_seconds", Step,
        "Seconds the worker spent on turning a step into tensors").by(METHOD);
    STEP_WORKER_FORWARD = Metric::histogram("penstock_step_worker_forward_seconds", Step,
        "Seconds the worker spent in the model").by(METHOD);
    STEP_WORKER_SAMPLE = Metric::histogram("penstock_step_worker_sample_seconds", Step,
        "Seconds the worker spent on sampling").by(METHOD);
    STEP_WORKER_IDLE = Metric::histogram("penstock_step_worker_idle_seconds", Step,
        "Seconds the worker waited for the step").by(METHOD);
    STEP_FORECAST_ERROR = Metric::histogram("penstock_step_forecast_error_seconds", Step,
        "Difference in seconds between a step's duration and its forecast").by(METHOD);
    INTER_TOKEN_TARGET = Metric::gauge("penstock_inter_token_target_seconds",
        "Seconds that the newest step with decodes could take before its prompts had to wait");
    WORKER_RESTARTS = Metric::counter("penstock_worker_restarts", "Worker groups started in place of lost ones");
    STANDBY_GROUPS = Metric::gauge("penstock_standby_groups", "Worker groups that are ready to replace a lost one");
    WORKER_DOWNTIME = Metric::histogram("penstock_worker_downtime_seconds", Duration,
        "Seconds from the last sign of life of a lost worker group to the next token, or until the next group was ready");
    WORKER_RESTART = Metric::histogram("penstock_worker_restart_seconds", Duration,
        "Seconds of that downtime, by phase").by(PHASE);
    REPLICA_HEALTH = Metric::gauge("penstock_replica_health",
        "1: the replica takes steps; 0: it does not; -1: it has left. Present with `--replicas` above 1 or `penstock route`")
        .by(REPLICA);
    REPLICA_RUNNING = Metric::gauge("penstock_replica_running", "Running sequences of the replica. Present with `--replicas` above 1 or `penstock route`").by(REPLICA);
    REPLICA_QUEUED = Metric::gauge("penstock_replica_queued", "Sequences that wait in the replica's queue. Present with `--replicas` above 1 or `penstock route`").by(REPLICA);
    REPLICA_WORK = Metric::gauge("penstock_replica_work_tokens",
        "Tokens that the replica still has to compute for sequences from here, with those it is expected to generate. Present with `--replicas` above 1 or `penstock route`").by(REPLICA);
    REPLICA_SECONDS_PER_TOKEN = Metric::gauge("penstock_replica_token_seconds",
        "Mean seconds between two tokens of a sequence in the replica, lately; NaN: unknown. Present with `--replicas` above 1 or `penstock route`").by(REPLICA);
    REPLICA_SEQUENCES = Metric::counter("penstock_replica_sequences", "Sequences that were routed to the replica when they arrived. Present with `--replicas` above 1 or `penstock route`").by(REPLICA);
    REPLICA_HANDOVERS = Metric::counter("penstock_replica_handovers", "Sequences that moved from the replica to another one. Present with `--replicas` above 1 or `penstock route`").by(REPLICA);
    REPLICA_PROMPT_TOKENS = Metric::counter("penstock_replica_prompt_tokens", "Prompt tokens of the routed sequences. Present with `--replicas` above 1 or `penstock route`").by(REPLICA);
    REPLICA_CACHED_TOKENS = Metric::counter("penstock_replica_cached_tokens",
        "Prompt tokens of the routed sequences that the replica had computed before, as far as the router knows. Present with `--replicas` above 1 or `penstock route`").by(REPLICA);
}
