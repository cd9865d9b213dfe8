//! `/invocations`, SageMaker's only route: the shape of the body decides which request it is.

#![expect(unused_qualifications, reason = "utoipa writes `self::` before names")]

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde_json::Value;
use utoipa::openapi::schema::AnyOfBuilder;
use utoipa::openapi::{Ref, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::dialect::{ExactJson, INVOCATIONS, OpenAiError, TgiError, TgiJson, check_fields};
use super::document::{self, EitherFailures};
use super::service::Service;
use super::{chat, completion, generate};
use crate::api::known_field::KnownFields;
use crate::api::openai::{ChatRequest, CompletionRequest};
use crate::api::request_body::RequestBody;
use crate::api::tgi::GenerateRequest;
use crate::config::SamplingDefaults;
use crate::telemetry::RequestRecord;

/// A generate, chat or completion request.
#[derive(ToSchema)]
#[serde(untagged)]
enum Invocation {
    Generate(Box<GenerateRequest>),
    Chat(Box<ChatRequest>),
    Completion(Box<CompletionRequest>),
}

/// The answer of the route that the body selects.
struct Answer;

/// An event of the route that the body selects.
struct Event;

impl PartialSchema for Answer {
    fn schema() -> RefOr<Schema> {
        let generated = Ref::from_schema_name("GenerateResponse").to_array_builder();
        let others = document::any_of(&["ChatCompletion", "Completion"]);
        AnyOfBuilder::new().item(generated).item(others).into()
    }
}

impl PartialSchema for Event {
    fn schema() -> RefOr<Schema> {
        document::any_of(&["StreamResponse", "ChatCompletionChunk", "CompletionChunk"])
    }
}

impl ToSchema for Answer {}
impl ToSchema for Event {}

/// Generate, chat or complete: the shape of the body decides which.
#[utoipa::path(
    post,
    path = INVOCATIONS,
    tag = "Clouds",
    request_body = Invocation,
    responses(
        (
            status = 200,
            description = "The answer of `/`, `/v1/chat/completions` or `/v1/completions`.",
            content((inline(Answer) = "application/json"), (inline(Event) = "text/event-stream"))
        ),
        EitherFailures
    )
)]
pub(super) async fn invocations(
    state: State<Service>,
    record: Extension<RequestRecord>,
    ExactJson(body): ExactJson,
) -> Response {
    let invocation = Invocation::read(&body);
    if let Ok(invocation) = &invocation
        && let Err(error) = check_fields(invocation.known_fields(), &body, Some(&record), &state)
    {
        return match invocation {
            Invocation::Generate(_) => TgiError(error).into_response(),
            Invocation::Chat(_) | Invocation::Completion(_) => OpenAiError::from(error).into_response(),
        };
    }
    match invocation {
        Ok(Invocation::Generate(request)) => generate::compat(state, record, TgiJson(*request)).await.into_response(),
        Ok(Invocation::Chat(request)) => {
            Box::pin(chat::answer(state.0, record.0, *request, &SamplingDefaults::NONE)).await.into_response()
        }
        Ok(Invocation::Completion(request)) => {
            Box::pin(completion::answer(state.0, record.0, *request, &SamplingDefaults::NONE)).await.into_response()
        }
        Err(message) => (StatusCode::UNPROCESSABLE_ENTITY, message).into_response(),
    }
}

impl Invocation {
    fn known_fields(&self) -> &'static KnownFields {
        match self {
            Self::Generate(_) => GenerateRequest::known_fields(),
            Self::Chat(_) => ChatRequest::known_fields(),
            Self::Completion(_) => CompletionRequest::known_fields(),
        }
    }

    /// COMPAT: as in TGI, the first shape that fits wins: generate, then chat, then completion.
    fn read(body: &Value) -> Result<Self, String> {
        let not_generate = match GenerateRequest::deserialize(body) {
            Ok(request) => return Ok(Self::Generate(Box::new(request))),
            Err(error) => error,
        };
        let not_chat = match ChatRequest::deserialize(body) {
            Ok(request) => return Ok(Self::Chat(Box::new(request))),
            Err(error) => error,
        };
        let not_completion = match CompletionRequest::deserialize(body) {
            Ok(request) => return Ok(Self::Completion(Box::new(request))),
            Err(error) => error,
        };
        let reasons = [("inputs", not_generate), ("messages", not_chat), ("prompt", not_completion)];
        Err(match reasons.iter().find(|(field, _)| body.get(field).is_some()) {
            Some((field, error)) => format!("a request with `{field}` cannot be read: {error}"),
            None => "send `inputs` to generate, `messages` to chat or `prompt` to complete; the body has none of them"
                .to_owned(),
        })
    }
}
