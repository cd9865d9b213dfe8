//! Models that make one vector of a whole sequence and generate nothing.

use std::fmt;

/// What a model is for. A model serves the routes of one task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Task {
    /// It generates text.
    Generate,
    /// It makes embeddings.
    Embed,
    /// It scores how relevant a text is to a query.
    Rerank,
}

/// How a model pools its outputs, as far as requests depend on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pooling {
    /// `Embed` or `Rerank`.
    pub task: Task,
    /// Numbers in a vector.
    pub num_dimensions: usize,
    /// Whether the model's files ask for vectors of length 1.
    pub is_normalized: bool,
    /// The vector depends on the outputs of all tokens, so none may come from the prefix cache.
    pub reads_all_outputs: bool,
    /// All tokens attend to each other: a sequence is one source.
    pub is_encoder: bool,
    /// The model tells the tokens of a second text from those of the first.
    pub has_token_types: bool,
    /// Shorter vectors that the model was trained for.
    pub matryoshka: Matryoshka,
}

/// Numbers of leading dimensions that are a vector, too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Matryoshka {
    /// Only whole vectors.
    No,
    /// Any number.
    Any,
    /// One of these.
    Of(Vec<usize>),
}

impl fmt::Display for Task {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Generate => "generates text",
            Self::Embed => "makes embeddings (/embed, /v1/embeddings)",
            Self::Rerank => "scores texts (/rerank, /v1/rerank)",
        })
    }
}
