//! What the router is told when it starts. Resolved once, by the launcher; nothing here is optional by accident.

use std::path::PathBuf;
use std::time::Duration;

#[derive(Clone, Debug)]
pub struct Config {
    /// As the user wrote it (or the embedded model's name); what `/info` and `/v1/models` say.
    pub model_id: String,
    /// Hub commit, when known.
    pub model_sha: Option<String>,
    /// Hub pipeline tag, when known; decides `return_full_text` of `POST /`.
    pub pipeline_tag: Option<String>,
    /// Prepared model folder: tokenizer.json, tokenizer_config.json, generation_config.json, chat template.
    pub model_folder: PathBuf,
    pub limits: RequestLimits,
    /// Tokenizer threads.
    pub validation_workers: usize,
    /// Largest request body, in bytes.
    pub payload_limit_bytes: usize,
    /// Empty: any origin.
    pub cors_allow_origins: Vec<String>,
    /// Value of the `x-compute-type` header.
    pub compute_type: String,
    /// How long running requests may take to finish after SIGTERM.
    pub graceful_termination_timeout: Duration,
}

/// The bounds that a request is checked against (spec §1.4).
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    pub max_concurrent_requests: usize,
    pub max_best_of: usize,
    pub max_stop_sequences: usize,
    pub max_top_n_tokens: u32,
    pub max_input_tokens: usize,
    pub max_total_tokens: usize,
    pub max_client_batch_size: usize,
}
