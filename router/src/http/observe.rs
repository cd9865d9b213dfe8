//! Around every request: its record, its one log line, and the net under a panic.

use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use http_body::{Frame, SizeHint};

use super::dialect::{OpenAiError, TgiError, is_openai};
use crate::api::error::ApiError;
use crate::generation::GenerationError;
use crate::telemetry::{RequestIdentity, RequestRecord, metrics};

/// Makes the request's record, and closes it when the answer's body has ended, or was dropped.
pub(super) async fn observe(mut request: Request, next: Next) -> Response {
    let identity = request.extensions().get::<RequestIdentity>().cloned();
    let record = RequestRecord::new(identity.unwrap_or_else(|| RequestIdentity::of(request.headers())));
    request.extensions_mut().insert(record.clone());
    let mut closing =
        Closing { record, method: request.method().clone(), path: request.uri().path().to_owned(), status: None };
    let response = match AssertUnwindSafe(next.run(request)).catch_unwind().await {
        Ok(response) => response,
        Err(panic) => internal_error(&closing.path, panic.as_ref()),
    };
    closing.status = Some(response.status());
    if let Some(error) = response.extensions().get::<ApiError>() {
        fail(&closing.record, error);
    }
    response.map(|body| Body::new(ObservedBody { body, _closing: closing }))
}

/// Writes an error into the request's record; the reason only when it is not the client's own text.
pub(super) fn fail(record: &RequestRecord, error: &ApiError) {
    if let Some(reason) = error.refusal() {
        metrics::request_refused(reason);
    }
    let is_ours =
        error.tgi_status().is_server_error() || matches!(error, ApiError::Generation(GenerationError::Failed(_)));
    let is_expected = matches!(error, ApiError::Generation(GenerationError::ShuttingDown) | ApiError::Unhealthy);
    record.failed(error.failure(), error.error_type(), (is_ours && !is_expected).then(|| error.to_string()));
}

fn internal_error(path: &str, panic: &(dyn std::any::Any + Send)) -> Response {
    let error = bug(panic);
    if is_openai(path) { OpenAiError(error).into_response() } else { TgiError(error).into_response() }
}

/// A panic becomes one request's error, and a log line that has the same id.
pub(super) fn bug(panic: &(dyn std::any::Any + Send)) -> ApiError {
    let id = format!("{:016x}", rand::random::<u64>());
    let reason = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(id, reason = reason.unwrap_or("unknown"), "a request hit a bug");
    ApiError::Internal(id)
}

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

struct ObservedBody {
    body: Body,
    _closing: Closing,
}

impl http_body::Body for ObservedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
