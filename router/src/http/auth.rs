//! API keys: which routes need one, and whether a request has one.
//!
//! INVARIANT: a route is protected unless it is listed here; one that is added is closed until somebody opens it.

use std::fmt;
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::{Choice, ConstantTimeEq};

use super::dialect::{OpenAiError, is_openai};
use crate::api::error::ApiError;

/// What can be read without a key: how the server is and what it serves, never what the model says.
const OPEN_PATHS: [&str; 10] = [
    "/",
    "/health",
    "/health/live",
    "/health/ready",
    "/ping",
    "/metrics",
    "/info",
    "/v1/models",
    "/v1/models/{*id}",
    "/api-doc/openapi.json",
];
const OPEN_FOLDER: &str = "/docs";

const MISSING: &str = "no API key was given; send one as `Authorization: Bearer KEY`";
const WRONG: &str = "the API key that was given is not one of this server's";

/// The keys that open the protected routes. Nothing prints them.
#[derive(Clone, Default)]
pub struct ApiKeys {
    keys: Arc<[String]>,
}

impl ApiKeys {
    pub fn new(keys: impl IntoIterator<Item = String>) -> Self {
        Self { keys: keys.into_iter().collect() }
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Takes the same time whichever key it is, and however much of one is right.
    fn contains(&self, given: &[u8]) -> bool {
        let found = self.keys.iter().fold(Choice::from(0), |found, key| found | key.as_bytes().ct_eq(given));
        found.into()
    }

    fn check(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let given = headers.get(header::AUTHORIZATION).and_then(bearer).ok_or(ApiError::Unauthorized(MISSING))?;
        if self.contains(given) { Ok(()) } else { Err(ApiError::Unauthorized(WRONG)) }
    }
}

impl fmt::Debug for ApiKeys {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "ApiKeys({} hidden)", self.keys.len())
    }
}

/// The key in `Bearer KEY`; the scheme in any case, as HTTP has it.
fn bearer(value: &HeaderValue) -> Option<&[u8]> {
    let (scheme, key) = value.as_bytes().split_at_checked("bearer".len())?;
    let is_bearer = scheme.eq_ignore_ascii_case(b"bearer") && key.starts_with(b" ");
    is_bearer.then(|| key.trim_ascii())
}

/// Lets a request through to an open route, or with a key. What is no route at all is nobody's secret.
pub(super) async fn require_key(State(keys): State<ApiKeys>, request: Request, next: Next) -> Response {
    let path = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    if keys.is_empty() || path.is_none_or(|path| is_open(path, request.method())) {
        return next.run(request).await;
    }
    match keys.check(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => unauthorized(error, request.uri().path()),
    }
}

/// Whether a route, as it is mounted, needs no key.
pub(super) fn is_open(path: &str, method: &Method) -> bool {
    let reads = matches!(*method, Method::GET | Method::HEAD);
    let in_folder = || path.strip_prefix(OPEN_FOLDER).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    reads && (OPEN_PATHS.contains(&path) || in_folder())
}

/// COMPAT: TGI's refusal has no body.
fn unauthorized(error: ApiError, path: &str) -> Response {
    let mut response = if is_openai(path) {
        OpenAiError(error).into_response()
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
        keys.check(&headers).is_ok()
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

    #[test]
    fn keys_are_not_printed() {
        assert_eq!(format!("{:?}", ApiKeys::new(["first".to_owned()])), "ApiKeys(1 hidden)");
    }
}
