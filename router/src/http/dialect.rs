//! How each dialect reads requests and writes errors.

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::api::error::{ApiError, COMPLETION_NAMES, RESPONSE_NAMES};
use crate::api::exact;
use crate::generation::FieldNames;

/// SageMaker's route, whose bodies decide the dialect.
pub(super) const INVOCATIONS: &str = "/invocations";

/// The route of TGI and of vLLM, whose bodies decide the dialect.
pub(super) const TOKENIZE: &str = "/tokenize";
/// vLLM's route.
pub(super) const DETOKENIZE: &str = "/detokenize";

/// How a route writes errors.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    Tgi,
    OpenAi,
    Anthropic,
    /// Either, as the body decides.
    Either,
}

impl Dialect {
    pub(super) fn of(path: &str) -> Self {
        let is_in = |folder| path.strip_prefix(folder).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
        if path == INVOCATIONS || path == TOKENIZE {
            Self::Either
        } else if is_in("/v1/messages") {
            Self::Anthropic
        } else if is_in("/v1") || path == DETOKENIZE {
            Self::OpenAi
        } else {
            Self::Tgi
        }
    }

    /// COMPAT: TGI refuses a key, and a route that does not exist, without a body.
    pub(super) fn refuses_with_body(self) -> bool {
        matches!(self, Self::OpenAi | Self::Anthropic)
    }
}

/// An error as TGI writes it.
#[derive(Debug)]
pub(super) struct TgiError(pub(super) ApiError);

/// An error as OpenAI writes it.
#[derive(Debug)]
pub(super) struct OpenAiError {
    error: ApiError,
    names: FieldNames,
}

impl OpenAiError {
    /// An error of a request with these names.
    pub(super) fn named(error: impl Into<ApiError>, names: FieldNames) -> Self {
        Self { error: error.into(), names }
    }

    /// An error of a response, whose prompt is its input.
    pub(super) fn of_response(error: impl Into<ApiError>) -> Self {
        Self { error: error.into(), names: RESPONSE_NAMES }
    }
}

/// An error as Anthropic writes it.
#[derive(Debug)]
pub(super) struct AnthropicError(pub(super) ApiError);

impl<E: Into<ApiError>> From<E> for TgiError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl<E: Into<ApiError>> From<E> for OpenAiError {
    fn from(error: E) -> Self {
        Self { error: error.into(), names: COMPLETION_NAMES }
    }
}

impl<E: Into<ApiError>> From<E> for AnthropicError {
    fn from(error: E) -> Self {
        Self(error.into())
    }
}

impl IntoResponse for TgiError {
    fn into_response(self) -> Response {
        render(self.0.tgi_status(), self.0.tgi_body(), self.0)
    }
}

impl IntoResponse for OpenAiError {
    fn into_response(self) -> Response {
        render(self.error.openai_status(), self.error.openai_body(self.names), self.error)
    }
}

impl IntoResponse for AnthropicError {
    fn into_response(self) -> Response {
        render(self.0.openai_status(), self.0.anthropic_body(), self.0)
    }
}

/// The error in the dialect of the route with this path.
pub(super) fn error_response(path: &str, error: ApiError) -> Response {
    match Dialect::of(path) {
        Dialect::OpenAi => OpenAiError::from(error).into_response(),
        Dialect::Anthropic => AnthropicError(error).into_response(),
        Dialect::Tgi | Dialect::Either => TgiError(error).into_response(),
    }
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

/// `axum::Json` whose rejections are Anthropic's error objects.
pub(super) struct AnthropicJson<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for OpenAiJson<T> {
    type Rejection = OpenAiError;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        Ok(Self(read(request, state).await?))
    }
}

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for AnthropicJson<T> {
    type Rejection = AnthropicError;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        Ok(Self(read(request, state).await?))
    }
}

/// `axum::Json` that refuses numbers in schemas that the parser would change.
pub(super) struct ExactJson<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for ExactJson<T> {
    type Rejection = Response;

    async fn from_request(request: Request, state: &S) -> Result<Self, Self::Rejection> {
        let (request, problem) = scanned(request, state).await.map_err(IntoResponse::into_response)?;
        if let Some(message) = problem {
            let status = StatusCode::UNPROCESSABLE_ENTITY;
            return Err(TgiError(ApiError::Malformed { status, message, param: None }).into_response());
        }
        let Json(value) = Json::from_request(request, state).await.map_err(IntoResponse::into_response)?;
        Ok(Self(value))
    }
}

/// The request, with its body in memory, and a number in its schemas that the parser would change.
async fn scanned<S: Send + Sync>(request: Request, state: &S) -> Result<(Request, Option<String>), BytesRejection> {
    let (parts, body) = request.into_parts();
    let body = Bytes::from_request(Request::from_parts(parts.clone(), body), state).await?;
    let problem = exact::check(&body).err().map(|problem| format!("a schema of the request: {problem}"));
    Ok((Request::from_parts(parts, Body::from(body)), problem))
}

/// The request's body as JSON.
async fn read<S: Send + Sync, T: DeserializeOwned>(request: Request, state: &S) -> Result<T, ApiError> {
    let malformed = |status, message| ApiError::Malformed { status, message, param: None };
    let scanned = scanned(request, state).await;
    let (request, problem) = scanned.map_err(|rejection| malformed(rejection.status(), rejection.body_text()))?;
    if let Some(problem) = problem {
        return Err(malformed(StatusCode::BAD_REQUEST, problem));
    }
    match Json::from_request(request, state).await {
        Ok(Json(value)) => Ok(value),
        Err(rejection) => {
            let status = match rejection.status() {
                StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
                status => status,
            };
            let message = rejection.body_text();
            let param = invalid_field(&message).map(str::to_owned);
            Err(ApiError::Malformed { status, message, param })
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
