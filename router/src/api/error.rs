//! The closed set of errors that a client can see: the status and type of each, rendered once per dialect.

use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use super::responses::ResponseError;
use crate::generation::{Bound, FieldNames, GenerationError, MIN_RETRY_AFTER_S, Refusal, ValidationError};
use crate::telemetry::metrics::{Failure, RefusalReason};
use crate::text::TemplateError;

#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error(transparent)]
    Generation(#[from] GenerationError),
    /// A stream that ended before its generation did.
    // COMPAT: TGI has an `error_type` of its own for it.
    #[error("Incomplete generation")]
    IncompleteStream,
    #[error("unhealthy")]
    Unhealthy,
    #[error("suffix is not supported: the model completes text at its end only")]
    Suffix,
    #[error("{given} prompts were given, at most {max} are allowed in one request; raise --max-client-batch-size")]
    BatchSize { given: usize, max: usize },
    /// The body is not the route's request (OpenAI's routes; on TGI's axum's extractor answers).
    #[error("{message}")]
    Malformed { status: StatusCode, message: String, param: Option<String> },
    #[error("{0}")]
    NotFound(String),
    /// The route exists, but not for this method.
    #[error("{0}")]
    Method(String),
    #[error("the model `{given}` is not served here, but: {served}")]
    UnknownModel { given: String, served: String },
    /// The request continues a conversation of Anthropic's threads.
    #[error(
        "`thread.previous_message_id`: the conversation of `{previous_message_id}` is not stored, because this server stores \
         none; send all of its `messages`"
    )]
    Thread { previous_message_id: String },
    /// The response that the request continues is not stored.
    #[error("{0}")]
    PreviousResponse(String),
    /// The API key is missing or wrong.
    #[error("{0}")]
    Unauthorized(&'static str),
    /// A bug of ours; the log has the details under this id.
    #[error("internal error {0}")]
    Internal(String),
}

impl From<ValidationError> for ApiError {
    fn from(error: ValidationError) -> Self {
        Self::Generation(error.into())
    }
}

pub(crate) const CHAT_NAMES: FieldNames =
    FieldNames { prompt: "messages", max_tokens: "max_tokens", stop: "stop", grammar: "response_format" };
pub(crate) const COMPLETION_NAMES: FieldNames = FieldNames { prompt: "prompt", ..CHAT_NAMES };
pub(crate) const EMBEDDING_NAMES: FieldNames = FieldNames { prompt: "input", ..CHAT_NAMES };
pub(crate) const RERANK_NAMES: FieldNames = FieldNames { prompt: "documents", ..CHAT_NAMES };
pub(crate) const RESPONSE_NAMES: FieldNames =
    FieldNames { prompt: "input", max_tokens: "max_output_tokens", stop: "stop", grammar: "text.format" };
const ANTHROPIC_NAMES: FieldNames = FieldNames {
    prompt: "messages",
    max_tokens: "max_tokens",
    stop: "stop_sequences",
    grammar: "output_config.format",
};

/// TGI's error object, in answers and as the last event of a stream.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error, example = json!({"error": "Input validation error: `temperature` must be strictly positive", "error_type": "validation"}))]
pub(crate) struct TgiErrorBody {
    /// For people: what was given, and what is allowed.
    pub(crate) error: String,
    /// For programs: `validation`, `overloaded`, `generation`, `timeout`, …
    pub(crate) error_type: &'static str,
}

/// Anthropic's error object, in answers and as the last event of a stream.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AnthropicError, example = json!({"type": "error", "error": {"type": "rate_limit_error", "message": "Model is overloaded"}}))]
pub(crate) struct AnthropicErrorBody {
    /// Always `error`.
    #[serde(rename = "type")]
    kind: &'static str,
    error: AnthropicErrorFields,
}

#[derive(Debug, Serialize, ToSchema)]
struct AnthropicErrorFields {
    /// For programs: `invalid_request_error`, `rate_limit_error`, `api_error`, …
    #[serde(rename = "type")]
    kind: &'static str,
    /// For people: what was given, and what is allowed.
    message: String,
    /// For programs, where a client can do something about the error.
    #[serde(skip_serializing_if = "Option::is_none")]
    details: Option<AnthropicErrorDetails>,
}

#[derive(Debug, Serialize, ToSchema)]
struct AnthropicErrorDetails {
    /// `thread_not_found`: the client sends the whole conversation.
    error_code: &'static str,
}

/// OpenAI's error object, in answers and as an event of a stream.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = OpenAiError, example = json!({"error": {"message": "Model is overloaded", "type": "rate_limit_error", "param": null, "code": "overloaded"}}))]
pub(crate) struct OpenAiErrorBody {
    error: OpenAiErrorFields,
}

#[derive(Debug, Serialize, ToSchema)]
struct OpenAiErrorFields {
    /// For people: what was given, and what is allowed.
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    /// The invalid field, if a single field is invalid.
    param: Option<String>,
    /// For programs: `context_length_exceeded`, or the same as TGI's `error_type`.
    code: &'static str,
    /// The status that a plain answer would have. Only in events.
    // COMPAT: TGI's events have it.
    #[serde(skip_serializing_if = "Option::is_none")]
    http_status_code: Option<u16>,
}

impl ApiError {
    /// Stable names for programs: TGI's `error_type`, OpenAI's `code`.
    pub(crate) fn error_type(&self) -> &'static str {
        use GenerationError as E;
        match self {
            Self::Generation(E::Overloaded(_)) => "overloaded",
            Self::Generation(E::ShuttingDown) => "shutting_down",
            Self::Generation(E::Validation(_)) => "validation",
            Self::Generation(E::Template(_)) => "template_error",
            Self::Generation(E::Tool(_)) => "tool_error",
            Self::Generation(E::Failed(_) | E::Unservable(_)) => "generation",
            Self::Generation(E::Timeout) => "timeout",
            Self::Generation(E::Incomplete) => "incomplete_generation",
            Self::IncompleteStream => "incomplete_generation_stream",
            Self::Unhealthy => "healthcheck",
            Self::Suffix => "suffix not supported",
            Self::BatchSize { .. } => "batch size exceeded",
            Self::Malformed { .. } => "malformed_request",
            Self::NotFound(_) => "not_found",
            Self::Method(_) => "method_not_allowed",
            Self::UnknownModel { .. } => "model_not_found",
            Self::Thread { .. } => "thread_not_found",
            Self::PreviousResponse(_) => "previous_response_not_found",
            Self::Unauthorized(_) => "invalid_api_key",
            Self::Internal(_) => "internal",
        }
    }

    pub(crate) fn tgi_status(&self) -> StatusCode {
        use GenerationError as E;
        match self {
            Self::Generation(E::Overloaded(_)) => StatusCode::TOO_MANY_REQUESTS,
            Self::Generation(E::ShuttingDown) | Self::Unhealthy => StatusCode::SERVICE_UNAVAILABLE,
            Self::Generation(E::Template(TemplateError::Renderer(_))) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Generation(E::Validation(_) | E::Template(_) | E::Tool(_))
            | Self::Suffix
            | Self::BatchSize { .. }
            | Self::PreviousResponse(_) => StatusCode::UNPROCESSABLE_ENTITY,
            Self::Generation(E::Timeout) => StatusCode::GATEWAY_TIMEOUT,
            // COMPAT: TGI answers 424 to every failure during generation, also where the request causes it.
            Self::Generation(E::Failed(_) | E::Unservable(_)) => StatusCode::FAILED_DEPENDENCY,
            Self::Generation(E::Incomplete) | Self::IncompleteStream | Self::Internal(_) => {
                StatusCode::INTERNAL_SERVER_ERROR
            }
            Self::Malformed { status, .. } => *status,
            Self::NotFound(_) | Self::UnknownModel { .. } | Self::Thread { .. } => StatusCode::NOT_FOUND,
            Self::Method(_) => StatusCode::METHOD_NOT_ALLOWED,
            Self::Unauthorized(_) => StatusCode::UNAUTHORIZED,
        }
    }

    /// As OpenAI does: 400 for an invalid request, 5xx for a failure of the server.
    pub(crate) fn openai_status(&self) -> StatusCode {
        match self.tgi_status() {
            _ if matches!(self, Self::Generation(GenerationError::Unservable(_))) => StatusCode::BAD_REQUEST,
            StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
            StatusCode::FAILED_DEPENDENCY => StatusCode::INTERNAL_SERVER_ERROR,
            status => status,
        }
    }

    /// Seconds until a retry can succeed; `None` unless the server lacked capacity.
    pub(crate) fn retry_after_s(&self) -> Option<u64> {
        match self {
            Self::Generation(GenerationError::Overloaded(refusal)) => Some(refusal.retry_after_s),
            Self::Generation(GenerationError::ShuttingDown) => Some(MIN_RETRY_AFTER_S),
            _ => None,
        }
    }

    /// Why admission or the queue refused the request: the value of the metric's label `reason`.
    pub(crate) fn refusal(&self) -> Option<RefusalReason> {
        match self {
            Self::Generation(GenerationError::Overloaded(Refusal { bound, .. })) => Some(match bound {
                Bound::Requests => RefusalReason::Requests,
                Bound::QueuedTokens => RefusalReason::QueuedTokens,
                Bound::QueueTime => RefusalReason::QueueTimeout,
                Bound::Images => RefusalReason::Images,
            }),
            Self::Generation(GenerationError::ShuttingDown) => Some(RefusalReason::ShuttingDown),
            _ => None,
        }
    }

    /// The value of the metric's label `err`; `None` for a request that is not counted because it never got as far as
    /// asking for a generation.
    pub(crate) fn failure(&self) -> Option<Failure> {
        use GenerationError as E;
        match self {
            Self::Generation(E::Overloaded(_) | E::ShuttingDown) => Some(Failure::Overloaded),
            Self::Generation(E::Validation(_) | E::Tool(_))
            | Self::Suffix
            | Self::BatchSize { .. }
            | Self::PreviousResponse(_) => Some(Failure::Validation),
            Self::Generation(E::Template(_)) => Some(Failure::Template),
            Self::Generation(E::Failed(_) | E::Unservable(_) | E::Timeout) | Self::Internal(_) => {
                Some(Failure::Generation)
            }
            Self::Generation(E::Incomplete) | Self::IncompleteStream => Some(Failure::Incomplete),
            Self::Unhealthy
            | Self::Malformed { .. }
            | Self::NotFound(_)
            | Self::Method(_)
            | Self::UnknownModel { .. }
            | Self::Thread { .. }
            | Self::Unauthorized(_) => None,
        }
    }

    pub(crate) fn tgi_body(&self) -> TgiErrorBody {
        TgiErrorBody { error: self.to_string(), error_type: self.error_type() }
    }

    pub(crate) fn openai_body(&self, names: FieldNames) -> OpenAiErrorBody {
        let status = self.openai_status();
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::NOT_FOUND => "not_found_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let (message, param, code) = match self {
            Self::Generation(GenerationError::Validation(error)) => {
                let code = if error.exceeds_context() { "context_length_exceeded" } else { self.error_type() };
                (error.openai_message(names), error.openai_param(names).map(str::to_owned), code)
            }
            Self::Malformed { message, param, .. } => (message.clone(), param.clone(), self.error_type()),
            error => {
                let param = match error {
                    Self::Suffix => Some("suffix"),
                    Self::BatchSize { .. } => Some("prompt"),
                    Self::Generation(GenerationError::Tool(_)) => Some("tools"),
                    Self::PreviousResponse(_) => Some("previous_response_id"),
                    Self::UnknownModel { .. } => Some("model"),
                    _ => None,
                };
                (error.to_string(), param.map(str::to_owned), self.error_type())
            }
        };
        OpenAiErrorBody { error: OpenAiErrorFields { message, kind, param, code, http_status_code: None } }
    }

    /// The error of a failed response.
    pub(crate) fn response_error(&self) -> ResponseError {
        let OpenAiErrorFields { message, code, .. } = self.openai_body(RESPONSE_NAMES).error;
        let code = match self.openai_status() {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_exceeded",
            status if status.is_server_error() => "server_error",
            _ if code == "context_length_exceeded" => code,
            _ => "invalid_prompt",
        };
        ResponseError { code, message }
    }

    pub(crate) fn anthropic_body(&self) -> AnthropicErrorBody {
        let kind = match self.openai_status() {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "api_error",
            _ => "invalid_request_error",
        };
        let message = match self {
            // COMPAT: clients compact the conversation when they read these words.
            Self::Generation(GenerationError::Validation(ValidationError::InputTokens { max, given })) => {
                format!("prompt is too long: {given} tokens > {max} maximum")
            }
            Self::Generation(GenerationError::Validation(error)) => error.openai_message(ANTHROPIC_NAMES),
            error => error.to_string(),
        };
        let details = match self {
            // COMPAT: Anthropic's package sends the conversation again when it reads this code.
            Self::Thread { .. } => Some(AnthropicErrorDetails { error_code: self.error_type() }),
            _ => None,
        };
        AnthropicErrorBody { kind: "error", error: AnthropicErrorFields { kind, message, details } }
    }

    /// The body as an event of a stream.
    pub(crate) fn openai_event(&self) -> OpenAiErrorBody {
        let mut body = self.openai_body(COMPLETION_NAMES);
        body.error.http_status_code = Some(self.openai_status().as_u16());
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renderer_that_cannot_start_is_the_servers_fault() {
        let error = |error| ApiError::from(GenerationError::Template(error));
        let failed = error(TemplateError::Renderer("no memory".to_owned()));
        assert_eq!(failed.tgi_status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(failed.openai_status(), StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(error(TemplateError::TooSlow).tgi_status(), StatusCode::UNPROCESSABLE_ENTITY);
    }
}
