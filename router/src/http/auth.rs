//! API keys: which routes require one, and whether a request carries a valid one.
//!
//! INVARIANT: a route is protected unless it is listed here, so a new route requires a key until it is added.

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::dialect::{self, Dialect};
use super::key_hash::KeyHash;
use crate::api::error::ApiError;
use crate::config::ApiKeys;

/// Routes that require no key: health, metrics, the served model, documentation and the playground's page, never
/// generated text.
const OPEN_PATHS: [&str; 11] = [
    "/",
    "/health",
    "/health/live",
    "/health/ready",
    "/ping",
    "/metrics",
    "/info",
    "/version",
    "/v1/models",
    "/v1/models/{*id}",
    "/api-doc/openapi.json",
];
const OPEN_FOLDERS: [&str; 2] = ["/docs", "/playground"];

/// The header in which Anthropic's clients send a key.
pub(super) const API_KEY: &str = "x-api-key";

const MISSING: &str = "no API key was given; send one as `Authorization: Bearer KEY` or as `x-api-key: KEY`";
const WRONG: &str = "the given API key is not one of this server's";

fn check(keys: &ApiKeys, headers: &HeaderMap) -> Result<KeyHash, ApiError> {
    let given = [headers.get(header::AUTHORIZATION).and_then(bearer), headers.get(API_KEY).map(HeaderValue::as_bytes)];
    if let Some(key) = given.into_iter().flatten().find(|key| keys.contains(key)) {
        return Ok(KeyHash::of(key));
    }
    Err(ApiError::Unauthorized(if given == [None, None] { MISSING } else { WRONG }))
}

/// The key in `Bearer KEY`. The scheme is case-insensitive, as HTTP requires.
fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, key) = value.as_bytes().split_at_checked("bearer".len())?;
    let is_bearer = scheme.eq_ignore_ascii_case(b"bearer") && key.starts_with(b" ");
    is_bearer.then(|| key.trim_ascii())
}

/// Passes requests for open routes, for unknown routes (which answer 404) and those with a valid key.
pub(super) async fn require_key(State(keys): State<ApiKeys>, mut request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    if keys.is_empty() || path.is_none_or(|path| is_open(path, request.method())) {
        return next.run(request).await;
    }
    match check(&keys, request.headers()) {
        Ok(key) => {
            request.extensions_mut().insert(key);
            next.run(request).await
        }
        Err(error) => unauthorized(error, request.uri().path()),
    }
}

/// Whether the route with this path pattern requires no key.
pub(super) fn is_open(path: &str, method: &Method) -> bool {
    let reads = matches!(*method, Method::GET | Method::HEAD);
    let is_in = |folder| path.strip_prefix(folder).is_some_and(|rest: &str| rest.is_empty() || rest.starts_with('/'));
    reads && (OPEN_PATHS.contains(&path) || OPEN_FOLDERS.into_iter().any(is_in))
}

/// COMPAT: TGI's refusal has no body.
fn unauthorized(error: ApiError, path: &str) -> Response {
    let mut response = if Dialect::of(path).refuses_with_body() {
        dialect::error_response(path, error)
    } else {
        let mut response = StatusCode::UNAUTHORIZED.into_response();
        response.extensions_mut().insert(error);
        response
    };
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_let_in(authorization: &str) -> bool {
        let keys = ApiKeys::new(["first".to_owned(), "Second".to_owned()]);
        let headers = HeaderMap::from_iter([(header::AUTHORIZATION, HeaderValue::from_str(authorization).unwrap())]);
        check(&keys, &headers).is_ok()
    }

    #[test]
    fn any_of_the_keys_is_accepted_exactly() {
        for given in ["Bearer first", "bearer first", "BEARER  Second ", "Bearer Second"] {
            assert!(is_let_in(given), "{given}");
        }
        for given in [
            "",
            "Bearer",
            "Bearer ",
            "first",
            "Basic first",
            "Bearer FIRST",
            "Bearer second",
            "Bearer firs",
            "Bearer first x",
            "Bearer first,Second",
        ] {
            assert!(!is_let_in(given), "{given}");
        }
    }
}
