//! Groups of flags, for `--help` and docs/flags.md, and the flags that `-h` shows.

/// Flags under one heading, by their ids.
pub(crate) struct FlagGroup {
    pub(crate) heading: &'static str,
    pub(crate) ids: &'static [&'static str],
}

const fn group(heading: &'static str, ids: &'static [&'static str]) -> FlagGroup {
    FlagGroup { heading, ids }
}

/// Every flag, once. A test compares the ids with the declared ones.
pub(crate) const GROUPS: &[FlagGroup] = &[
    group(
        "Model",
        &[
            "model_id",
            "revision",
            "dtype",
            "quantize",
            "activation_bits",
            "dequantize",
            "trust_remote_code",
            "tokenizer_config_path",
            "chat_template",
            "generation_config",
            "override_generation_config",
            "rope_scaling",
            "rope_factor",
            "rope_original_max_tokens",
            "huggingface_hub_cache",
            "weights_cache_override",
        ],
    ),
    group("Adapters", &["lora_adapters", "max_lora_slots", "max_lora_rank", "enable_lora_updates"]),
    group(
        "Address and keys",
        &[
            "hostname",
            "port",
            "uds",
            "api_key",
            "api_key_file",
            "cors_allow_origin",
            "payload_limit",
            "disable_playground",
        ],
    ),
    group(
        "Devices and processes",
        &[
            "num_shard",
            "sharded",
            "pipeline_parallel_size",
            "replicas",
            "cuda_memory_fraction",
            "standby",
            "step_timeout",
            "ranks_on",
            "node_secret_file",
            "unencrypted_gpus",
            "shard_uds_path",
        ],
    ),
    group(
        "Limits of requests",
        &[
            "max_total_tokens",
            "max_input_tokens",
            "max_input_length",
            "max_concurrent_requests",
            "max_queued_tokens",
            "queue_timeout",
            "max_best_of",
            "max_stop_sequences",
            "max_top_n_tokens",
            "max_client_batch_size",
            "max_stored_responses",
            "validation_workers",
        ],
    ),
    group(
        "Requests",
        &[
            "served_model_name",
            "check_model_name",
            "strict_requests",
            "priority_order",
            "reasoning_budget",
            "trust_request_chat_template",
            "disable_grammar_support",
            "enable_prefill_logprobs",
            "watermark_gamma",
            "watermark_delta",
            "allow_image_urls",
            "allowed_image_hosts",
            "max_image_fetch_size",
        ],
    ),
    group(
        "Steps and kernels",
        &[
            "max_batch_prefill_tokens",
            "max_batch_size",
            "max_inter_token_ms",
            "max_steps_in_flight",
            "attention",
            "cpu_isa",
            "deterministic",
            "cuda_graphs",
        ],
    ),
    group(
        "KV cache",
        &[
            "max_batch_total_tokens",
            "kv_cache_dtype",
            "prefix_caching",
            "kv_offload_gib",
            "kv_offload_disk_gib",
            "kv_offload_folder",
            "state_snapshots",
        ],
    ),
    group("Speculative decoding", &["speculate", "speculative_model", "speculate_recent_tokens"]),
    group("Servers behind a router (penstock route)", &["replica", "replica_file", "replica_timeout"]),
    group(
        "Between a router and its servers",
        &[
            "engine_listen",
            "engine_secret_file",
            "engine_tls_cert",
            "engine_tls_key",
            "engine_tls_ca",
            "engine_without_tls",
        ],
    ),
    group(
        "Log, traces and shutdown",
        &[
            "json_output",
            "otlp_endpoint",
            "otlp_service_name",
            "env",
            "graceful_termination_timeout",
            "stop_with_stdin",
        ],
    ),
];

/// Ids of the most used flags, each with a text that fits a line of 80 columns, for `-h`.
pub(crate) const USUAL: &[(&str, &str)] = &[
    ("model_id", "Folder, .gguf file or Hub id"),
    ("dtype", "Data type of weights and computation"),
    ("quantize", "Method of quantization"),
    ("lora_adapters", "LoRA adapters that requests may name"),
    ("num_shard", "Ranks to shard the model across"),
    ("replicas", "Copies of the model"),
    ("cuda_memory_fraction", "Share of GPU memory"),
    ("max_total_tokens", "Longest sequence in tokens"),
    ("speculate", "Draft tokens in a step"),
    ("hostname", "IP address"),
    ("port", "Port"),
    ("api_key_file", "File with one API key per line"),
    ("engine_listen", "Address for routers"),
    ("json_output", "Log one JSON object per line"),
];

/// The same for `penstock route`.
pub(crate) const USUAL_OF_ROUTERS: &[(&str, &str)] = &[
    ("replica", "URL of a server's --engine-listen"),
    ("replica_file", "File with the servers' URLs"),
    ("engine_secret_file", "Secret shared with the servers"),
    ("engine_tls_ca", "Authority of the servers' certificates"),
    ("model_id", "Model of the servers, for its tokenizer"),
    ("hostname", "IP address"),
    ("port", "Port"),
    ("api_key_file", "File with one API key per line"),
];

/// The heading of a flag.
pub(crate) fn heading(id: &str) -> Option<&'static str> {
    GROUPS.iter().find(|group| group.ids.contains(&id)).map(|group| group.heading)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::flag::args::Args;

    #[test]
    fn every_visible_flag_is_in_exactly_one_group() {
        let mut grouped: Vec<_> = GROUPS.iter().flat_map(|group| group.ids.iter().copied()).collect();
        let command = Args::command();
        let visible = command.get_arguments().filter(|arg| !arg.is_hide_set());
        let mut declared: Vec<_> = visible.map(|arg| arg.get_id().as_str()).collect();
        grouped.sort_unstable();
        declared.sort_unstable();
        assert_eq!(grouped, declared);
        assert!(USUAL.iter().chain(USUAL_OF_ROUTERS).all(|(id, _)| heading(id).is_some()));
    }
}
