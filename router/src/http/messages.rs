//! `/v1/messages` and `/v1/messages/count_tokens`.

mod writer;

use axum::extract::State;
use axum::response::Response;
use axum::{Extension, Json};

use super::dialect::{AnthropicError, AnthropicJson};
use super::document::{AnthropicAdmissionFailures, AnthropicFailures};
use super::message_answer::MessageAnswer;
use super::service::Service;
use crate::api::anthropic::{CountTokensRequest, Message, MessageEvent, MessagesRequest, TokenCount};
use crate::api::error::ApiError;
use crate::telemetry::RequestRecord;
use writer::MessageWriter;

/// Answer a conversation.
#[utoipa::path(
    post,
    path = "/v1/messages",
    tag = "Anthropic",
    request_body = MessagesRequest,
    responses(
        (
            status = 200,
            description = "The answer; with `stream` as a stream of events that ends with `message_stop`.",
            content((Message = "application/json"), (MessageEvent = "text/event-stream"))
        ),
        AnthropicFailures
    )
)]
pub(super) async fn messages(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    AnthropicJson(request): AnthropicJson<MessagesRequest>,
) -> Result<Response, AnthropicError> {
    record.generates();
    let streams = request.stream;
    let model = service.model_name(Some(&request.conversation.model))?;
    check_whole(request.conversation.continued())?;
    let mut writer = MessageWriter::new(&request, model);
    let adapter_id = service.adapter_named(Some(&request.conversation.model));
    let mut request = request.into_generation(&service.config().sampling_defaults)?;
    request.parameters.adapter_id = adapter_id;
    let generations = service.generation().start(request, &record).await?;
    writer.read_prompt(&generations.prompts);
    let answer = MessageAnswer { service, record, generations, writer };
    if streams { Ok(answer.stream()) } else { Ok(answer.plain().await?) }
}

/// Count the tokens of a conversation's prompt.
#[utoipa::path(
    post,
    path = "/v1/messages/count_tokens",
    tag = "Anthropic",
    request_body = CountTokensRequest,
    responses((status = 200, description = "The number of tokens.", body = TokenCount), AnthropicAdmissionFailures)
)]
pub(super) async fn count_tokens(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    AnthropicJson(request): AnthropicJson<CountTokensRequest>,
) -> Result<Json<TokenCount>, AnthropicError> {
    service.model_name(Some(&request.conversation.model))?;
    check_whole(request.conversation.continued())?;
    let (chat, warnings) = request.into_chat()?;
    record.warn(warnings);
    let tokenized = service.generation().tokenize_chat(chat, false).await?;
    Ok(Json(TokenCount { input_tokens: tokenized.spans.len() }))
}

/// Refuses a conversation that continues a message without repeating what is before it.
fn check_whole(continued: Option<&str>) -> Result<(), ApiError> {
    continued.map_or(Ok(()), |id| Err(ApiError::Thread { previous_message_id: id.to_owned() }))
}
