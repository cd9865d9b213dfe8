//! Compiles grammars on rank 0, which makes the masks of all ranks, while its steps go on.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;

use super::rank::Rank;
use super::{WorkerError, convert};
use crate::sequence::Grammar;

/// The worker refuses a grammar by itself after 120 s.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Further compilations wait here, because the worker refuses those that it cannot begin soon.
const MAX_CONCURRENT: usize = 16;

/// A handle on rank 0 of a group. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct GrammarCompiler {
    rank: Rank,
    permits: Arc<Semaphore>,
}

impl GrammarCompiler {
    pub(super) fn new(rank: Rank) -> Self {
        Self { rank, permits: Arc::new(Semaphore::new(MAX_CONCURRENT)) }
    }

    /// The inner error says what is wrong with the grammar, for the client.
    pub(crate) async fn compile(mut self, grammar: &Grammar) -> Result<Result<(), String>, WorkerError> {
        let request = penstock_proto::CompileGrammarRequest { grammar: Some(convert::grammar(grammar)) };
        // An error means that the semaphore was closed, which never happens.
        let _permit = Arc::clone(&self.permits).acquire_owned().await.ok();
        match tokio::time::timeout(TIMEOUT, self.rank.compile_grammar(request)).await {
            Ok(Ok(answer)) if answer.error.is_empty() => Ok(Ok(())),
            Ok(Ok(answer)) => Ok(Err(answer.error)),
            Ok(Err(error)) => Err(error),
            Err(_) => Err(WorkerError::Unresponsive { rank: self.rank.index(), about: "a grammar", waited: TIMEOUT }),
        }
    }
}
