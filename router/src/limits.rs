//! Bounds on what clients can ask for and hold.

use std::time::Duration;

/// Limits that every request is checked against.
#[derive(Clone, Copy, Debug)]
pub struct RequestLimits {
    /// Generations in the server at the same time, queued or running.
    pub max_concurrent_requests: usize,
    /// Largest `best_of`.
    pub max_best_of: usize,
    /// Most stop strings of a request.
    pub max_stop_sequences: usize,
    /// Largest `top_n_tokens` on TGI's routes.
    pub max_top_n_tokens: u32,
    /// Tokens of the input.
    pub max_input_tokens: usize,
    /// Tokens of the input and the answer together.
    pub max_total_tokens: usize,
    /// Tokens of the answer; `None`: limited by `max_total_tokens` only.
    pub max_new_tokens: Option<u32>,
    /// Prompts of one request.
    pub max_client_batch_size: usize,
}

/// How much may wait for its first step, and how long.
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    /// Prompt tokens plus `max_new_tokens`, of all queued generations.
    pub max_tokens: u64,
    /// Longest time from a request's arrival to its first step; `None`: no limit.
    pub timeout: Option<Duration>,
}

/// Limits of connections.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    /// Connections open at the same time; a further one is closed at once.
    pub max_connections: usize,
    /// How long a connection may take to send its first bytes or a request's head, or to stay open without a request.
    pub idle_timeout: Duration,
    /// How long a request's body may take to arrive.
    pub body_timeout: Duration,
    /// Size of a request's line and headers together, in bytes.
    pub max_head_bytes: usize,
    /// Requests open on one HTTP/2 connection at the same time.
    pub max_streams: u32,
    /// Interval of keep-alive probes to a quiet client, and how long an HTTP/2 client may take to answer a ping.
    pub keep_alive: Duration,
    /// How long a client may read nothing of its response, or an HTTP/1.1 client leave TCP keep-alive probes unanswered.
    pub client_timeout: Duration,
}

impl ConnectionLimits {
    /// The limits for a server that admits `limits.max_concurrent_requests` requests. The larger numbers of streams and
    /// connections leave room for health checks, idle connections of pools, and requests that are answered 429.
    pub fn new(limits: &RequestLimits) -> Self {
        let max_streams = limits.max_concurrent_requests.saturating_add(64);
        Self {
            max_connections: limits.max_concurrent_requests.saturating_mul(4).saturating_add(1024),
            // Common proxies close an idle connection after 60 s, and the proxy must close first.
            idle_timeout: Duration::from_secs(75),
            body_timeout: Duration::from_secs(60),
            max_head_bytes: 64 << 10,
            max_streams: u32::try_from(max_streams).unwrap_or(u32::MAX),
            keep_alive: Duration::from_secs(20),
            client_timeout: Duration::from_secs(40),
        }
    }
}
