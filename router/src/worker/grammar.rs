//! Compiling grammars where they are used: on rank 0, beside its steps.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::convert;
use super::rank::Rank;
use crate::engine::{Grammar, GrammarError};

/// The worker bounds a compilation itself, well below this.
const PATIENCE: Duration = Duration::from_secs(30);

/// More wait here: the worker refuses what it could not begin soon.
const MAX_AT_ONCE: usize = 16;

/// Cheap to clone.
#[derive(Clone, Debug)]
pub struct GrammarCompiler {
    first: Rank,
    places: Arc<Semaphore>,
}

impl GrammarCompiler {
    pub(super) fn new(first: Rank) -> Self {
        Self { first, places: Arc::new(Semaphore::new(MAX_AT_ONCE)) }
    }

    pub(crate) async fn compile(mut self, grammar: Grammar) -> Result<(), GrammarError> {
        let request = penstock_proto::CompileGrammarRequest { grammar: Some(convert::grammar(&grammar)) };
        // Never closed, so never an error.
        let _place = Arc::clone(&self.places).acquire_owned().await.ok();
        match tokio::time::timeout(PATIENCE, self.first.compile_grammar(request)).await {
            Ok(Ok(answer)) if answer.error.is_empty() => Ok(()),
            Ok(Ok(answer)) => Err(GrammarError::Invalid(answer.error)),
            Ok(Err(error)) => Err(GrammarError::Worker(error.to_string())),
            Err(_) => Err(GrammarError::Worker(format!("no answer about a grammar for {} s", PATIENCE.as_secs()))),
        }
    }
}
