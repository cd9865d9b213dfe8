//! Event streams: `data: ` and one line of JSON for each event, a comment every 15 s of silence.

use std::convert::Infallible;
use std::panic::AssertUnwindSafe;

use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::{FutureExt, Stream, StreamExt};
use serde::Serialize;

use super::admission::Permit;
use super::observe;
use crate::api::error::ApiError;
use crate::telemetry::RequestRecord;

/// What a stream yields.
pub(super) enum Frame {
    Data(Event),
    /// The last one of a stream that could not go on.
    Error(ApiError),
}

impl Frame {
    pub(super) fn json(value: &impl Serialize) -> Self {
        Self::Data(json_event(value))
    }

    /// How OpenAI's streams end.
    pub(super) fn done() -> Self {
        Self::Data(Event::default().data("[DONE]"))
    }
}

/// How a stream writes an error.
pub(super) type RenderError = fn(&ApiError) -> Vec<Event>;

pub(super) fn tgi_error(error: &ApiError) -> Vec<Event> {
    vec![json_event(&error.tgi_body())]
}

pub(super) fn openai_error(error: &ApiError) -> Vec<Event> {
    vec![json_event(&error.openai_event()), Event::default().data("[DONE]")]
}

/// Holds the permit until the stream ends or the client leaves.
pub(super) fn response(
    headers: HeaderMap,
    permit: Permit,
    record: RequestRecord,
    render_error: RenderError,
    frames: impl Stream<Item = Frame> + Send + 'static,
) -> Response {
    let events = async_stream::stream! {
        let _permit = permit;
        let mut frames = std::pin::pin!(frames);
        loop {
            // A bug in here must end this stream, not the connection's task.
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
    // Our own types: no map keys that are not strings, and floats that are not numbers become null.
    Event::default().json_data(value).unwrap_or_else(|_| Event::default().data("null"))
}
