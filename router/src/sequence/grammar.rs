//! What the text of a sequence must match.

/// What a generation must match as a whole.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Grammar {
    /// A JSON schema as JSON text.
    JsonSchema(String),
    /// A regular expression.
    Regex(String),
    /// A grammar in llguidance's dialect of Lark, with `%json {…}` and `<special_token>`.
    Lark(String),
}

/// Why a grammar cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The grammar is invalid; the message is for the client.
    #[error("{0}")]
    Invalid(String),
    /// The workers stopped, or do not answer.
    #[error("the model workers stopped: {0}")]
    Worker(String),
}
