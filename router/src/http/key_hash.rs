//! The owner of a request, as its API key identifies one.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use sha2::{Digest, Sha256};

/// The API key that a request came with, as a hash; the same for all requests to a server without keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KeyHash([u8; 32]);

impl KeyHash {
    pub(super) fn of(key: &[u8]) -> Self {
        Self(Sha256::digest(key).into())
    }
}

impl<S: Send + Sync> FromRequestParts<S> for KeyHash {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get().copied().unwrap_or_default())
    }
}
