//! Compiling grammars where they are used: on rank 0, beside its steps.

use std::time::Duration;

use super::convert;
use super::rank::Rank;
use crate::engine::{Grammar, GrammarError};

/// The worker bounds a compilation itself, well below this.
const PATIENCE: Duration = Duration::from_secs(30);

/// Cheap to clone.
#[derive(Clone, Debug)]
pub struct GrammarCompiler {
    first: Rank,
}

impl GrammarCompiler {
    pub(super) fn new(first: Rank) -> Self {
        Self { first }
    }

    pub(crate) async fn compile(mut self, grammar: Grammar) -> Result<(), GrammarError> {
        let request = penstock_proto::CompileGrammarRequest { grammar: Some(convert::grammar(&grammar)) };
        match tokio::time::timeout(PATIENCE, self.first.compile_grammar(request)).await {
            Ok(Ok(answer)) if answer.error.is_empty() => Ok(()),
            Ok(Ok(answer)) => Err(GrammarError::Invalid(answer.error)),
            Ok(Err(error)) => Err(GrammarError::Worker(error.to_string())),
            Err(_) => Err(GrammarError::Worker(format!("no answer about a grammar for {} s", PATIENCE.as_secs()))),
        }
    }
}
