//! `/v1/chat/completions`.
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
use super::side_by_side::{self, Cost};
use super::sse::{self, Frame};
use crate::api::error::ApiError;
use crate::api::openai::{ChatChunk, ChatCompletion, ChatRequest, Envelope, Usage};
use crate::telemetry::RequestRecord;
use choice::{ChoiceReader, ChoiceSum};

pub(super) use start::{Started, render, start};

/// Answer a conversation.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    tag = "OpenAI",
    request_body = ChatRequest,
    responses(
        (
            status = 200,
            description = "The answer; with `stream` in chunks, of which the last event, `[DONE]`, is none.",
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
    let (streams, with_usage) = (request.stream, request.stream_options.include_usage);
    let object = if streams { "chat.completion.chunk" } else { "chat.completion" };
    // COMPAT: any model's name is welcome, and comes back; "tgi" means the one that is served.
    let model = request.model.as_ref().filter(|model| *model != "tgi").unwrap_or(&service.config().model_id).clone();
    let envelope = envelope::new(object, "chatcmpl", model);
    let Started { mut running, readers, permit, num_characters } = start(&service, &record, request).await?;
    if streams {
        running::started(&service, &mut running).await?;
    }
    let steps = side_by_side::steps(running);
    if streams {
        let headers = header::of_stream(&service, num_characters);
        let frames = frames(steps, readers, envelope, with_usage, record.clone());
        return Ok(sse::response(headers, permit, record, sse::openai_error, frames));
    }
    let mut steps = std::pin::pin!(steps);
    let mut choices: Vec<_> = readers.into_iter().map(|reader| (reader, ChoiceSum::default())).collect();
    let mut cost = Cost::new(choices.len());
    while let Some(step) = steps.next().await {
        let step = step?;
        if let Some((reader, sum)) = choices.get_mut(step.index) {
            reader.read(step.step).into_iter().for_each(|chunk| sum.add(chunk));
        }
        step.summary.into_iter().for_each(|summary| cost.add(step.index, summary));
    }
    let summary = cost.total();
    record.answered(summary);
    let choices = choices.into_iter().enumerate().map(|(index, (_, sum))| sum.into_choice(index)).collect();
    let headers = header::of_answer(&service, num_characters, &summary);
    Ok((headers, Json(ChatCompletion { envelope, choices, usage: Usage::from(&summary) })).into_response())
}

/// The chunks of all choices as they come; one at least for each token, unless it is held back.
fn frames(
    steps: impl Stream<Item = Result<side_by_side::IndexedStep, ApiError>> + Send,
    mut readers: Vec<ChoiceReader>,
    envelope: Envelope,
    with_usage: bool,
    record: RequestRecord,
) -> impl Stream<Item = Frame> + Send {
    async_stream::stream! {
        let mut cost = Cost::new(readers.len());
        let mut steps = std::pin::pin!(steps);
        while let Some(step) = steps.next().await {
            let step = match step {
                Ok(step) => step,
                Err(error) => {
                    yield Frame::Error(error);
                    return;
                }
            };
            step.summary.into_iter().for_each(|summary| cost.add(step.index, summary));
            let Some(reader) = readers.get_mut(step.index) else { continue };
            for choice in reader.read(step.step) {
                yield Frame::json(&ChatChunk { envelope: &envelope, choices: vec![choice], usage: None });
            }
        }
        let summary = cost.total();
        record.answered(summary);
        if with_usage {
            let usage = Some(Usage::from(&summary));
            yield Frame::json(&ChatChunk { envelope: &envelope, choices: Vec::new(), usage });
        }
        yield Frame::done();
    }
}
