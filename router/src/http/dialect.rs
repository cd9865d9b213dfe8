//! How each dialect reads requests and writes errors.

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde::{Deserializer, Serialize};
use serde_json::Value;

use super::service::Service;
use crate::api::error::{ApiError, COMPLETION_NAMES, RESPONSE_NAMES};
use crate::api::exact;
use crate::api::known_field::KnownFields;
use crate::api::request_body::RequestBody;
use crate::api::unknown_field::{UnknownFields, unknown_fields};
use crate::generation::{FieldNames, ValidationError};
use crate::telemetry::{RequestRecord, Warnings};

/// SageMaker's route, whose bodies decide the dialect.
pub(super) const INVOCATIONS: &str = "/invocations";

/// The route of TGI and of vLLM, whose bodies decide the dialect.
pub(super) const TOKENIZE: &str = "/tokenize";
/// vLLM's route.
pub(super) const DETOKENIZE: &str = "/detokenize";

/// UTF-8's byte order mark, which some editors and libraries write.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
/// Longer messages about bodies lose their middle, which is a path into nested lists.
const MAX_MESSAGE_CHARACTERS: usize = 400;

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

    /// COMPAT: TGI refuses a key without a body.
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

/// `axum::Json` on TGI's routes, whose rejections are text. Like the extractors of the other dialects, it names the fields that a request
/// does not have.
pub(super) struct TgiJson<T>(pub(super) T);

/// `axum::Json` whose rejections are OpenAI's error objects.
pub(super) struct OpenAiJson<T>(pub(super) T);

/// `axum::Json` whose rejections are Anthropic's error objects.
pub(super) struct AnthropicJson<T>(pub(super) T);

impl<T: RequestBody> FromRequest<Service> for TgiJson<T> {
    type Rejection = Response;

    async fn from_request(request: Request, service: &Service) -> Result<Self, Self::Rejection> {
        match read(request, service).await {
            Ok(value) => Ok(Self(value)),
            Err(unread) => Err(unread.into_tgi_response()),
        }
    }
}

impl<T: RequestBody> FromRequest<Service> for OpenAiJson<T> {
    type Rejection = OpenAiError;

    async fn from_request(request: Request, service: &Service) -> Result<Self, Self::Rejection> {
        Ok(Self(read(request, service).await.map_err(ApiError::from)?))
    }
}

impl<T: RequestBody> FromRequest<Service> for AnthropicJson<T> {
    type Rejection = AnthropicError;

    async fn from_request(request: Request, service: &Service) -> Result<Self, Self::Rejection> {
        Ok(Self(read(request, service).await.map_err(ApiError::from)?))
    }
}

/// Why a body is not a request.
enum Unread {
    Json(JsonRejection),
    /// The parser would change a number of a schema.
    Number(String),
    /// A field is not known, and the server is strict; or a list is in the place of an object.
    Field(ApiError),
}

impl Unread {
    /// The answer of TGI's routes, where rejections of bodies are text.
    fn into_tgi_response(self) -> Response {
        match self {
            Self::Json(rejection) => (rejection.status(), text(&rejection)).into_response(),
            Self::Number(message) => {
                let status = StatusCode::UNPROCESSABLE_ENTITY;
                TgiError(ApiError::Malformed { status, message, param: None }).into_response()
            }
            Self::Field(error) => TgiError(error).into_response(),
        }
    }
}

impl From<Unread> for ApiError {
    fn from(unread: Unread) -> Self {
        let rejection = match unread {
            Unread::Json(rejection) => rejection,
            Unread::Number(message) => {
                return Self::Malformed { status: StatusCode::BAD_REQUEST, message, param: None };
            }
            Unread::Field(error) => return error,
        };
        let status = match rejection.status() {
            StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
            status => status,
        };
        let message = text(&rejection);
        let param = invalid_field(&message).map(str::to_owned);
        Self::Malformed { status, message, param }
    }
}

/// `axum::Json` of any JSON, on a route of several dialects, with its numbers as they are.
pub(super) struct ExactJson(pub(super) Value);

impl FromRequest<Service> for ExactJson {
    type Rejection = Response;

    async fn from_request(request: Request, service: &Service) -> Result<Self, Self::Rejection> {
        match parsed(request, service).await {
            Ok((value, _)) => Ok(Self(value)),
            Err(unread) => Err(unread.into_tgi_response()),
        }
    }
}

/// The request's body as JSON, without numbers in its schemas that the parser would change.
async fn parsed<T: DeserializeOwned>(request: Request, service: &Service) -> Result<(T, Bytes), Unread> {
    let (parts, body) = request.into_parts();
    let bytes = Bytes::from_request(Request::from_parts(parts.clone(), body), service).await;
    let bytes = bytes.map_err(|rejection| Unread::Json(rejection.into()))?;
    // RFC 8259 lets a parser ignore it.
    let bytes = if bytes.starts_with(BYTE_ORDER_MARK) { bytes.slice(BYTE_ORDER_MARK.len()..) } else { bytes };
    exact::check(&bytes).map_err(|problem| Unread::Number(format!("a schema of the request: {problem}")))?;
    let request = Request::from_parts(parts, Body::from(bytes.clone()));
    let Json(value) = Json::from_request(request, service).await.map_err(Unread::Json)?;
    Ok((value, bytes))
}

/// The request's body as a request of its dialect, whose fields are known.
async fn read<T: RequestBody>(request: Request, service: &Service) -> Result<T, Unread> {
    let record = request.extensions().get::<RequestRecord>().cloned();
    let (value, bytes) = parsed(request, service).await?;
    let json = &mut serde_json::Deserializer::from_slice(&bytes);
    check_fields(T::known_fields(), json, record.as_ref(), service).map_err(Unread::Field)?;
    Ok(value)
}

/// Refuses a list in the place of an object, which serde would read as the values of its fields. Refuses fields that a request
/// does not have, if the server is strict; else warns of them.
pub(super) fn check_fields<'de, D: Deserializer<'de>>(
    known: &KnownFields,
    json: D,
    record: Option<&RequestRecord>,
    service: &Service,
) -> Result<(), ApiError> {
    let UnknownFields { unknown, num_more, misplaced_list } = unknown_fields(known, json);
    if let Some(place) = misplaced_list {
        let path = if place.is_empty() { "body".to_owned() } else { place };
        return Err(ValidationError::Item { path, problem: "is a list, must be an object".to_owned() }.into());
    }
    let Some(first) = unknown.first() else { return Ok(()) };
    let mut messages: Vec<_> = unknown.iter().map(ToString::to_string).collect();
    messages.extend((num_more > 0).then(|| format!("{num_more} more unknown fields")));
    if service.config().strict_requests {
        let (path, message) = (first.path.as_str().into(), messages.join("; ").into());
        return Err(ValidationError::UnknownField { path, message }.into());
    }
    if let Some(record) = record {
        let mut warnings = Warnings::default();
        messages.iter().for_each(|message| warnings.push(message));
        record.warn(warnings);
    }
    Ok(())
}

/// What a rejection says, without the names of our types, and with both ends of a long path.
fn text(rejection: &JsonRejection) -> String {
    let message = rejection.body_text();
    let words: Vec<_> = message.split(' ').collect();
    let mut plain = Vec::new();
    let mut position = 0;
    while let Some(&word) = words.get(position) {
        plain.push(word);
        position += 1;
        let rest = &words[position..];
        let num_words = match (word, rest) {
            ("expected", ["struct", _, ..]) => 2,
            ("expected", ["internally", "tagged", "enum", _, ..]) => 4,
            _ => continue,
        };
        plain.push("an object");
        position += num_words;
    }
    let plain = plain.join(" ");
    let (num_characters, end) = (plain.chars().count(), MAX_MESSAGE_CHARACTERS / 2);
    if num_characters <= MAX_MESSAGE_CHARACTERS {
        return plain;
    }
    let (first, last) = (plain.chars().take(end), plain.chars().skip(num_characters - end));
    format!("{}…{}", first.collect::<String>(), last.collect::<String>())
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
