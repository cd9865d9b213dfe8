//! The answers of OpenAI's generation routes: chunks as they arrive, or their sum.
//!
//! INVARIANT: a plain answer is the sum of the chunks that a stream would have had.

use axum::Json;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde::Serialize;

use super::dialect::OpenAiError;
use super::header;
use super::message_answer::ReasoningCount;
use super::service::Service;
use super::sse::{self, Event};
use crate::api::openai::{Envelope, StreamOptions, Usage};
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
    /// Says which events of a stream have a usage.
    pub(super) stream_options: StreamOptions,
    /// Whether the usage leaves out the generated tokens.
    pub(super) hides_generated: bool,
}

impl<R: ChoiceReader> OpenAiAnswer<R> {
    /// A stream with an event for each chunk.
    pub(super) fn stream(self) -> Response {
        let Self { service, record, envelope, mut generations, mut readers, stream_options, hides_generated } = self;
        let StreamOptions { include_usage, continuous_usage_stats, .. } = stream_options;
        let headers = header::of_stream(&service, generations.num_prompt_characters());
        let stream_record = record.clone();
        let events = async_stream::try_stream! {
            let mut meter = UsageMeter::new(&generations, hides_generated);
            if continuous_usage_stats {
                meter.so_far.num_cached_tokens = generations.started_prompts().await?;
            }
            let mut total = None;
            let mut deltas = std::pin::pin!(generations.deltas());
            while let Some(delta) = deltas.next().await {
                let delta = delta?;
                total = delta.total;
                meter.add(&delta);
                let usage = continuous_usage_stats.then(|| meter.usage(&meter.so_far));
                for chunk in readers[delta.index].read(*delta) {
                    yield R::event(&envelope, vec![chunk], (include_usage || usage.is_some()).then_some(usage));
                }
            }
            let summary = total.unwrap_or_default();
            record.answered(summary);
            if include_usage {
                yield R::event(&envelope, Vec::new(), Some(Some(meter.usage(&summary))));
            }
            yield sse::done();
        };
        sse::response(headers, stream_record, sse::comment(), sse::openai_error, events)
    }

    /// One answer. `render` gets the envelope, the readers with the sums of their chunks, and the usage.
    pub(super) async fn plain<A: Serialize>(
        self,
        render: impl FnOnce(Envelope, Vec<(R, R::Sum)>, Usage) -> A,
    ) -> Result<Response, OpenAiError> {
        let num_characters = self.generations.num_prompt_characters();
        let mut choices: Vec<_> = self.readers.into_iter().map(|reader| (reader, R::Sum::default())).collect();
        let mut meter = UsageMeter::new(&self.generations, self.hides_generated);
        let mut total = None;
        let mut deltas = std::pin::pin!(self.generations.deltas());
        while let Some(delta) = deltas.next().await {
            let delta = delta?;
            total = delta.total;
            meter.add(&delta);
            let (reader, sum) = &mut choices[delta.index];
            reader.read(*delta).into_iter().for_each(|chunk| R::add(sum, chunk));
        }
        let summary = total.unwrap_or_default();
        self.record.answered(summary);
        let headers = header::of_answer(&self.service, num_characters, &summary);
        let answer = render(self.envelope, choices, meter.usage(&summary));
        Ok((headers, Json(answer)).into_response())
    }
}

/// Counts what the client is told about.
struct UsageMeter {
    so_far: RequestSummary,
    /// By generation.
    reasoning: Vec<ReasoningCount>,
    hides_generated: bool,
}

impl UsageMeter {
    fn new(generations: &Generations, hides_generated: bool) -> Self {
        let num_prompt_tokens = generations.prompts.iter().map(|prompt| prompt.token_ids.len()).sum();
        let so_far = RequestSummary { num_prompt_tokens, ..RequestSummary::default() };
        let reasoning = (0..generations.len()).map(|_| ReasoningCount::default()).collect();
        Self { so_far, reasoning, hides_generated }
    }

    fn add(&mut self, delta: &GenerationDelta) {
        self.so_far.num_generated_tokens += 1;
        self.reasoning[delta.index].add(delta);
    }

    /// Hidden tokens are not counted.
    fn usage(&self, summary: &RequestSummary) -> Usage {
        let num_generated_tokens = if self.hides_generated { 0 } else { summary.num_generated_tokens };
        let num_reasoning_tokens = self.reasoning.iter().map(|count| count.num_tokens).sum();
        Usage::new(&RequestSummary { num_generated_tokens, ..*summary }, num_reasoning_tokens)
    }
}
