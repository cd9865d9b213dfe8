//! `/v1/completions`: several generations of each prompt, side by side.
//!
//! INVARIANT: a plain answer is the sum of the chunks that a stream would have had.

mod choice;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::{Stream, StreamExt};

use super::dialect::{OpenAiError, OpenAiJson};
use super::document::OpenAiFailures;
use super::envelope;
use super::header;
use super::logprob::CompletionLogprobWriter;
use super::service::Service;
use super::sse::{self, Frame};
use crate::api::openai::{Completion, CompletionChunk, CompletionRequest, Envelope, Usage};
use crate::generation::{GenerationDelta, GenerationError};
use crate::telemetry::{RequestRecord, RequestSummary};
use choice::{ChoiceReader, ChoiceSum, Echo};

/// Continue one or several prompts.
#[utoipa::path(
    post,
    path = "/v1/completions",
    tag = "OpenAI",
    request_body = CompletionRequest,
    responses(
        (
            status = 200,
            description = "The answer; with `stream` as a stream of chunks that ends with the event `[DONE]`.",
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
    let model = service.generation().text();
    let envelope = envelope::new("text_completion", "cmpl", service.config().model_id.clone());
    let (streams, with_usage) =
        (request.stream, request.stream_options.as_ref().is_some_and(|options| options.include_usage));
    let (echoes, with_logprobs) = (request.echo, request.logprobs.is_some());
    let hides_generated = request.hides_generated();
    let (request, num_choices) = request.into_generation(service.config())?;
    let generations = service.generation().start(request, record.received()).await?;
    let num_characters = generations.num_prompt_characters();
    let num_per_prompt = generations.num_per_prompt;
    let mut readers = Vec::with_capacity(generations.len());
    for prompt in &generations.prompts {
        let echo = echoes.then(|| Echo::new(model, prompt.text.clone(), &prompt.token_ids, with_logprobs));
        for _ in 0..num_per_prompt {
            let logprobs = with_logprobs.then(|| CompletionLogprobWriter::new(model.clone()));
            readers.push(ChoiceReader::new(readers.len(), echo.clone(), logprobs, hides_generated));
        }
    }
    if streams {
        let headers = header::of_stream(&service, num_characters);
        let usage = move |summary: &RequestSummary| usage(summary, hides_generated);
        let frames = frames(generations.deltas(), readers, envelope, with_usage, usage, record.clone());
        return Ok(sse::response(headers, record, sse::openai_error, frames));
    }
    let mut deltas = std::pin::pin!(generations.deltas());
    let mut sums: Vec<_> = readers.iter().map(|_| ChoiceSum::default()).collect();
    let mut total = None;
    while let Some(delta) = deltas.next().await {
        let delta = delta?;
        total = delta.total;
        let (index, logprob) = (delta.index, delta.delta.token.logprob);
        sums[index].add(logprob, readers[index].read(delta));
    }
    let summary = total.unwrap_or_default();
    record.answered(summary);
    let choices = choice::best(sums, num_per_prompt, num_choices);
    let headers = header::of_answer(&service, num_characters, &summary);
    Ok((headers, Json(Completion { envelope, choices, usage: usage(&summary, hides_generated) })).into_response())
}

/// The usage as reported to the client: a hidden token is not counted.
fn usage(summary: &RequestSummary, hides_generated: bool) -> Usage {
    let num_generated_tokens = if hides_generated { 0 } else { summary.num_generated_tokens };
    Usage::from(&RequestSummary { num_generated_tokens, ..*summary })
}

/// The chunks of all choices as they arrive, one for each token.
fn frames(
    deltas: impl Stream<Item = Result<GenerationDelta, GenerationError>> + Send,
    mut readers: Vec<ChoiceReader>,
    envelope: Envelope,
    with_usage: bool,
    usage: impl Fn(&RequestSummary) -> Usage + Send,
    record: RequestRecord,
) -> impl Stream<Item = Frame> + Send {
    async_stream::stream! {
        let mut total = None;
        let mut deltas = std::pin::pin!(deltas);
        while let Some(delta) = deltas.next().await {
            let delta = match delta {
                Ok(delta) => delta,
                Err(error) => {
                    yield Frame::Error(error.into());
                    return;
                }
            };
            total = delta.total;
            let choices = vec![readers[delta.index].read(delta)];
            yield Frame::json(&CompletionChunk { envelope: &envelope, choices, usage: with_usage.then_some(None) });
        }
        let summary = total.unwrap_or_default();
        record.answered(summary);
        if with_usage {
            let usage = Some(Some(usage(&summary)));
            yield Frame::json(&CompletionChunk { envelope: &envelope, choices: Vec::new(), usage });
        }
        yield Frame::done();
    }
}
