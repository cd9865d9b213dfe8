//! The answers of dialects in which a request has one answer and a stream consists of named events.
//!
//! INVARIANT: a plain answer is the sum of the events that a stream would have had.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::Json;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde::Serialize;

use super::header;
use super::service::Service;
use super::sse::{self, Event};
use crate::api::error::ApiError;
use crate::generation::{GenerationDelta, Generations};
use crate::telemetry::RequestRecord;

/// Writes one answer as events.
pub(super) trait EventWriter: Send + 'static {
    /// Serialized with a field `type`.
    type Event: Serialize + Send;
    type Answer: Default + Serialize;

    /// The first events. `num_cached_tokens`: prompt tokens found in the prefix cache.
    fn open(&mut self, num_cached_tokens: usize) -> Vec<Self::Event>;

    /// The events of the next delta.
    fn write(&mut self, delta: GenerationDelta) -> Vec<Self::Event>;

    /// The last events of a stream that breaks.
    fn fail(&mut self, error: &ApiError) -> Vec<Event>;

    /// What the stream sends after 15 s without an event.
    fn keep_alive() -> Event;

    fn add(answer: &mut Self::Answer, event: Self::Event);
}

/// Counts the generated tokens that are reasoning, without its markers.
#[derive(Default)]
pub(super) struct ReasoningCount {
    pub(super) num_tokens: usize,
}

impl ReasoningCount {
    pub(super) fn add(&mut self, delta: &GenerationDelta) {
        self.num_tokens += usize::from(delta.is_thought);
    }
}

/// A request whose generation runs.
pub(super) struct MessageAnswer<W> {
    pub(super) service: Service,
    pub(super) record: RequestRecord,
    pub(super) generations: Generations,
    pub(super) writer: W,
}

impl<W: EventWriter> MessageAnswer<W> {
    /// A stream of events.
    pub(super) fn stream(self) -> Response {
        let Self { service, record, mut generations, writer } = self;
        let headers = header::of_stream(&service, generations.num_prompt_characters());
        let stream_record = record.clone();
        let writer = Arc::new(Mutex::new(writer));
        let failing = Arc::clone(&writer);
        let events = async_stream::try_stream! {
            let num_cached_tokens = generations.started().await?.into_iter().sum();
            let first = lock(&writer).open(num_cached_tokens);
            for event in first {
                yield sse::typed_event(&event);
            }
            let mut deltas = std::pin::pin!(generations.deltas());
            while let Some(delta) = deltas.next().await {
                let delta = delta?;
                if let Some(summary) = delta.total {
                    record.answered(summary);
                }
                let events = lock(&writer).write(*delta);
                for event in events {
                    yield sse::typed_event(&event);
                }
            }
        };
        let fail = move |error: &ApiError| lock(&failing).fail(error);
        sse::response(headers, stream_record, W::keep_alive(), fail, events)
    }

    /// The whole answer.
    pub(super) async fn plain(self) -> Result<Response, ApiError> {
        let Self { service, record, mut generations, mut writer } = self;
        let num_characters = generations.num_prompt_characters();
        let mut answer = W::Answer::default();
        let num_cached_tokens = generations.started().await?.into_iter().sum();
        writer.open(num_cached_tokens).into_iter().for_each(|event| W::add(&mut answer, event));
        let mut total = None;
        let mut deltas = std::pin::pin!(generations.deltas());
        while let Some(delta) = deltas.next().await {
            let delta = delta?;
            total = delta.total;
            writer.write(*delta).into_iter().for_each(|event| W::add(&mut answer, event));
        }
        let summary = total.unwrap_or_default();
        record.answered(summary);
        Ok((header::of_answer(&service, num_characters, &summary), Json(answer)).into_response())
    }
}

/// The writer, also after a panic: its events so far were sent.
fn lock<W>(writer: &Mutex<W>) -> MutexGuard<'_, W> {
    writer.lock().unwrap_or_else(PoisonError::into_inner)
}
