//! The outcome of one HTTP request: filled in while it is served, logged and counted once at its end.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use axum::http::{Method, StatusCode};

use super::identity::RequestIdentity;
use super::metrics::{self, Failure};
use super::summary::RequestSummary;

/// A handle on a request's record. Clones share the record.
#[derive(Clone, Debug)]
pub(crate) struct RequestRecord {
    received: Instant,
    identity: Arc<RequestIdentity>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    generates: bool,
    outcome: Option<Outcome>,
}

#[derive(Clone, Debug)]
enum Outcome {
    Answered(RequestSummary),
    Failed { failure: Option<Failure>, error_type: &'static str, detail: Option<String> },
}

impl RequestRecord {
    /// A record of a request that arrives now.
    pub(crate) fn new(identity: RequestIdentity) -> Self {
        Self { received: Instant::now(), identity: Arc::new(identity), state: Arc::default() }
    }

    /// When the request arrived.
    pub(crate) fn received(&self) -> Instant {
        self.received
    }

    /// The request asks for a generation: counts it.
    pub(crate) fn generates(&self) {
        self.state().generates = true;
        metrics::request_received();
    }

    /// The request is answered in full. The first outcome counts.
    pub(crate) fn answered(&self, summary: RequestSummary) {
        self.state().outcome.get_or_insert(Outcome::Answered(summary));
    }

    /// The request failed. `detail` is for the log, when the server is at fault.
    pub(crate) fn failed(&self, failure: Option<Failure>, error_type: &'static str, detail: Option<String>) {
        self.state().outcome.get_or_insert(Outcome::Failed { failure, error_type, detail });
    }

    /// Logs and counts the outcome: the answer was sent, or the client disconnected. `status` is `None` if none was sent.
    pub(crate) fn close(&self, method: &Method, path: &str, status: Option<StatusCode>) {
        let (generates, outcome) = {
            let state = self.state();
            (state.generates, state.outcome.clone())
        };
        let status = status.map_or(0, |status| status.as_u16());
        let duration_ms = self.received.elapsed().as_secs_f64() * 1000.0;
        let (request_id, trace_id) = (self.identity.request_id_text(), self.identity.trace_id());
        match outcome {
            Some(Outcome::Answered(summary)) => {
                metrics::request_succeeded(&summary);
                tracing::info!(
                    %method, path, status, duration_ms, request_id, trace_id,
                    prompt_tokens = summary.num_prompt_tokens,
                    generated_tokens = summary.num_generated_tokens,
                    validation_ms = summary.validation.as_secs_f64() * 1000.0,
                    queue_ms = summary.queue.as_secs_f64() * 1000.0,
                    inference_ms = summary.inference.as_secs_f64() * 1000.0,
                    "request"
                );
            }
            Some(Outcome::Failed { failure, error_type, detail }) => {
                if let Some(failure) = failure.filter(|_| generates) {
                    metrics::request_failed(failure);
                }
                match detail {
                    Some(detail) => {
                        tracing::error!(
                            %method, path, status, duration_ms, request_id, trace_id, error_type, detail,
                            "request failed"
                        );
                    }
                    None => tracing::info!(
                        %method, path, status, duration_ms, request_id, trace_id, error_type,
                        "request refused"
                    ),
                }
            }
            None if generates && status < 400 => {
                metrics::request_failed(Failure::Dropped);
                tracing::info!(%method, path, status, duration_ms, request_id, trace_id, "client disconnected");
            }
            None => tracing::debug!(%method, path, status, duration_ms, request_id, trace_id, "request"),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Plain data: nothing can be half-written by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
