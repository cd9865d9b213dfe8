//! Wraps every request: makes its record, writes its one log line, and turns a panic into an error response.

use std::panic::AssertUnwindSafe;

use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use futures::FutureExt;

use super::dialect;
use super::guarded_body;
use crate::api::error::ApiError;
use crate::generation::GenerationError;
use crate::telemetry::{RequestIdentity, RequestRecord, metrics};

/// Makes the request's record and closes it when the response's body has been sent or dropped.
pub(super) async fn observe(mut request: Request, next: Next) -> Response {
    let identity = request.extensions().get::<RequestIdentity>().cloned();
    let record = RequestRecord::new(identity.unwrap_or_else(|| RequestIdentity::of(request.headers())));
    request.extensions_mut().insert(record.clone());
    let mut closing =
        Closing { record, method: request.method().clone(), path: request.uri().path().to_owned(), status: None };
    let response = match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(panic) => dialect::error_response(&closing.path, bug(panic.as_ref())),
    };
    closing.status = Some(response.status());
    if let Some(error) = response.extensions().get::<ApiError>() {
        fail(&closing.record, error);
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
    method: Method,
    path: String,
    status: Option<StatusCode>,
}

impl Drop for Closing {
    fn drop(&mut self) {
        self.record.close(&self.method, &self.path, self.status);
    }
}
