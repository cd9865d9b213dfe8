//! When a request stops waiting.

use std::time::{Duration, Instant};

/// The deadlines of one request; `None` never expires.
#[derive(Clone, Copy, Debug)]
pub(super) struct Deadlines {
    pub(super) received: Instant,
    /// The client's `timeout`: the answer must be complete.
    pub(super) answer: Option<Instant>,
    /// `--queue-timeout`: the first step must have begun.
    pub(super) first_step: Option<Instant>,
}

impl Deadlines {
    /// Both timeouts count from `received`, the request's arrival.
    pub(super) fn new(received: Instant, timeout: Option<Duration>, queue_timeout: Option<Duration>) -> Self {
        let after = |timeout| received + timeout;
        Self { received, answer: timeout.map(after), first_step: queue_timeout.map(after) }
    }
}

/// Sleeps until `deadline`; for ever without one.
pub(super) async fn reached(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}
