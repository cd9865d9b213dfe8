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
    /// A text whose thoughts are limited.
    Thoughts(Box<LimitedThoughts>),
}

/// A text that begins with thoughts of a limited length.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LimitedThoughts {
    /// Their limit.
    pub limit: ThoughtLimit,
    /// What the whole text must match; not another limit. `None`: any text.
    pub grammar: Option<Grammar>,
}

/// How many tokens thoughts may have, and what ends them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ThoughtLimit {
    /// Without those of the markers.
    pub max_tokens: u32,
    /// The marker that begins them; empty: the prompt has begun them.
    pub open: String,
    /// The marker that ends them.
    pub close: String,
    /// The tokens that follow when the thoughts have had theirs; not empty.
    pub end_ids: Vec<u32>,
    /// Whether `open` begins thoughts again, anywhere in the text; all count together.
    pub reopens: bool,
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
