//! How logs identify a request: its id, given by the client or made here, and the trace that it belongs to.

use axum::http::{HeaderMap, HeaderValue, Method};

use super::trace::TraceContext;

/// Longer ids from clients are replaced, because the id is in every log line.
const MAX_ID_BYTES: usize = 128;

/// A request's id and trace.
#[derive(Clone, Debug)]
pub(crate) struct RequestIdentity {
    request_id: HeaderValue,
    trace: TraceContext,
}

impl RequestIdentity {
    /// The header `x-request-id` if it is usable, else a new id; and the trace. `is_traced`: whether the server records spans.
    pub(crate) fn of(method: &Method, headers: &HeaderMap, is_traced: bool) -> Self {
        let given = headers.get("x-request-id").filter(|id| is_usable(id)).cloned();
        Self { request_id: given.unwrap_or_else(new_id), trace: TraceContext::of(method, headers, is_traced) }
    }

    pub(crate) fn request_id(&self) -> &HeaderValue {
        &self.request_id
    }

    /// The id as text.
    pub(crate) fn request_id_text(&self) -> &str {
        self.request_id.to_str().unwrap_or_default()
    }

    pub(crate) fn trace(&self) -> &TraceContext {
        &self.trace
    }
}

fn is_usable(id: &HeaderValue) -> bool {
    let id = id.as_bytes();
    (1..=MAX_ID_BYTES).contains(&id.len()) && id.iter().all(u8::is_ascii_graphic)
}

fn new_id() -> HeaderValue {
    let id = format!("{:032x}", rand::random::<u128>());
    HeaderValue::try_from(id).expect("invariant: hexadecimal digits are a header value")
}
