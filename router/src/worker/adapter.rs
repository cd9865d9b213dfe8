//! Loads LoRA adapters on all ranks while their steps go on.

use std::path::Path;
use std::time::Duration;

use futures::future::try_join_all;
use penstock_proto as proto;

use super::rank::Rank;
use super::{WorkerError, convert};
use crate::sequence::{Adapter, AdapterError};

/// An adapter is at most some hundred MiB, but its file may be on a slow disk.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A handle on all ranks of a group. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct AdapterLoader {
    ranks: Vec<Rank>,
}

impl AdapterLoader {
    pub(super) fn new(ranks: Vec<Rank>) -> Self {
        Self { ranks }
    }

    /// Frees the adapters `unloaded_ids`, then loads one. The inner error says what is wrong with it, for people.
    pub(crate) async fn load(
        self,
        adapter: &Adapter,
        unloaded_ids: &[u64],
    ) -> Result<Result<(), AdapterError>, WorkerError> {
        let request = proto::LoadAdapterRequest {
            adapter: Some(convert::adapter(adapter)),
            unloaded_ids: unloaded_ids.to_vec(),
            only_checks: false,
        };
        let answers = try_join_all(self.ranks.into_iter().map(|rank| ask(rank, request.clone()))).await?;
        Ok(match answers.into_iter().find(|answer| !answer.error.is_empty()) {
            Some(answer) if answer.is_memory_full => Err(AdapterError::NoMemory(answer.error)),
            Some(answer) => Err(AdapterError::Unusable(answer.error)),
            None => Ok(()),
        })
    }
}

/// Whether a rank could load the adapter in `folder`. The inner error says what is wrong with it, for people.
pub(super) async fn check(rank: Rank, folder: &Path) -> Result<Result<(), String>, WorkerError> {
    let adapter = Adapter { id: 1, path: folder.into() };
    let request = proto::LoadAdapterRequest {
        adapter: Some(convert::adapter(&adapter)),
        unloaded_ids: Vec::new(),
        only_checks: true,
    };
    let answer = ask(rank, request).await?;
    Ok(if answer.error.is_empty() { Ok(()) } else { Err(answer.error) })
}

async fn ask(mut rank: Rank, request: proto::LoadAdapterRequest) -> Result<proto::LoadAdapterResponse, WorkerError> {
    let index = rank.index();
    let late = || WorkerError::Unresponsive { rank: index, about: "an adapter", waited: TIMEOUT };
    tokio::time::timeout(TIMEOUT, rank.load_adapter(request)).await.map_err(|_| late())?
}
