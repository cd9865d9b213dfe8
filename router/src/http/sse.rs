//! Event streams: `data: ` and one line of JSON for each event, in some dialects after its name, and a comment or a ping
//! after every 15 s without an event.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::HeaderMap;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use futures::{FutureExt, Stream, StreamExt};
use serde::Serialize;
use tokio::time::Instant;

use super::observe;
use crate::api::error::ApiError;
use crate::telemetry::RequestRecord;

/// After this time without an event, a stream sends something, so that no proxy takes the connection for idle.
const SILENCE: Duration = Duration::from_secs(15);
/// PERF: most events fit, so that one is written without growing.
const EVENT_BYTES: usize = 384;

/// An event as it is sent.
#[derive(Clone)]
pub(super) struct Event(Bytes);

pub(super) fn tgi_error(error: &ApiError) -> Vec<Event> {
    vec![event(&error.tgi_body())]
}

pub(super) fn openai_error(error: &ApiError) -> Vec<Event> {
    vec![event(&error.openai_event()), done()]
}

/// An event stream that ends after the first error, which `render_error` renders as its last events, and that sends `keep_alive` when it is silent.
/// Dropping the response drops `events`, and so aborts their generations.
pub(super) fn response(
    headers: HeaderMap,
    record: RequestRecord,
    keep_alive: Event,
    render_error: impl FnOnce(&ApiError) -> Vec<Event> + Send + 'static,
    events: impl Stream<Item = Result<Event, ApiError>> + Send + 'static,
) -> Response {
    let frames = async_stream::stream! {
        let mut events = pin!(events);
        let mut silence = pin!(tokio::time::sleep(SILENCE));
        loop {
            let next = tokio::select! {
                biased;
                // A panic must end this stream, not the task of its connection.
                next = AssertUnwindSafe(events.next()).catch_unwind() => match next {
                    Ok(next) => next,
                    Err(panic) => Some(Err(observe::bug(panic.as_ref()))),
                },
                () = &mut silence => Some(Ok(keep_alive.clone())),
            };
            silence.as_mut().reset(Instant::now() + SILENCE);
            match next {
                Some(Ok(event)) => yield Ok::<_, Infallible>(event.0),
                Some(Err(error)) => {
                    observe::fail(&record, &error);
                    for event in render_error(&error) {
                        yield Ok(event.0);
                    }
                    break;
                }
                None => break,
            }
        }
    };
    let kind = [(CONTENT_TYPE, "text/event-stream"), (CACHE_CONTROL, "no-cache")];
    (headers, (kind, Body::from_stream(frames))).into_response()
}

/// What most dialects send when they are silent.
pub(super) fn comment() -> Event {
    Event(Bytes::from_static(b":\n\n"))
}

/// The last event of OpenAI's streams.
pub(super) fn done() -> Event {
    Event(Bytes::from_static(b"data: [DONE]\n\n"))
}

/// An event with the value as JSON.
pub(super) fn event(value: &impl Serialize) -> Event {
    written_event(|json| serde_json::to_writer(json, value))
}

/// An event with the JSON that `write` appends.
pub(super) fn written_event(write: impl FnOnce(&mut Vec<u8>) -> serde_json::Result<()>) -> Event {
    let mut text = Vec::with_capacity(EVENT_BYTES);
    text.extend_from_slice(b"data: ");
    let begin = text.len();
    // Serializing our own types cannot fail: map keys are strings, and NaN becomes null. JSON has no newline.
    if write(&mut text).is_err() {
        text.truncate(begin);
        text.extend_from_slice(b"null");
    }
    text.extend_from_slice(b"\n\n");
    Event(text.into())
}

/// An event with the value as JSON, whose name is the value's type. INVARIANT: `type` is the value's first field.
pub(super) fn typed_event(value: &impl Serialize) -> Event {
    let unnamed = event(value).0;
    let json = unnamed.strip_prefix(b"data: {\"type\":\"").unwrap_or_default();
    let name = json.split(|&byte| byte == b'"').next().unwrap_or_default();
    Event([b"event: ", name, b"\n", &unnamed].concat().into())
}
