//! `/v1/chat/completions`.

mod choice;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;

use super::dialect::{OpenAiError, OpenAiJson};
use super::document::OpenAiFailures;
use super::envelope;
use super::openai_answer::OpenAiAnswer;
use super::service::Service;
use crate::api::openai::{ChatChunk, ChatCompletion, ChatRequest};
use crate::telemetry::RequestRecord;
use choice::{ChatReader, ChatSum};

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
    let call_ids = generations.prompts.first().and_then(|prompt| prompt.tool_call_ids);
    let readers = (0..generations.len()).map(|index| ChatReader::new(index, logprobs_of.clone(), call_ids)).collect();
    let answer = OpenAiAnswer { service, record, envelope, generations, readers, with_usage, hides_generated: false };
    if streams {
        return Ok(answer.stream());
    }
    let render = |envelope, sums: Vec<(_, ChatSum)>, usage| {
        let choices = sums.into_iter().enumerate().map(|(index, (_, sum))| sum.into_choice(index)).collect();
        ChatCompletion { envelope, choices, usage }
    };
    answer.plain(render).await
}
