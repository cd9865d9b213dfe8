//! `/v1/chat/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::Stream;

use super::admission::Permit;
use super::dialect::{OpenAiError, OpenAiJson};
use super::envelope;
use super::header;
use super::running::{Prepared, Prompt, Running};
use super::service::Service;
use super::sse::{self, Frame};
use crate::api::error::ApiError;
use crate::api::openai::{
    ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, ChatLogprobs, ChatRequest, Delta, Envelope, OutputMessage,
    Usage,
};
use crate::telemetry::RequestRecord;
use crate::text::{ChatInputs, Step, StopText};

const ROLE: &str = "assistant";

pub(super) async fn chat_completions(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    OpenAiJson(request): OpenAiJson<ChatRequest>,
) -> Result<Response, OpenAiError> {
    record.generates();
    let object = if request.stream { "chat.completion.chunk" } else { "chat.completion" };
    // COMPAT: any model's name is welcome, and comes back; "tgi" means the one that is served.
    let model = request.model.as_ref().filter(|model| *model != "tgi").unwrap_or(&service.config().model_id).clone();
    let shape = Shape {
        envelope: envelope::new(object, "chatcmpl", model),
        with_logprobs: request.logprobs,
        with_usage: request.stream_options.include_usage,
    };
    let streams = request.stream;
    let (running, permit, num_characters) = start(&service, &record, request).await?;
    if streams {
        let headers = header::of_stream(&service, num_characters);
        let frames = frames(running, shape, record.clone());
        return Ok(sse::response(headers, permit, record, sse::openai_error, frames));
    }
    let finished = running.finish().await.map_err(OpenAiError)?;
    let summary = finished.summary();
    record.answered(summary);
    let choice = ChatChoice {
        index: 0,
        message: OutputMessage { role: ROLE, content: finished.text },
        logprobs: shape.with_logprobs.then(|| ChatLogprobs::of(finished.tokens)),
        finish_reason: finished.finish.ending.into(),
    };
    let usage = Usage::new(summary.num_prompt_tokens, summary.num_generated_tokens);
    let completion = ChatCompletion { envelope: shape.envelope, choices: [choice], usage };
    Ok((header::of_answer(&service, num_characters, &summary), Json(completion)).into_response())
}

/// What an answer must show.
struct Shape {
    envelope: Envelope,
    with_logprobs: bool,
    with_usage: bool,
}

/// Whatever can be refused is refused here, before a stream starts. Also returns the rendered prompt's characters.
async fn start(
    service: &Service,
    record: &RequestRecord,
    mut request: ChatRequest,
) -> Result<(Running, Permit, usize), ApiError> {
    let permit = service.admission().admit(1)?;
    let checked = request.parameters()?.check(&service.config().limits)?;
    let inputs = ChatInputs { messages: request.template_messages()?, ..ChatInputs::default() };
    let text: Arc<str> = service.text().render_chat(inputs)?.into();
    let num_characters = text.chars().count();
    let prepared = Prepared::new(service, Prompt::Rendered(text), checked, StopText::Cut).await?;
    Ok((prepared.start(service, record, 0), permit, num_characters))
}

/// One chunk for each token.
fn frames(mut running: Running, shape: Shape, record: RequestRecord) -> impl Stream<Item = Frame> + Send {
    async_stream::stream! {
        let mut role = Some(ROLE);
        loop {
            let step = match running.next().await {
                Ok(step) => step,
                Err(error) => {
                    yield Frame::Error(error.into());
                    return;
                }
            };
            let finish = step.finish;
            let usage = finish.map(|finish| {
                let summary = running.summary(&finish);
                record.answered(summary);
                Usage::new(summary.num_prompt_tokens, summary.num_generated_tokens)
            });
            let choices = vec![shape.choice(step, role.take())];
            yield Frame::json(&ChatChunk { envelope: &shape.envelope, choices, usage: None });
            if usage.is_some() {
                if shape.with_usage {
                    yield Frame::json(&ChatChunk { envelope: &shape.envelope, choices: Vec::new(), usage });
                }
                yield Frame::done();
                return;
            }
        }
    }
}

impl Shape {
    fn choice(&self, step: Step, role: Option<&'static str>) -> ChatChunkChoice {
        ChatChunkChoice {
            index: 0,
            delta: Delta { role, content: step.text },
            logprobs: self.with_logprobs.then(|| ChatLogprobs::of([step.token])),
            finish_reason: step.finish.map(|finish| finish.ending.into()),
        }
    }
}
