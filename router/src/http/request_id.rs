//! `x-request-id`: the client's or a new one, set on every response. The outermost layer, so that no response lacks it.

use axum::extract::Request;
use axum::http::HeaderName;
use axum::middleware::Next;
use axum::response::Response;

use crate::telemetry::RequestIdentity;

pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// W3C Trace Context defines no response header, so the trace id goes to the log only.
pub(super) async fn identify(mut request: Request, next: Next) -> Response {
    let identity = RequestIdentity::of(request.headers());
    request.extensions_mut().insert(identity.clone());
    let mut response = next.run(request).await;
    response.headers_mut().insert(REQUEST_ID, identity.request_id().clone());
    response
}
