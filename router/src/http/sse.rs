//! Event streams: `data: ` and one line of JSON for each event, and a comment after every 15 s without an event.

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

/// An item of a stream.
pub(super) enum Frame {
    Data(Event),
    /// The last item of a stream that failed.
    Error(ApiError),
}

impl Frame {
    pub(super) fn json(value: &impl Serialize) -> Self {
        Self::Data(json_event(value))
    }

    /// The last event of OpenAI's streams.
    pub(super) fn done() -> Self {
        Self::Data(Event::default().data("[DONE]"))
    }
}

/// Renders an error as a stream's last events.
pub(super) type RenderError = fn(&ApiError) -> Vec<Event>;

pub(super) fn tgi_error(error: &ApiError) -> Vec<Event> {
    vec![json_event(&error.tgi_body())]
}

pub(super) fn openai_error(error: &ApiError) -> Vec<Event> {
    vec![json_event(&error.openai_event()), Event::default().data("[DONE]")]
}

/// An event stream of `frames`. Dropping the response drops `frames`, and so aborts their generations.
pub(super) fn response(
    headers: HeaderMap,
    record: RequestRecord,
    render_error: RenderError,
    frames: impl Stream<Item = Frame> + Send + 'static,
) -> Response {
    let events = async_stream::stream! {
        let mut frames = std::pin::pin!(frames);
        loop {
            // A panic must end this stream, not the task of its connection.
            let frame = match AssertUnwindSafe(frames.next()).catch_unwind().await {
                Ok(frame) => frame,
                Err(panic) => Some(Frame::Error(observe::bug(panic.as_ref()))),
            };
            match frame {
                Some(Frame::Data(event)) => yield Ok::<_, Infallible>(event),
                Some(Frame::Error(error)) => {
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
    (headers, Sse::new(events).keep_alive(KeepAlive::default())).into_response()
}

fn json_event(value: &impl Serialize) -> Event {
    // Serializing our own types cannot fail: map keys are strings, and NaN becomes null.
    Event::default().json_data(value).unwrap_or_else(|_| Event::default().data("null"))
}
