//! The closed set of errors a client can see: status and type of each, rendered once per dialect.

use std::fmt;

use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use super::parameter::ValidationError;
use crate::sequence::{GrammarError, SequenceFailure};
use crate::telemetry::metrics::{Failure, RefusalReason};
use crate::text::{EncodeError, GenerationError, TemplateError};

#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("{0}")]
    Overloaded(Refusal),
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("Input validation error: {0}")]
    Validation(#[from] ValidationError),
    #[error("Template error: {0}")]
    Template(#[from] TemplateError),
    #[error("Tool error: {0}")]
    Tool(String),
    #[error("Request failed during generation: {0}")]
    Generation(String),
    /// Generation came to where the request itself leaves no way on, as a grammar can.
    // COMPAT: 424 on TGI's routes, as every failure during generation.
    #[error("Request failed during generation: {0}")]
    Unservable(String),
    /// The client's own `timeout`.
    #[error("the request's timeout is over")]
    Timeout,
    #[error("Incomplete generation")]
    Incomplete,
    #[error("Incomplete generation")]
    IncompleteStream,
    #[error("unhealthy")]
    Unhealthy,
    #[error("suffix is not supported: the model completes text at its end only")]
    Suffix,
    #[error("{given} prompts were given, at most {max} are allowed in one request; raise --max-client-batch-size")]
    BatchSize { given: usize, max: usize },
    /// The body could not be read as the route's request (OpenAI routes; on TGI's the extractor answers itself).
    #[error("{message}")]
    Malformed { status: StatusCode, message: String },
    #[error("{0}")]
    NotFound(String),
    /// No API key, or a wrong one.
    #[error("{0}")]
    Unauthorized(&'static str),
    /// A bug of ours; the log has the details under this id.
    #[error("internal error {0}")]
    Internal(String),
}

/// There is no room for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) bound: Bound,
    /// When it is worth trying again, as far as one can say.
    pub(crate) retry_after_s: u64,
}

/// What of the server was full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    /// `--max-concurrent-requests`
    Requests,
    /// `--max-queued-tokens`
    QueuedTokens,
    /// `--queue-timeout`
    QueueTime,
}

/// COMPAT: TGI's words; which bound it was is in the metrics.
impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Model is overloaded")?;
        match self.bound {
            Bound::Requests | Bound::QueuedTokens => Ok(()),
            Bound::QueueTime => formatter.write_str(": the request waited for longer than --queue-timeout allows"),
        }
    }
}

/// Another server may take it at once.
const MIN_RETRY_AFTER_S: u64 = 1;

impl From<GenerationError> for ApiError {
    fn from(error: GenerationError) -> Self {
        match error {
            GenerationError::Failed(SequenceFailure::ShuttingDown) => Self::ShuttingDown,
            GenerationError::Failed(SequenceFailure::Request(reason)) => Self::Unservable(reason),
            GenerationError::Failed(failure) => Self::Generation(failure.to_string()),
            GenerationError::Incomplete => Self::Incomplete,
            GenerationError::Timeout => Self::Timeout,
            // Where it is known when to come back, that is told (`Running::next`).
            GenerationError::QueueTimeout => {
                Self::Overloaded(Refusal { bound: Bound::QueueTime, retry_after_s: MIN_RETRY_AFTER_S })
            }
        }
    }
}

impl From<GrammarError> for ApiError {
    fn from(error: GrammarError) -> Self {
        match error {
            GrammarError::Invalid(reason) => Self::Validation(ValidationError::Grammar(reason)),
            GrammarError::Worker(_) => Self::Generation(error.to_string()),
        }
    }
}

impl From<EncodeError> for ApiError {
    fn from(error: EncodeError) -> Self {
        Self::Validation(ValidationError::Tokenizer(error.to_string()))
    }
}

/// TGI's error object, also as a stream's event.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Error, example = json!({"error": "Input validation error: `temperature` must be strictly positive", "error_type": "validation"}))]
pub(crate) struct TgiErrorBody {
    /// For people: what was given, and what is allowed.
    pub(crate) error: String,
    /// For programs: `validation`, `overloaded`, `generation`, `timeout`, …
    pub(crate) error_type: &'static str,
}

/// OpenAI's error object, also as a stream's event.
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
    /// The field at fault, where it is one.
    param: Option<&'static str>,
    /// For programs: the same as TGI's `error_type`.
    code: &'static str,
    /// Only in events: the status that the plain answer has.
    // COMPAT: TGI's events had it.
    #[serde(skip_serializing_if = "Option::is_none")]
    http_status_code: Option<u16>,
}

impl ApiError {
    /// Stable names for programs: TGI's `error_type`, OpenAI's `code`.
    pub(crate) fn error_type(&self) -> &'static str {
        match self {
            Self::Overloaded(_) => "overloaded",
            Self::ShuttingDown => "shutting_down",
            Self::Validation(_) => "validation",
            Self::Template(_) => "template_error",
            Self::Tool(_) => "tool_error",
            Self::Generation(_) | Self::Unservable(_) => "generation",
            Self::Timeout => "timeout",
            Self::Incomplete => "incomplete_generation",
            Self::IncompleteStream => "incomplete_generation_stream",
            Self::Unhealthy => "healthcheck",
            Self::Suffix => "suffix not supported",
            Self::BatchSize { .. } => "batch size exceeded",
            Self::Malformed { .. } => "malformed_request",
            Self::NotFound(_) => "not_found",
            Self::Unauthorized(_) => "invalid_api_key",
            Self::Internal(_) => "internal",
        }
    }

    pub(crate) fn tgi_status(&self) -> StatusCode {
        match self {
            Self::Overloaded(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::ShuttingDown | Self::Unhealthy => StatusCode::SERVICE_UNAVAILABLE,
            Self::Validation(_) | Self::Template(_) | Self::Tool(_) | Self::Suffix | Self::BatchSize { .. } => {
                StatusCode::UNPROCESSABLE_ENTITY
            }
            Self::Timeout => StatusCode::GATEWAY_TIMEOUT,
            Self::Generation(_) | Self::Unservable(_) => StatusCode::FAILED_DEPENDENCY,
            Self::Incomplete | Self::IncompleteStream | Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
            Self::Malformed { status, .. } => *status,
            Self::NotFound(_) => StatusCode::NOT_FOUND,
            Self::Unauthorized(_) => StatusCode::UNAUTHORIZED,
        }
    }

    /// As OpenAI has it: whatever is wrong with a request's content is 400, whatever is wrong with us is 5xx.
    pub(crate) fn openai_status(&self) -> StatusCode {
        match self.tgi_status() {
            _ if matches!(self, Self::Unservable(_)) => StatusCode::BAD_REQUEST,
            StatusCode::UNPROCESSABLE_ENTITY => StatusCode::BAD_REQUEST,
            StatusCode::FAILED_DEPENDENCY => StatusCode::INTERNAL_SERVER_ERROR,
            status => status,
        }
    }

    /// In how many seconds the same request may succeed; `None`: it is not for want of room that it failed.
    pub(crate) fn retry_after_s(&self) -> Option<u64> {
        match self {
            Self::Overloaded(refusal) => Some(refusal.retry_after_s),
            Self::ShuttingDown => Some(MIN_RETRY_AFTER_S),
            _ => None,
        }
    }

    /// Why it was not let in, or not for long enough: the values of the label `reason`.
    pub(crate) fn refusal(&self) -> Option<RefusalReason> {
        match self {
            Self::Overloaded(Refusal { bound: Bound::Requests, .. }) => Some(RefusalReason::Requests),
            Self::Overloaded(Refusal { bound: Bound::QueuedTokens, .. }) => Some(RefusalReason::QueuedTokens),
            Self::Overloaded(Refusal { bound: Bound::QueueTime, .. }) => Some(RefusalReason::QueueTimeout),
            Self::ShuttingDown => Some(RefusalReason::ShuttingDown),
            _ => None,
        }
    }

    /// `None`: this request is not counted, it was never asked to generate.
    pub(crate) fn failure(&self) -> Option<Failure> {
        match self {
            Self::Overloaded(_) | Self::ShuttingDown => Some(Failure::Overloaded),
            Self::Validation(_) | Self::Tool(_) | Self::Suffix | Self::BatchSize { .. } => Some(Failure::Validation),
            Self::Template(_) => Some(Failure::Template),
            Self::Generation(_) | Self::Unservable(_) | Self::Timeout | Self::Internal(_) => Some(Failure::Generation),
            Self::Incomplete | Self::IncompleteStream => Some(Failure::Incomplete),
            Self::Unhealthy | Self::Malformed { .. } | Self::NotFound(_) | Self::Unauthorized(_) => None,
        }
    }

    pub(crate) fn tgi_body(&self) -> TgiErrorBody {
        TgiErrorBody { error: self.to_string(), error_type: self.error_type() }
    }

    pub(crate) fn openai_body(&self) -> OpenAiErrorBody {
        let status = self.openai_status();
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::NOT_FOUND => "not_found_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let param = match self {
            Self::Validation(error) => error.param(),
            Self::Suffix => Some("suffix"),
            Self::BatchSize { .. } => Some("prompt"),
            Self::Tool(_) => Some("tools"),
            _ => None,
        };
        let fields = OpenAiErrorFields {
            message: self.to_string(),
            kind,
            param,
            code: self.error_type(),
            http_status_code: None,
        };
        OpenAiErrorBody { error: fields }
    }

    /// The body, as a stream's event.
    pub(crate) fn openai_event(&self) -> OpenAiErrorBody {
        let mut body = self.openai_body();
        body.error.http_status_code = Some(self.openai_status().as_u16());
        body
    }
}
