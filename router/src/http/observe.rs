//! Wraps every request: makes its record, closes it with one log line and one trace, and turns a panic into an error response.

use std::panic::AssertUnwindSafe;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;
use futures::FutureExt;

use super::dialect;
use super::guarded_body;
use crate::api::error::ApiError;
use crate::generation::GenerationError;
use crate::telemetry::{Exchange, RequestIdentity, RequestRecord, Traces, WARNING, metrics};

/// Makes the request's record and closes it when the response's body has been sent or dropped.
pub(super) async fn observe(State(traces): State<Option<Traces>>, mut request: Request, next: Next) -> Response {
    let identity = request.extensions().get::<RequestIdentity>().cloned();
    let record = RequestRecord::new(identity.expect("invariant: an outer layer identifies every request"), traces);
    request.extensions_mut().insert(record.clone());
    let exchange = Exchange {
        method: request.method().clone(),
        path: request.uri().path().to_owned(),
        route: request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned()),
        status: None,
    };
    let mut closing = Closing { record, exchange };
    let mut response = match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(panic) => dialect::error_response(&closing.exchange.path, bug(panic.as_ref())),
    };
    closing.exchange.status = Some(response.status());
    if let Some(error) = response.extensions().get::<ApiError>() {
        fail(&closing.record, error);
    }
    if let Some(line) = closing.record.warning_line() {
        let value = HeaderValue::from_str(&line).expect("invariant: warnings are visible ASCII");
        response.headers_mut().insert(HeaderName::from_static(WARNING), value);
    }
    guarded_body::guard(response, closing)
}

/// Writes an error into the request's record. The message is logged only if the fault is ours: others may quote the
/// client's text.
pub(super) fn fail(record: &RequestRecord, error: &ApiError) {
    if let Some(reason) = error.refusal() {
        metrics::request_refused(reason);
    }
    let is_server_fault =
        error.tgi_status().is_server_error() || matches!(error, ApiError::Generation(GenerationError::Failed(_)));
    let is_expected = matches!(error, ApiError::Generation(GenerationError::ShuttingDown) | ApiError::Unhealthy);
    record.failed(error.failure(), error.error_type(), (is_server_fault && !is_expected).then(|| error.to_string()));
}

/// Logs a panic and returns the request's error, which has the same id.
pub(super) fn bug(panic: &(dyn std::any::Any + Send)) -> ApiError {
    let id = format!("{:016x}", rand::random::<u64>());
    let reason = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(id, reason = reason.unwrap_or("unknown"), "a request hit a bug");
    ApiError::Internal(id)
}

/// Closes the record when it is dropped.
struct Closing {
    record: RequestRecord,
    exchange: Exchange,
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.record.close(&self.exchange);
    }
}
