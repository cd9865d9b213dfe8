//! `x-request-id`: the client's or a new one, set on every response; and `traceparent` on those of recorded requests. The
//! outermost layer, so that no response lacks them.

use axum::extract::{Request, State};
use axum::http::HeaderName;
use axum::middleware::Next;
use axum::response::Response;

use crate::telemetry::{RequestIdentity, Traces};

pub(super) const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// `traces`: where the server records spans, if it does.
pub(super) async fn identify(State(traces): State<Option<Traces>>, mut request: Request, next: Next) -> Response {
    let identity = RequestIdentity::of(request.method(), request.headers(), traces.is_some());
    request.extensions_mut().insert(identity.clone());
    let mut response = next.run(request).await;
    response.headers_mut().insert(REQUEST_ID, identity.request_id().clone());
    if let Some(span) = identity.trace().header() {
        response.headers_mut().insert(TRACEPARENT, span);
    }
    response
}
