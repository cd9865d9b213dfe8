//! Asking the ranks how they are, beside their steps.

use std::time::Duration;

use futures::future::join_all;

use super::rank::Rank;

/// Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct HealthProbe {
    ranks: Vec<Rank>,
}

impl HealthProbe {
    pub(super) fn new(ranks: Vec<Rank>) -> Self {
        Self { ranks }
    }

    /// The first rank that says nothing within `patience`. One that is gone says so: its stream of steps ends.
    pub(crate) async fn silent_rank(&mut self, patience: Duration) -> Option<usize> {
        let answers = self.ranks.iter_mut().map(|rank| tokio::time::timeout(patience, rank.health()));
        join_all(answers).await.iter().position(Result::is_err)
    }
}
