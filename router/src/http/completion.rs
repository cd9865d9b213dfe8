//! `/v1/completions`: some generations for each prompt, side by side.
//!
//! INVARIANT: a whole answer is the sum of the chunks that a stream would have had.

mod choice;
mod start;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::{Stream, StreamExt};

use super::dialect::{OpenAiError, OpenAiJson};
use super::document::OpenAiFailures;
use super::envelope;
use super::header;
use super::running;
use super::service::Service;
use super::side_by_side::{self, Cost, IndexedStep};
use super::sse::{self, Frame};
use crate::api::error::ApiError;
use crate::api::openai::{Completion, CompletionChunk, CompletionRequest, Envelope, Usage};
use crate::telemetry::{RequestRecord, RequestSummary};
use choice::{ChoiceReader, ChoiceSum};
use start::Started;

/// Go on from one or several prompts.
#[utoipa::path(
    post,
    path = "/v1/completions",
    tag = "OpenAI",
    request_body = CompletionRequest,
    responses(
        (
            status = 200,
            description = "The answer; with `stream` in chunks, of which the last event, `[DONE]`, is none.",
            content((Completion = "application/json"), (CompletionChunk = "text/event-stream"))
        ),
        OpenAiFailures
    )
)]
pub(super) async fn completions(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    OpenAiJson(request): OpenAiJson<CompletionRequest>,
) -> Result<Response, OpenAiError> {
    record.generates();
    let envelope = envelope::new("text_completion", "cmpl", service.config().model_id.clone());
    let (streams, with_usage) = (request.stream, request.stream_options.include_usage);
    let started = start::start(&service, &record, request).await?;
    let Started { mut running, readers, num_per_prompt, num_choices, hides_generated, permit, num_characters } =
        started;
    if streams {
        running::started(&service, &mut running).await?;
    }
    let steps = side_by_side::steps(running);
    let mut tally = Tally { cost: Cost::new(num_per_prompt), hides_generated };
    if streams {
        let headers = header::of_stream(&service, num_characters);
        let frames = frames(steps, readers, envelope, with_usage, tally, record.clone());
        return Ok(sse::response(headers, permit, record, sse::openai_error, frames));
    }
    let mut steps = std::pin::pin!(steps);
    let mut sums: Vec<_> = readers.into_iter().map(|reader| (reader, ChoiceSum::default())).collect();
    while let Some(step) = steps.next().await {
        let step = step?;
        let index = step.index;
        tally.add(&step);
        if let Some((reader, sum)) = sums.get_mut(index) {
            sum.add(step.step.token.logprob, reader.read(step.step, step.prompt_tokens));
        }
    }
    let (usage, summary) = tally.total();
    record.answered(summary);
    let sums = sums.into_iter().map(|(_, sum)| sum).collect();
    let choices = choice::best(sums, num_per_prompt, num_choices);
    let headers = header::of_answer(&service, num_characters, &summary);
    Ok((headers, Json(Completion { envelope, choices, usage })).into_response())
}

/// What the request costs, and what of it is told.
struct Tally {
    cost: Cost,
    hides_generated: bool,
}

impl Tally {
    fn add(&mut self, step: &IndexedStep) {
        step.summary.into_iter().for_each(|summary| self.cost.add(step.index, summary));
    }

    fn usage(&self, summary: &RequestSummary) -> Usage {
        let num_generated_tokens = if self.hides_generated { 0 } else { summary.num_generated_tokens };
        Usage::new(summary.num_prompt_tokens, summary.num_cached_tokens, num_generated_tokens)
    }

    fn total(&self) -> (Usage, RequestSummary) {
        let summary = self.cost.total();
        (self.usage(&summary), summary)
    }
}

/// One chunk for each token of each choice, as they come.
fn frames(
    steps: impl Stream<Item = Result<IndexedStep, ApiError>> + Send,
    mut readers: Vec<ChoiceReader>,
    envelope: Envelope,
    with_usage: bool,
    mut tally: Tally,
    record: RequestRecord,
) -> impl Stream<Item = Frame> + Send {
    async_stream::stream! {
        let mut steps = std::pin::pin!(steps);
        while let Some(step) = steps.next().await {
            let step = match step {
                Ok(step) => step,
                Err(error) => {
                    yield Frame::Error(error);
                    return;
                }
            };
            tally.add(&step);
            let usage = step.summary.filter(|_| !with_usage).map(|summary| tally.usage(&summary));
            let Some(reader) = readers.get_mut(step.index) else { continue };
            let choices = vec![reader.read(step.step, step.prompt_tokens)];
            yield Frame::json(&CompletionChunk { envelope: &envelope, choices, usage });
        }
        let (usage, summary) = tally.total();
        record.answered(summary);
        if with_usage {
            yield Frame::json(&CompletionChunk { envelope: &envelope, choices: Vec::new(), usage: Some(usage) });
        }
        yield Frame::done();
    }
}
