//! Compiling grammars where they are used: on rank 0, beside its steps.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::rank::Rank;
use super::{WorkerError, convert};
use crate::sequence::Grammar;

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

    /// The inner error is about the grammar, for the client.
    pub(crate) async fn compile(mut self, grammar: &Grammar) -> Result<Result<(), String>, WorkerError> {
        let request = penstock_proto::CompileGrammarRequest { grammar: Some(convert::grammar(grammar)) };
        // Never closed, so never an error.
        let _place = Arc::clone(&self.places).acquire_owned().await.ok();
        match tokio::time::timeout(PATIENCE, self.first.compile_grammar(request)).await {
            Ok(Ok(answer)) if answer.error.is_empty() => Ok(Ok(())),
            Ok(Ok(answer)) => Ok(Err(answer.error)),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(WorkerError::Silent { rank: self.first.index, about: "a grammar", waited: PATIENCE }),
        }
    }
}
