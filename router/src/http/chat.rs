//! `/v1/chat/completions`.
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
use super::service::Service;
use super::sse::{self, Frame};
use crate::api::openai::{ChatChunk, ChatCompletion, ChatRequest, Envelope, Usage};
use crate::generation::{GenerationDelta, GenerationError};
use crate::telemetry::RequestRecord;
use choice::{ChoiceReader, ChoiceSum};

/// Answer a conversation.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    tag = "OpenAI",
    request_body = ChatRequest,
    responses(
        (
            status = 200,
            description = "The answer; with `stream` as a stream of chunks that ends with the event `[DONE]`.",
            content((ChatCompletion = "application/json"), (ChatChunk = "text/event-stream"))
        ),
        OpenAiFailures
    )
)]
pub(super) async fn chat_completions(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    OpenAiJson(request): OpenAiJson<ChatRequest>,
) -> Result<Response, OpenAiError> {
    record.generates();
    let (streams, with_usage) =
        (request.stream, request.stream_options.as_ref().is_some_and(|options| options.include_usage));
    let object = if streams { "chat.completion.chunk" } else { "chat.completion" };
    // COMPAT: any model name is accepted and echoed; "tgi" means the served model.
    let model = request.model.as_ref().filter(|model| *model != "tgi").unwrap_or(&service.config().model_id).clone();
    let envelope = envelope::new(object, "chatcmpl", model);
    let logprobs_of = request.logprobs.then(|| service.generation().text().clone());
    let generations = service.generation().start(request.into_generation()?, record.received()).await;
    let generations = generations.map_err(OpenAiError::of_chat)?;
    let num_characters = generations.num_prompt_characters();
    let call_ids = generations.prompts.first().and_then(|prompt| prompt.tool_call_ids);
    let mut readers: Vec<_> =
        (0..generations.len()).map(|index| ChoiceReader::new(index, logprobs_of.clone(), call_ids)).collect();
    if streams {
        let headers = header::of_stream(&service, num_characters);
        let frames = frames(generations.deltas(), readers, envelope, with_usage, record.clone());
        return Ok(sse::response(headers, record, sse::openai_error, frames));
    }
    let mut deltas = std::pin::pin!(generations.deltas());
    let mut sums: Vec<_> = readers.iter().map(|_| ChoiceSum::default()).collect();
    let mut total = None;
    while let Some(delta) = deltas.next().await {
        let delta = delta?;
        total = delta.total;
        let index = delta.index;
        readers[index].read(delta).into_iter().for_each(|chunk| sums[index].add(chunk));
    }
    let summary = total.unwrap_or_default();
    record.answered(summary);
    let choices = sums.into_iter().enumerate().map(|(index, sum)| sum.into_choice(index)).collect();
    let headers = header::of_answer(&service, num_characters, &summary);
    Ok((headers, Json(ChatCompletion { envelope, choices, usage: Usage::from(&summary) })).into_response())
}

/// The chunks of all choices as they arrive: at least one for each token, unless the parser holds its text back.
fn frames(
    deltas: impl Stream<Item = Result<GenerationDelta, GenerationError>> + Send,
    mut readers: Vec<ChoiceReader>,
    envelope: Envelope,
    with_usage: bool,
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
            for choice in readers[delta.index].read(delta) {
                yield Frame::json(&ChatChunk { envelope: &envelope, choices: vec![choice], usage: None });
            }
        }
        let summary = total.unwrap_or_default();
        record.answered(summary);
        if with_usage {
            let usage = Some(Usage::from(&summary));
            yield Frame::json(&ChatChunk { envelope: &envelope, choices: Vec::new(), usage });
        }
        yield Frame::done();
    }
}
