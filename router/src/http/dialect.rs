//! How each dialect reads requests and writes errors.

use axum::Json;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::error::ApiError;

/// SageMaker's route, whose bodies decide the dialect.
pub(super) const INVOCATIONS: &str = "/invocations";

/// How a route writes errors.
#[derive(Clone, Copy)]
pub(super) enum Dialect {
    Tgi,
    OpenAi,
    /// Either, as the body decides.
    Either,
}

impl Dialect {
    pub(super) fn of(path: &str) -> Self {
        if path == INVOCATIONS {
            Self::Either
        } else if is_openai(path) {
            Self::OpenAi
        } else {
            Self::Tgi
        }
    }
}

/// Whether the route with this path speaks OpenAI's dialect.
pub(super) fn is_openai(path: &str) -> bool {
    path == "/v1" || path.starts_with("/v1/")
}

/// An error as TGI writes it.
#[derive(Debug)]
pub(super) struct TgiError(pub(super) ApiError);

/// An error as OpenAI writes it.
#[derive(Debug)]
pub(super) struct OpenAiError {
    error: ApiError,
    /// The request's field for the prompt.
    prompt_field: &'static str,
}

impl OpenAiError {
    /// An error of a chat, whose prompt is its messages.
    pub(super) fn of_chat(error: impl Into<ApiError>) -> Self {
        Self { error: error.into(), prompt_field: "messages" }
    }
}

impl<E: Into<ApiError>> From<E> for TgiError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl<E: Into<ApiError>> From<E> for OpenAiError {
    fn from(error: E) -> Self {
        Self { error: error.into(), prompt_field: "prompt" }
    }
}

impl IntoResponse for TgiError {
    fn into_response(self) -> Response {
        render(self.0.tgi_status(), self.0.tgi_body(), self.0)
    }
}

impl IntoResponse for OpenAiError {
    fn into_response(self) -> Response {
        render(self.error.openai_status(), self.error.openai_body(self.prompt_field), self.error)
    }
}

/// The error in the dialect of the route with this path.
pub(super) fn error_response(path: &str, error: ApiError) -> Response {
    if is_openai(path) { OpenAiError::from(error).into_response() } else { TgiError(error).into_response() }
}

/// Attaches the error to its response, for the one place that logs and counts it (`observe`).
pub(super) fn render(status: StatusCode, body: impl Serialize, error: ApiError) -> Response {
    let mut response = (status, Json(body)).into_response();
    if let Some(seconds) = error.retry_after_s() {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response.extensions_mut().insert(error);
    response
}

/// `axum::Json` whose rejections are OpenAI's error objects.
pub(super) struct OpenAiJson<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for OpenAiJson<T> {
    type Rejection = OpenAiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        match Json::from_request(request, state).await {
            Ok(Json(value)) => Ok(Self(value)),
            Err(rejection) => {
                let status = match rejection.status() {
                    StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
                    status => status,
                };
                let message = rejection.body_text();
                let param = invalid_field(&message).map(str::to_owned);
                Err(ApiError::Malformed { status, message, param }.into())
            }
        }
    }
}

/// The top-level field that a rejection of `axum::Json` is about: it names the path, or the missing field.
fn invalid_field(message: &str) -> Option<&str> {
    let (_, error) = message.split_once("into the target type: ")?;
    if let Some(missing) = error.strip_prefix("missing field `") {
        return missing.split('`').next();
    }
    let end = error.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))?;
    let (field, rest) = error.split_at(end);
    (!field.is_empty() && rest.starts_with([':', '.', '['])).then_some(field)
}
