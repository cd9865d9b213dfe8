//! `/v1/responses`.

mod writer;

use axum::Extension;
use axum::extract::State;
use axum::response::Response as HttpResponse;

use super::dialect::{OpenAiError, OpenAiJson};
use super::document::OpenAiFailures;
use super::message_answer::MessageAnswer;
use super::response_store::ResponseStore;
use super::service::Service;
use crate::api::conversation::Conversation;
use crate::api::error::ApiError;
use crate::api::responses::{ReadRequest, Response, ResponsesRequest, StreamEvent};
use crate::telemetry::RequestRecord;
use writer::ResponseWriter;

/// Answer a conversation of items.
#[utoipa::path(
    post,
    path = "/v1/responses",
    tag = "OpenAI",
    request_body = ResponsesRequest,
    responses(
        (
            status = 200,
            description = "The response; with `stream` as a stream of events that ends with `response.completed`, `response.incomplete` or `response.failed`.",
            content((Response = "application/json"), (StreamEvent = "text/event-stream"))
        ),
        OpenAiFailures
    )
)]
pub(super) async fn responses(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    OpenAiJson(request): OpenAiJson<ResponsesRequest>,
) -> Result<HttpResponse, OpenAiError> {
    record.generates();
    let streams = request.stream;
    let model = service.model_name(Some(&request.model))?;
    let adapter_id = service.adapter_named(Some(&request.model));
    let earlier = request.previous_response_id.as_deref().map(|id| earlier(service.responses(), id)).transpose()?;
    let request = request.read(earlier, service.responses().is_on(), &service.config().sampling_defaults);
    let request = request.map_err(OpenAiError::of_response)?;
    let ReadRequest { mut generation, echo, conversation, namespaces } = request;
    generation.parameters.adapter_id = adapter_id;
    let generations = service.generation().start(generation, &record).await;
    let generations = generations.map_err(OpenAiError::of_response)?;
    let call_ids = generations.prompts.first().and_then(|prompt| prompt.tool_call_ids);
    let stored = conversation.map(|conversation| (service.responses().clone(), conversation));
    let writer = ResponseWriter::new(model, echo, call_ids, namespaces, stored);
    let answer = MessageAnswer { service, record, generations, writer };
    if streams { Ok(answer.stream()) } else { answer.plain().await.map_err(OpenAiError::of_response) }
}

/// The conversation that ends with this response.
fn earlier(store: &ResponseStore, id: &str) -> Result<Conversation, OpenAiError> {
    store.get(id).ok_or_else(|| {
        let message = if store.is_on() {
            format!("previous response `{id}` was not found: it was not stored, or newer ones have replaced it")
        } else {
            "`previous_response_id` is not supported, because this server stores no responses: send the whole \
             conversation as `input`, or run the server with --max-stored-responses"
                .to_owned()
        };
        OpenAiError::of_response(ApiError::PreviousResponse(message))
    })
}
