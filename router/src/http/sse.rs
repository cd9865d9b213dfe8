//! Event streams: `data: ` and one line of JSON for each event, in some dialects after its name, and a comment or a ping
//! after every 15 s without an event.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;

use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{FutureExt, Stream, StreamExt};
use serde::Serialize;

use super::observe;
use crate::api::error::ApiError;
use crate::telemetry::RequestRecord;

pub(super) fn tgi_error(error: &ApiError) -> Vec<Event> {
    vec![event(&error.tgi_body())]
}

pub(super) fn openai_error(error: &ApiError) -> Vec<Event> {
    vec![event(&error.openai_event()), done()]
}

/// An event stream that ends after the first error, which `render_error` renders as its last events. Dropping the response drops `events`, and so aborts their generations.
pub(super) fn response(
    headers: HeaderMap,
    record: RequestRecord,
    keep_alive: KeepAlive,
    render_error: impl FnOnce(&ApiError) -> Vec<Event> + Send + 'static,
    events: impl Stream<Item = Result<Event, ApiError>> + Send + 'static,
) -> Response {
    let events = async_stream::stream! {
        let mut events = std::pin::pin!(events);
        loop {
            // A panic must end this stream, not the task of its connection.
            let event = match AssertUnwindSafe(events.next()).catch_unwind().await {
                Ok(event) => event,
                Err(panic) => Some(Err(observe::bug(panic.as_ref()))),
            };
            match event {
                Some(Ok(event)) => yield Ok::<_, Infallible>(event),
                Some(Err(error)) => {
                    observe::fail(&record, &error);
                    for event in render_error(&error) {
                        yield Ok(event);
                    }
                    break;
                }
                None => break,
            }
        }
    };
    (headers, Sse::new(events).keep_alive(keep_alive)).into_response()
}

/// The last event of OpenAI's streams.
pub(super) fn done() -> Event {
    Event::default().data("[DONE]")
}

/// An event with the value as JSON.
pub(super) fn event(value: &impl Serialize) -> Event {
    Event::default().data(json(value))
}

/// An event with the value as JSON, whose name is the value's type. INVARIANT: `type` is the value's first field.
pub(super) fn typed_event(value: &impl Serialize) -> Event {
    let json = json(value);
    let name = json.strip_prefix("{\"type\":\"").and_then(|rest| rest.split('"').next());
    Event::default().event(name.unwrap_or_default()).data(&json)
}

fn json(value: &impl Serialize) -> String {
    // Serializing our own types cannot fail: map keys are strings, and NaN becomes null.
    serde_json::to_string(value).unwrap_or_else(|_| "null".to_owned())
}
