//! Why a request is refused or a generation fails. `api::error` gives each its status and body.

use std::fmt;

use super::validation::ValidationError;
use crate::sequence::{GrammarError, ImageError, SequenceFailure};
use crate::text::{EncodeError, TemplateError};

/// The shortest `Retry-After`: another replica may accept the request at once.
pub(crate) const MIN_RETRY_AFTER_S: u64 = 1;

// COMPAT: the prefixes of the messages are TGI's.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum GenerationError {
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
    /// The worker failed.
    #[error("Request failed during generation: {0}")]
    Failed(String),
    /// The request itself leaves no valid next token, as a grammar can.
    #[error("Request failed during generation: {0}")]
    Unservable(String),
    /// The client's own `timeout` expired.
    #[error("the request's timeout expired")]
    Timeout,
    /// The engine's stream ended before the sequence did.
    #[error("Incomplete generation")]
    Incomplete,
}

/// The server has no capacity for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) bound: Bound,
    /// Estimated seconds until a retry can succeed.
    pub(crate) retry_after_s: u64,
}

/// The limit that was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bound {
    /// `--max-concurrent-requests`
    Requests,
    /// `--max-queued-tokens`
    QueuedTokens,
    /// `--queue-timeout`
    QueueTime,
    /// Images that wait for the workers.
    Images,
}

// COMPAT: TGI's words; the metrics tell which bound was reached.
impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Model is overloaded")?;
        match self.bound {
            Bound::Requests | Bound::QueuedTokens => Ok(()),
            Bound::Images => formatter.write_str(": too many images wait to be encoded"),
            Bound::QueueTime => formatter.write_str(": the request waited for longer than --queue-timeout allows"),
        }
    }
}

impl From<SequenceFailure> for GenerationError {
    fn from(failure: SequenceFailure) -> Self {
        match failure {
            SequenceFailure::ShuttingDown => Self::ShuttingDown,
            SequenceFailure::Request(reason) => Self::Unservable(reason),
            SequenceFailure::Sequence(_) | SequenceFailure::Worker(_) => Self::Failed(failure.to_string()),
        }
    }
}

impl From<GrammarError> for GenerationError {
    fn from(error: GrammarError) -> Self {
        match error {
            GrammarError::Invalid(reason) => Self::Validation(ValidationError::Grammar(reason)),
            GrammarError::Worker(_) => Self::Failed(error.to_string()),
        }
    }
}

impl From<ImageError> for GenerationError {
    fn from(error: ImageError) -> Self {
        match error {
            ImageError::Unusable(reason) => Self::Validation(ValidationError::Image(reason)),
            ImageError::Overloaded(_) => {
                Self::Overloaded(Refusal { bound: Bound::Images, retry_after_s: MIN_RETRY_AFTER_S })
            }
            ImageError::Worker(_) => Self::Failed(error.to_string()),
        }
    }
}

impl From<EncodeError> for GenerationError {
    fn from(error: EncodeError) -> Self {
        Self::Validation(ValidationError::Tokenizer(error.to_string()))
    }
}
