//! What the router is told when it starts. Resolved once, by the launcher; nothing here is optional by accident.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use subtle::{Choice, ConstantTimeEq};

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
    /// Of an encoder–decoder: these token ids stand behind every input, and the answer follows them. Empty: a decoder
    /// alone, whose answer goes on from its input.
    pub decoder_prefix: Arc<[u32]>,
    pub queue: QueueLimits,
    /// Tokenizer threads.
    pub validation_workers: usize,
    /// Largest request body, in bytes.
    pub payload_limit_bytes: usize,
    /// Empty: any origin.
    pub cors_allow_origins: Vec<String>,
    /// Any of them opens the protected routes; none: every route is open.
    pub api_keys: ApiKeys,
    /// Value of the `x-compute-type` header.
    pub compute_type: String,
    /// Whether requests may constrain their answer by a grammar.
    pub grammar_support: bool,
    /// Whether requests may ask for the logprobs of their prompt.
    pub prefill_logprobs: bool,
    /// Where Vertex AI sends its requests.
    pub vertex_routes: VertexRoutes,
    pub connections: ConnectionLimits,
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
    /// Input and answer.
    pub max_total_tokens: usize,
    /// The answer alone; `None`: whatever the input leaves of the total.
    pub max_new_tokens: Option<u32>,
    pub max_client_batch_size: usize,
}

/// How much may wait for its first step, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    /// Tokens of prompts and the most that they may generate, of all that wait.
    pub max_tokens: u64,
    /// From a request's arrival to its first step; `None`: for ever.
    pub timeout: Option<Duration>,
}

/// Paths that Vertex AI chooses for a container; requests there are those of `/vertex` and `/health`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VertexRoutes {
    pub predict: Option<String>,
    pub health: Option<String>,
}

/// What one client's connection may take.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// How long a connection may take to say its first bytes, to send a request's head, or to stay without a request.
    pub head_timeout: Duration,
    /// How long a request's body may take to arrive.
    pub body_timeout: Duration,
    /// Of a request's line and headers together.
    pub max_head_bytes: usize,
    /// Requests that are open on one HTTP/2 connection.
    pub max_streams: u32,
    /// How often a quiet client is asked whether it is still there, and how long one of HTTP/2 may take to answer.
    pub keep_alive: Duration,
    /// How long a client may take nothing of what waits for it, or one of HTTP/1.1 not answer the kernel's questions.
    pub client_timeout: Duration,
}

impl ConnectionLimits {
    /// `max_streams` leaves room for answers that say that the server is full.
    pub fn new(limits: &RequestLimits) -> Self {
        let max_streams = limits.max_concurrent_requests.saturating_add(64);
        Self {
            // Longer than the minute after which common proxies close an idle connection: they must be first.
            head_timeout: Duration::from_secs(75),
            body_timeout: Duration::from_secs(60),
            max_head_bytes: 64 << 10,
            max_streams: u32::try_from(max_streams).unwrap_or(u32::MAX),
            keep_alive: Duration::from_secs(20),
            client_timeout: Duration::from_secs(40),
        }
    }
}

/// The API keys that open the protected routes. `Debug` does not print them.
#[derive(Clone, Default)]
pub struct ApiKeys {
    keys: Arc<[String]>,
}

impl ApiKeys {
    /// Any of `keys` opens the routes; with none, all routes are open.
    pub fn new(keys: impl IntoIterator<Item = String>) -> Self {
        Self { keys: keys.into_iter().collect() }
    }

    /// Whether all routes are open.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Whether `given` is one of the keys. Compares in constant time.
    pub(crate) fn contains(&self, given: &[u8]) -> bool {
        let found = self.keys.iter().fold(Choice::from(0), |found, key| found | key.as_bytes().ct_eq(given));
        found.into()
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ApiKeys({} hidden)", self.keys.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_not_printed() {
        assert_eq!(format!("{:?}", ApiKeys::new(["first".to_owned()])), "ApiKeys(1 hidden)");
    }
}
