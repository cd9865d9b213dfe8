//! The outcome of one HTTP request: filled in while it is served; logged, counted and traced once at its end.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::identity::RequestIdentity;
use super::metrics::{self, Failure};
use super::outcome::Outcome;
use super::summary::RequestSummary;
use super::trace::{self, ClosedRequest, Exchange, RequestTrace, Traces};
use super::warning::Warnings;

/// A handle on a request's record. Clones share the record.
#[derive(Clone, Debug)]
pub(crate) struct RequestRecord {
    received: Instant,
    identity: Arc<RequestIdentity>,
    /// `None`: the request is not traced.
    traced: Option<(Traces, Arc<RequestTrace>)>,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    generates: bool,
    outcome: Option<Outcome>,
    warnings: Warnings,
}

impl RequestRecord {
    /// A record of a request that arrives now. `traces`: where the server records spans, if it does.
    pub(crate) fn new(identity: RequestIdentity, traces: Option<Traces>) -> Self {
        let is_traced = identity.trace().header().is_some();
        let traced = traces.filter(|_| is_traced).map(|traces| (traces, Arc::default()));
        Self { received: Instant::now(), identity: Arc::new(identity), traced, state: Arc::default() }
    }

    /// What the request's spans are made of; `None`: it is not traced.
    pub(crate) fn trace(&self) -> Option<&RequestTrace> {
        self.traced.as_ref().map(|(_, trace)| &**trace)
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

    /// Adds warnings for the client, before the answer's headers are sent.
    pub(crate) fn warn(&self, warnings: Warnings) {
        self.state().warnings.append(warnings);
    }

    /// The warnings so far, as one line.
    pub(crate) fn warning_line(&self) -> Option<String> {
        self.state().warnings.line()
    }

    /// Logs, counts and traces the outcome: the answer was sent, or the client disconnected.
    pub(crate) fn close(&self, exchange: &Exchange) {
        let (generates, outcome) = {
            let state = self.state();
            (state.generates, state.outcome.clone())
        };
        let request = ClosedRequest {
            identity: &self.identity,
            received: self.received,
            exchange,
            outcome: outcome.as_ref(),
            generates,
        };
        if let Some((traces, trace)) = &self.traced {
            traces.send(trace::spans(traces, trace, &request));
        }
        let is_disconnected = request.is_disconnected();
        let Exchange { method, path, status, .. } = exchange;
        let status = status.map_or(0, |status| status.as_u16());
        let duration_ms = milliseconds(self.received.elapsed());
        let trace_id = self.identity.trace().trace_id().map(tracing::field::display);
        let request_id = self.identity.request_id_text();
        let warnings = self.warning_line();
        match outcome {
            Some(Outcome::Answered(summary)) => {
                metrics::request_succeeded(&summary);
                tracing::info!(
                    %method, path, status, duration_ms, request_id, trace_id,
                    prompt_tokens = summary.num_prompt_tokens,
                    generated_tokens = summary.num_generated_tokens,
                    validation_ms = milliseconds(summary.validation),
                    queue_ms = milliseconds(summary.queue),
                    inference_ms = milliseconds(summary.inference),
                    warnings,
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
                            %method, path, status, duration_ms, request_id, trace_id, error_type, detail, warnings,
                            "request failed"
                        );
                    }
                    None => tracing::info!(
                        %method, path, status, duration_ms, request_id, trace_id, error_type, warnings,
                        "request refused"
                    ),
                }
            }
            None if is_disconnected => {
                metrics::request_failed(Failure::Dropped);
                tracing::info!(%method, path, status, duration_ms, request_id, trace_id, warnings, "client disconnected");
            }
            None => tracing::debug!(%method, path, status, duration_ms, request_id, trace_id, "request"),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Plain data: nothing can be half-written by a panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Milliseconds with two decimals, for the log.
fn milliseconds(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 100_000.0).round() / 100.0
}
