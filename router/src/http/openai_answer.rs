//! The answers of OpenAI's generation routes: chunks as they arrive, or their sum.
//!
//! INVARIANT: a plain answer is the sum of the chunks that a stream would have had.

use axum::Json;
use axum::response::sse::{Event, KeepAlive};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde::Serialize;

use super::dialect::OpenAiError;
use super::header;
use super::service::Service;
use super::sse;
use crate::api::openai::{Envelope, Usage};
use crate::generation::{GenerationDelta, Generations};
use crate::telemetry::{RequestRecord, RequestSummary};

/// Turns the deltas of one choice into chunks.
pub(super) trait ChoiceReader: Send + 'static {
    /// The addition of one event to the choice.
    type Chunk: Send;
    /// The chunks of the choice, added up as clients do.
    type Sum: Default;

    /// The chunks of the choice's next delta.
    fn read(&mut self, delta: GenerationDelta) -> Vec<Self::Chunk>;

    fn add(sum: &mut Self::Sum, chunk: Self::Chunk);

    /// The event with these chunks. `usage` is `None` if the client did not ask for it, and `Some(None)` before the last event.
    fn event(envelope: &Envelope, choices: Vec<Self::Chunk>, usage: Option<Option<Usage>>) -> Event;
}

/// A request whose generations run.
pub(super) struct OpenAiAnswer<R> {
    pub(super) service: Service,
    pub(super) record: RequestRecord,
    pub(super) envelope: Envelope,
    pub(super) generations: Generations,
    /// One for each generation.
    pub(super) readers: Vec<R>,
    /// Whether a stream ends with the usage.
    pub(super) with_usage: bool,
    /// Whether the usage leaves out the generated tokens.
    pub(super) hides_generated: bool,
}

impl<R: ChoiceReader> OpenAiAnswer<R> {
    /// A stream with an event for each chunk.
    pub(super) fn stream(self) -> Response {
        let Self { service, record, envelope, generations, mut readers, with_usage, hides_generated } = self;
        let headers = header::of_stream(&service, generations.num_prompt_characters());
        let stream_record = record.clone();
        let events = async_stream::try_stream! {
            let mut total = None;
            let mut deltas = std::pin::pin!(generations.deltas());
            while let Some(delta) = deltas.next().await {
                let delta = delta?;
                total = delta.total;
                for chunk in readers[delta.index].read(delta) {
                    yield R::event(&envelope, vec![chunk], with_usage.then_some(None));
                }
            }
            let summary = total.unwrap_or_default();
            record.answered(summary);
            if with_usage {
                yield R::event(&envelope, Vec::new(), Some(Some(usage(&summary, hides_generated))));
            }
            yield sse::done();
        };
        sse::response(headers, stream_record, KeepAlive::default(), sse::openai_error, events)
    }

    /// One answer. `render` gets the envelope, the readers with the sums of their chunks, and the usage.
    pub(super) async fn plain<A: Serialize>(
        self,
        render: impl FnOnce(Envelope, Vec<(R, R::Sum)>, Usage) -> A,
    ) -> Result<Response, OpenAiError> {
        let num_characters = self.generations.num_prompt_characters();
        let mut choices: Vec<_> = self.readers.into_iter().map(|reader| (reader, R::Sum::default())).collect();
        let mut total = None;
        let mut deltas = std::pin::pin!(self.generations.deltas());
        while let Some(delta) = deltas.next().await {
            let delta = delta?;
            total = delta.total;
            let (reader, sum) = &mut choices[delta.index];
            reader.read(delta).into_iter().for_each(|chunk| R::add(sum, chunk));
        }
        let summary = total.unwrap_or_default();
        self.record.answered(summary);
        let headers = header::of_answer(&self.service, num_characters, &summary);
        let answer = render(self.envelope, choices, usage(&summary, self.hides_generated));
        Ok((headers, Json(answer)).into_response())
    }
}

/// The usage as reported to the client: hidden tokens are not counted.
fn usage(summary: &RequestSummary, hides_generated: bool) -> Usage {
    let num_generated_tokens = if hides_generated { 0 } else { summary.num_generated_tokens };
    Usage::from(&RequestSummary { num_generated_tokens, ..*summary })
}
