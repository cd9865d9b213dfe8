//! `/v1/responses`, and the routes of stored responses.

mod truncation;
mod writer;

use std::sync::Arc;

use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::Response as HttpResponse;
use axum::{Extension, Json};
use futures::StreamExt;
use serde_json::Value;

use super::dialect::{OpenAiError, OpenAiJson};
use super::document::{OpenAiAdmissionFailures, OpenAiFailures, StoredFailures};
use super::envelope;
use super::key_hash::KeyHash;
use super::logprob::TokenNames;
use super::message_answer::{MessageAnswer, ReasoningCount};
use super::response_store::{ResponseStore, StoredResponse};
use super::service::Service;
use crate::api::conversation::Conversation;
use crate::api::error::ApiError;
use crate::api::responses::{
    Compaction, DeletedResponse, InputTokens, ItemList, ItemPage, ReadRequest, Response, ResponsesRequest, Retrieval,
    StreamEvent, Usage, compaction_item,
};
use crate::generation::Prompt;
use crate::telemetry::RequestRecord;
use crate::text::Part;
use writer::{LogprobWriter, ResponseSlot, ResponseWriter};

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
    owner: KeyHash,
    OpenAiJson(request): OpenAiJson<ResponsesRequest>,
) -> Result<HttpResponse, OpenAiError> {
    record.generates();
    let streams = request.stream;
    let model = service.model_name(Some(&request.model))?;
    let adapter_id = service.adapter_named(Some(&request.model));
    let store = service.responses();
    let (earlier, mut input) = earlier(store, owner, request.previous_response_id.as_deref())?;
    let defaults = &service.config().sampling_defaults;
    let request = request.read(earlier, store.is_on(), defaults, |id| store.item(owner, id));
    let request = request.map_err(OpenAiError::of_response)?;
    let ReadRequest { mut generation, echo, conversation, called, input: new, shows_logprobs, truncates } = request;
    input.extend(new);
    generation.parameters.adapter_id = adapter_id;
    if truncates {
        truncation::fit(&service, &mut generation).await.map_err(OpenAiError::of_response)?;
    }
    let generations = service.generation().start(generation, &record).await;
    let generations = generations.map_err(OpenAiError::of_response)?;
    let call_ids = generations.prompts.first().and_then(|prompt| prompt.tool_call_ids);
    let place = conversation.map(|conversation| ResponseSlot { store: store.clone(), owner, input, conversation });
    let names = || TokenNames { text_model: service.generation().text().clone(), are_ids: false };
    let logprobs = shows_logprobs.then(|| LogprobWriter::new(names()));
    let writer = ResponseWriter::new(model, echo, call_ids, called, logprobs, place);
    let answer = MessageAnswer { service, record, generations, writer };
    if streams { Ok(answer.stream()) } else { answer.plain().await.map_err(OpenAiError::of_response) }
}

/// Count the tokens of a response's prompt.
#[utoipa::path(
    post,
    path = "/v1/responses/input_tokens",
    tag = "OpenAI",
    request_body = ResponsesRequest,
    responses((status = 200, description = "The number of tokens.", body = InputTokens), OpenAiAdmissionFailures)
)]
pub(super) async fn input_tokens(
    State(service): State<Service>,
    owner: KeyHash,
    OpenAiJson(request): OpenAiJson<ResponsesRequest>,
) -> Result<Json<InputTokens>, OpenAiError> {
    service.model_name(Some(&request.model))?;
    let store = service.responses();
    let (earlier, _) = earlier(store, owner, request.previous_response_id.as_deref())?;
    let defaults = &service.config().sampling_defaults;
    let request = request.read(earlier, false, defaults, |id| store.item(owner, id));
    let request = request.map_err(OpenAiError::of_response)?;
    let mut input_tokens = 0;
    for prompt in request.generation.prompts {
        if let Prompt::Chat(chat) = prompt {
            let tokenized = service.generation().tokenize_chat(*chat, false).await;
            input_tokens += tokenized.map_err(OpenAiError::of_response)?.spans.len();
        }
    }
    Ok(Json(InputTokens { object: "response.input_tokens", input_tokens }))
}

/// Summarize a conversation, so that the summary can stand in its place.
#[utoipa::path(
    post,
    path = "/v1/responses/compact",
    tag = "OpenAI",
    request_body = ResponsesRequest,
    responses((status = 200, description = "The items that stand for the conversation.", body = Compaction), OpenAiFailures)
)]
pub(super) async fn compact(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    owner: KeyHash,
    OpenAiJson(request): OpenAiJson<ResponsesRequest>,
) -> Result<Json<Compaction>, OpenAiError> {
    record.generates();
    service.model_name(Some(&request.model))?;
    let adapter_id = service.adapter_named(Some(&request.model));
    let store = service.responses();
    let (earlier, input) = earlier(store, owner, request.previous_response_id.as_deref())?;
    let read = request.read_for_summary(earlier, |id| store.item(owner, id));
    let (mut generation, kept) = read.map_err(OpenAiError::of_response)?;
    generation.parameters.adapter_id = adapter_id;
    let generations = service.generation().start(generation, &record).await;
    let generations = generations.map_err(OpenAiError::of_response)?;
    let (mut summary, mut reasoning, mut total) = (String::new(), ReasoningCount::default(), None);
    let mut deltas = std::pin::pin!(generations.deltas());
    while let Some(delta) = deltas.next().await {
        let delta = delta.map_err(OpenAiError::of_response)?;
        reasoning.add(&delta);
        total = delta.total;
        for part in delta.parts {
            if let Part::Content(text) = part {
                summary += &text;
            }
        }
    }
    let total = total.unwrap_or_default();
    record.answered(total);
    let is_user = |item: &Value| item["role"] == "user";
    let mut output: Vec<_> = input.into_iter().filter(is_user).chain(kept).collect();
    output.push(compaction_item(summary.trim()));
    Ok(Json(Compaction {
        id: writer::new_id("resp"),
        object: "response.compaction",
        created_at: envelope::unix_seconds(),
        output,
        usage: Usage::new(&total, reasoning.num_tokens),
    }))
}

/// Get a stored response.
#[utoipa::path(
    get,
    path = "/v1/responses/{id}",
    tag = "OpenAI",
    params(("id" = String, Path, description = "The response's id."), Retrieval),
    responses((status = 200, description = "The response.", body = Response), StoredFailures)
)]
pub(super) async fn response(
    State(service): State<Service>,
    owner: KeyHash,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<Retrieval>, QueryRejection>,
) -> Result<Json<Response>, OpenAiError> {
    let Path(id) = id.map_err(invalid_id)?;
    let stored = stored(service.responses(), owner, &id)?;
    let Query(Retrieval { stream }) = query.map_err(|rejection| invalid("stream", rejection.body_text()))?;
    if stream == Some(true) {
        return Err(invalid("stream", "`stream` is not supported: a stored response is complete".to_owned()));
    }
    Ok(Json(stored.response.clone()))
}

/// Delete a stored response.
#[utoipa::path(
    delete,
    path = "/v1/responses/{id}",
    tag = "OpenAI",
    params(("id" = String, Path, description = "The response's id.")),
    responses((status = 200, description = "It is deleted.", body = DeletedResponse), StoredFailures)
)]
pub(super) async fn delete(
    State(service): State<Service>,
    owner: KeyHash,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<DeletedResponse>, OpenAiError> {
    let Path(id) = id.map_err(invalid_id)?;
    if !service.responses().remove(owner, &id) {
        return Err(not_stored(service.responses(), &id));
    }
    Ok(Json(DeletedResponse { id, object: "response", deleted: true }))
}

/// List the items that a stored response answers, those of the responses that it continues included.
#[utoipa::path(
    get,
    path = "/v1/responses/{id}/input_items",
    tag = "OpenAI",
    params(("id" = String, Path, description = "The response's id."), ItemPage),
    responses((status = 200, description = "A page of the items.", body = ItemList), StoredFailures)
)]
pub(super) async fn input_items(
    State(service): State<Service>,
    owner: KeyHash,
    id: Result<Path<String>, PathRejection>,
    query: Result<Query<ItemPage>, QueryRejection>,
) -> Result<Json<ItemList>, OpenAiError> {
    let Path(id) = id.map_err(invalid_id)?;
    let stored = stored(service.responses(), owner, &id)?;
    let Query(page) = query.map_err(|rejection| invalid("limit", rejection.body_text()))?;
    page.of(stored.input.clone()).map(Json).map_err(|(field, problem)| invalid(field, problem))
}

/// Refuse to cancel a response: none is generated in the background.
#[utoipa::path(
    post,
    path = "/v1/responses/{id}/cancel",
    tag = "OpenAI",
    params(("id" = String, Path, description = "The response's id.")),
    responses(StoredFailures)
)]
pub(super) async fn cancel(
    State(service): State<Service>,
    owner: KeyHash,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Response>, OpenAiError> {
    let Path(id) = id.map_err(invalid_id)?;
    stored(service.responses(), owner, &id)?;
    let why = "only responses with `background` true can be cancelled, and this server generates none; close the \
               connection to end a response that is being generated";
    Err(invalid("id", why.to_owned()))
}

/// The conversation that ends with the response that a request continues, and its items.
fn earlier(
    store: &ResponseStore,
    owner: KeyHash,
    id: Option<&str>,
) -> Result<(Option<Conversation>, Vec<Value>), OpenAiError> {
    let Some(id) = id else { return Ok((None, Vec::new())) };
    let stored = store.get(owner, id).ok_or_else(|| {
        let message = if store.is_on() {
            format!("previous response `{id}` was not found: it was not stored, or newer ones have replaced it")
        } else {
            "`previous_response_id` is not supported, because this server stores no responses: send the whole \
             conversation as `input`, or run the server with --max-stored-responses"
                .to_owned()
        };
        OpenAiError::of_response(ApiError::PreviousResponse(message))
    })?;
    Ok((Some(stored.conversation.clone()), stored.items()))
}

fn stored(store: &ResponseStore, owner: KeyHash, id: &str) -> Result<Arc<StoredResponse>, OpenAiError> {
    store.get(owner, id).ok_or_else(|| not_stored(store, id))
}

fn not_stored(store: &ResponseStore, id: &str) -> OpenAiError {
    let why = if store.is_on() {
        "it was not stored for this API key, or newer ones have replaced it"
    } else {
        "this server stores no responses; run it with --max-stored-responses"
    };
    ApiError::NotFound(format!("response `{id}` was not found: {why}")).into()
}

/// An id that is no text.
fn invalid_id(rejection: PathRejection) -> OpenAiError {
    invalid("id", rejection.body_text())
}

/// A parameter of the query that is not valid.
fn invalid(field: &str, message: String) -> OpenAiError {
    ApiError::Malformed { status: StatusCode::BAD_REQUEST, message, param: Some(field.to_owned()) }.into()
}
