//! `/invocations`, SageMaker's one route: the shape of a body says which of the others it is for.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::Value;

use super::dialect::OpenAiJson;
use super::service::Service;
use super::{chat, completion, generate};
use crate::api::openai::{ChatRequest, CompletionRequest};
use crate::api::tgi::GenerateRequest;
use crate::telemetry::RequestRecord;

/// COMPAT: the first of TGI's shapes that fits wins: a prompt, then a chat, then a completion.
pub(super) async fn invocations(
    state: State<Service>,
    record: Extension<RequestRecord>,
    Json(body): Json<Value>,
) -> Response {
    let not_generate = match GenerateRequest::deserialize(&body) {
        Ok(request) => return generate::compat(state, record, Json(request)).await.into_response(),
        Err(error) => error,
    };
    let not_chat = match ChatRequest::deserialize(&body) {
        Ok(request) => return chat::chat_completions(state, record, OpenAiJson(request)).await.into_response(),
        Err(error) => error,
    };
    let not_completion = match CompletionRequest::deserialize(&body) {
        Ok(request) => return completion::completions(state, record, OpenAiJson(request)).await.into_response(),
        Err(error) => error,
    };
    let reasons = [("inputs", not_generate), ("messages", not_chat), ("prompt", not_completion)];
    let reason = reasons.iter().find(|(field, _)| body.get(field).is_some());
    let message = match reason {
        Some((field, error)) => format!("a request with `{field}` cannot be read: {error}"),
        None => {
            "send `inputs` to generate, `messages` to chat or `prompt` to complete; there is none of them".to_owned()
        }
    };
    (StatusCode::UNPROCESSABLE_ENTITY, message).into_response()
}
