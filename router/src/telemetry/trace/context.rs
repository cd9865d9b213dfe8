//! W3C Trace Context: which trace a request belongs to, and whether this server adds spans to it.

use std::str::FromStr;

use axum::http::{HeaderMap, HeaderValue, Method};
use opentelemetry::trace::{SpanContext, SpanId, TraceFlags, TraceId, TraceState};

/// W3C Trace Context asks for at least this much; it is part of each span.
const MAX_STATE_BYTES: usize = 512;

/// The trace that a request belongs to.
#[derive(Clone, Debug)]
pub(crate) struct TraceContext {
    /// The client's span; invalid if the client named none.
    pub(super) parent: SpanContext,
    /// The request's span; `None`: it is not recorded.
    pub(super) span: Option<SpanContext>,
}

impl TraceContext {
    /// The trace that the headers name. With `is_on`, a request gets a span, and if need be a trace, unless the client's
    /// flags say that its trace is not sampled. GET requests get none: monitoring sends them all the time.
    pub(crate) fn of(method: &Method, headers: &HeaderMap, is_on: bool) -> Self {
        let parent = parent(headers).unwrap_or(SpanContext::NONE);
        let is_sampled = parent.is_sampled() || !parent.is_valid();
        let span = (is_on && is_sampled && method != Method::GET).then(|| {
            let trace_id = if parent.is_valid() { parent.trace_id() } else { TraceId::from(rand::random::<u128>()) };
            let span_id = new_span_id();
            SpanContext::new(trace_id, span_id, TraceFlags::SAMPLED, false, parent.trace_state().clone())
        });
        Self { parent, span }
    }

    /// The trace's id, for the log.
    pub(crate) fn trace_id(&self) -> Option<TraceId> {
        let context = self.span.as_ref().unwrap_or(&self.parent);
        context.is_valid().then(|| context.trace_id())
    }

    /// The value of the response's `traceparent`: the request's span.
    pub(crate) fn header(&self) -> Option<HeaderValue> {
        let span = self.span.as_ref()?;
        let header = format!("00-{}-{}-{:02x}", span.trace_id(), span.span_id(), span.trace_flags());
        Some(HeaderValue::try_from(header).expect("invariant: hexadecimal digits are a header value"))
    }
}

pub(super) fn new_span_id() -> SpanId {
    SpanId::from(rand::random::<u64>())
}

/// The client's span. W3C Trace Context: several `traceparent` are as good as none, and `tracestate` has no meaning
/// without one.
fn parent(headers: &HeaderMap) -> Option<SpanContext> {
    let mut parents = headers.get_all("traceparent").iter();
    let parent = parents.next().filter(|_| parents.next().is_none())?;
    let (trace_id, span_id, flags) = parse(parent.to_str().ok()?)?;
    Some(SpanContext::new(trace_id, span_id, flags, true, state(headers).unwrap_or_default()))
}

/// A `traceparent`: `version-trace_id-parent_id-flags`, with more fields in later versions.
fn parse(traceparent: &str) -> Option<(TraceId, SpanId, TraceFlags)> {
    let mut parts = traceparent.split('-');
    let mut field = |length: usize| {
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        parts.next().filter(|part| part.len() == length && part.bytes().all(is_digit))
    };
    let (version, trace_id, span_id, flags) = (field(2)?, field(32)?, field(16)?, field(2)?);
    let is_known = version != "ff" && (version != "00" || parts.next().is_none());
    let trace_id = TraceId::from_hex(trace_id).ok()?;
    let span_id = SpanId::from_hex(span_id).ok()?;
    let flags = TraceFlags::new(u8::from_str_radix(flags, 16).ok()?) & TraceFlags::SAMPLED;
    (is_known && trace_id != TraceId::INVALID && span_id != SpanId::INVALID).then_some((trace_id, span_id, flags))
}

/// The `tracestate` headers as one; `None` if they are invalid or too long.
fn state(headers: &HeaderMap) -> Option<TraceState> {
    let values: Result<Vec<_>, _> = headers.get_all("tracestate").iter().map(HeaderValue::to_str).collect();
    let joined = values.ok()?.join(",");
    if joined.len() > MAX_STATE_BYTES {
        return None;
    }
    TraceState::from_str(&joined).ok()
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderName;

    use super::*;

    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

    fn headers(pairs: &[(&'static str, String)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, String)| {
            (HeaderName::from_static(name), HeaderValue::try_from(value).unwrap())
        };
        let mut headers = HeaderMap::new();
        for (name, value) in pairs.iter().map(pair) {
            headers.append(name, value);
        }
        headers
    }

    fn context(pairs: &[(&'static str, String)]) -> TraceContext {
        TraceContext::of(&Method::POST, &headers(pairs), true)
    }

    #[test]
    fn only_a_valid_traceparent_is_a_parent() {
        let cases = [
            (format!("00-{TRACE}-b7ad6b7169203331-01"), true),
            (format!("00-{TRACE}-b7ad6b7169203331-01-more"), false),
            (format!("cc-{TRACE}-b7ad6b7169203331-01-more"), true),
            (format!("ff-{TRACE}-b7ad6b7169203331-01"), false),
            (format!("00-{}-b7ad6b7169203331-01", TRACE.to_uppercase()), false),
            (format!("00-{}-b7ad6b7169203331-01", "0".repeat(32)), false),
            (format!("00-{TRACE}-{}-01", "0".repeat(16)), false),
            (format!("00-{TRACE}-b7ad6b7169203331"), false),
            (format!("00-{TRACE}-+7ad6b7169203331-01"), false),
            (String::new(), false),
        ];
        for (parent, is_valid) in cases {
            let context = TraceContext::of(&Method::POST, &headers(&[("traceparent", parent.clone())]), false);
            let expected = is_valid.then_some(TRACE.to_owned());
            assert_eq!(context.trace_id().map(|id| id.to_string()), expected, "{parent}");
            assert!(context.span.is_none(), "traces are off");
        }
    }

    #[test]
    fn several_traceparents_are_none() {
        let parent = format!("00-{TRACE}-b7ad6b7169203331-01");
        let context = context(&[("traceparent", parent.clone()), ("traceparent", parent)]);
        assert_ne!(context.trace_id().unwrap().to_string(), TRACE, "it is a new trace");
    }

    #[test]
    fn a_span_continues_its_parents_trace_and_state() {
        let parent = format!("00-{TRACE}-b7ad6b7169203331-03");
        let state = |value: &str| ("tracestate", value.to_owned());
        let context = context(&[("traceparent", parent), state("one=1,two=2"), state("three=3")]);
        let span = context.span.as_ref().unwrap();
        assert_eq!(span.trace_id().to_string(), TRACE);
        assert_eq!(span.trace_state().header(), "one=1,two=2,three=3");
        assert_ne!(span.span_id(), context.parent.span_id());
        let header = format!("00-{TRACE}-{}-01", span.span_id());
        assert_eq!(context.header().unwrap(), header.as_str());
    }

    #[test]
    fn a_trace_state_that_is_too_long_is_dropped() {
        let parent = format!("00-{TRACE}-b7ad6b7169203331-01");
        let context = context(&[("traceparent", parent), ("tracestate", format!("long={}", "x".repeat(512)))]);
        assert_eq!(context.span.unwrap().trace_state().header(), "");
    }

    #[test]
    fn unsampled_traces_and_get_requests_get_no_span() {
        let unsampled = headers(&[("traceparent", format!("00-{TRACE}-b7ad6b7169203331-00"))]);
        let context = TraceContext::of(&Method::POST, &unsampled, true);
        assert!(context.span.is_none() && context.header().is_none());
        assert_eq!(context.trace_id().unwrap().to_string(), TRACE, "the log still names the trace");
        assert!(TraceContext::of(&Method::GET, &HeaderMap::new(), true).trace_id().is_none());
    }
}
