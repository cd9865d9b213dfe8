//! How logs identify a request: its id, given by the client or made here, and the trace that it belongs to.

use axum::http::{HeaderMap, HeaderValue};

/// Longer ids from clients are replaced, because the id is in every log line.
const MAX_ID_BYTES: usize = 128;

/// A request's id and trace.
#[derive(Clone, Debug)]
pub(crate) struct RequestIdentity {
    request_id: HeaderValue,
    trace_id: Option<String>,
}

impl RequestIdentity {
    /// The header `x-request-id` if it is usable, else a new id; the trace id of a valid `traceparent`.
    pub(crate) fn of(headers: &HeaderMap) -> Self {
        let given = headers.get("x-request-id").filter(|id| is_usable(id)).cloned();
        let mut parents = headers.get_all("traceparent").iter();
        // W3C Trace Context: several headers are as good as none.
        let parent = parents.next().filter(|_| parents.next().is_none());
        Self {
            request_id: given.unwrap_or_else(new_id),
            trace_id: parent.and_then(|value| trace_id(value.to_str().ok()?)).map(str::to_owned),
        }
    }

    pub(crate) fn request_id(&self) -> &HeaderValue {
        &self.request_id
    }

    /// The id as text.
    pub(crate) fn request_id_text(&self) -> &str {
        self.request_id.to_str().unwrap_or_default()
    }

    pub(crate) fn trace_id(&self) -> Option<&str> {
        self.trace_id.as_deref()
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

/// The trace id of a W3C `traceparent`: `version-trace_id-parent_id-flags`, with more fields in later versions.
fn trace_id(traceparent: &str) -> Option<&str> {
    let mut parts = traceparent.split('-');
    let (version, trace_id, parent_id, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |part: &str, length: usize| {
        part.len() == length && part.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    };
    let is_zero = |part: &str| part.bytes().all(|byte| byte == b'0');
    let is_well_formed = is_hex(version, 2) && is_hex(trace_id, 32) && is_hex(parent_id, 16) && is_hex(flags, 2);
    let is_known = version != "ff" && (version != "00" || parts.next().is_none());
    (is_well_formed && is_known && !is_zero(trace_id) && !is_zero(parent_id)).then_some(trace_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

    #[test]
    fn only_a_valid_traceparent_gives_a_trace_id() {
        let cases = [
            (format!("00-{TRACE}-b7ad6b7169203331-01"), true),
            (format!("00-{TRACE}-b7ad6b7169203331-01-more"), false),
            (format!("cc-{TRACE}-b7ad6b7169203331-01-more"), true),
            (format!("ff-{TRACE}-b7ad6b7169203331-01"), false),
            (format!("00-{}-b7ad6b7169203331-01", TRACE.to_uppercase()), false),
            (format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)), false),
            (format!("00-{TRACE}-{}-01", "0".repeat(16)), false),
            (format!("00-{TRACE}-b7ad6b7169203331"), false),
            (String::new(), false),
        ];
        for (parent, is_valid) in cases {
            assert_eq!(trace_id(&parent), is_valid.then_some(TRACE), "{parent}");
        }
    }

    #[test]
    fn several_traceparents_give_no_trace_id() {
        let parent = HeaderValue::try_from(format!("00-{TRACE}-b7ad6b7169203331-01")).unwrap();
        let mut headers = HeaderMap::from_iter([("traceparent".parse().unwrap(), parent.clone())]);
        assert_eq!(RequestIdentity::of(&headers).trace_id(), Some(TRACE));
        headers.append("traceparent", parent);
        assert_eq!(RequestIdentity::of(&headers).trace_id(), None);
    }
}
