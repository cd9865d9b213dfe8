//! The playground: a page that talks to this server's own routes from a browser. It is built from `playground/` into
//! three files beside this one.
//!
//! INVARIANT: the page loads nothing from elsewhere and makes no HTML from text: its content security policy forbids both.

use axum::Router;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

/// The page's files: route, content type, how long a browser may keep it, content. The page asks for the other two with a
/// hash of their content in the query, so they never change.
const FILES: [(&str, &str, &str, &[u8]); 3] = [
    ("/playground", "text/html; charset=utf-8", "no-cache", include_bytes!("playground/index.html")),
    ("/playground/page.js", "text/javascript; charset=utf-8", IMMUTABLE, include_bytes!("playground/page.js")),
    ("/playground/page.css", "text/css; charset=utf-8", IMMUTABLE, include_bytes!("playground/page.css")),
];
const IMMUTABLE: &str = "public, max-age=31536000, immutable";

const HEADERS: [(HeaderName, HeaderValue); 4] = [
    (
        header::CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
             base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
             require-trusted-types-for 'script'; trusted-types 'none'",
        ),
    ),
    (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (header::X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
];

pub(super) fn routes<S: Clone + Send + Sync + 'static>() -> Router<S> {
    FILES.into_iter().fold(Router::new(), |router, file| router.route(file.0, get(move || async move { answer(file) })))
}

/// The page, as the answer to GET `/` of a browser.
pub(super) fn page() -> Response {
    let mut response = answer(FILES[0]);
    response.headers_mut().insert(header::VARY, HeaderValue::from_static("accept"));
    response
}

/// Whether a client asks for HTML by name, as browsers do. `*/*`, which programs send, is no such wish.
pub(super) fn wants_page(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT).into_iter().filter_map(|value| value.to_str().ok());
    let mut types = values.flat_map(|value| value.split(',')).filter_map(|range| range.split(';').next());
    types.any(|name| name.trim().eq_ignore_ascii_case("text/html"))
}

fn answer((_, content_type, cache, content): (&str, &'static str, &'static str, &'static [u8])) -> Response {
    let own = [(header::CONTENT_TYPE, content_type), (header::CACHE_CONTROL, cache)];
    (own, HEADERS, content).into_response()
}
