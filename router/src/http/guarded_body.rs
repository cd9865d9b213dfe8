//! A body that keeps something alive until it has been sent or dropped.

use axum::body::Body;
use axum::response::Response;
use http_body_util::BodyExt;

/// Drops `guard` together with the response's body.
pub(super) fn guard<G: Send + 'static>(response: Response, guard: G) -> Response {
    // `map_err` passes the body's size on, which gives the response its `content-length`; its closure owns the guard.
    let keep = move |error| {
        let _guard = &guard;
        error
    };
    response.map(|body| Body::new(body.map_err(keep)))
}
