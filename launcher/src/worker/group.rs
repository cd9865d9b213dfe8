//! A worker group from spawned processes to loaded weights: shared by the first start, restarts and the standby group.

use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use penstock_router::worker::{Group, LoadOptions, WarmUpOptions, WorkerError};

use crate::worker::process::{Meeting, WorkerOptions, Workers, WorkersError};

/// Time limit for forked workers to listen.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(300);
/// Time to wait, after a lost connection, for the exit that explains it.
pub(crate) const EXIT_REASON_TIMEOUT: Duration = Duration::from_secs(2);

/// Settings that start a group like the first one.
#[derive(Clone)]
pub(crate) struct Recipe {
    pub(crate) workers: WorkerOptions,
    /// `rendezvous`, `token` and `background` are replaced: each group has its own.
    pub(crate) load: LoadOptions,
    /// Asks for as many blocks as the first group has, without that group's memory measurements.
    pub(crate) warm_up: WarmUpOptions,
    /// Host memory that a standby group takes. The error says why there is none.
    pub(crate) standby_bytes: Result<u64, String>,
}

/// A group whose weights are loaded.
pub(crate) struct Loaded {
    pub(crate) group: Group,
    /// Time at which all workers had answered.
    pub(crate) connected: Instant,
}

pub(crate) type Loading = BoxFuture<'static, Result<Loaded, GroupError>>;

/// Why a group could not be started.
#[derive(Debug, thiserror::Error)]
pub(crate) enum GroupError {
    #[error(transparent)]
    Spawn(#[from] WorkersError),
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// A worker exited; the text says which one and why.
    #[error("{0}")]
    Exited(String),
    #[error("the workers have {num_blocks} KV blocks, the first group had {expected}")]
    FewerBlocks { num_blocks: u32, expected: u64 },
}

impl GroupError {
    /// Replaces a lost connection by the exit that caused it, because the process knows more than the socket.
    pub(crate) async fn explained(self, workers: &mut Workers) -> Self {
        match self {
            Self::Worker(error) if error.is_loss() => {
                exit_reason(workers).await.map_or(Self::Worker(error), Self::Exited)
            }
            error => error,
        }
    }
}

impl Recipe {
    /// Makes a loaded group ready, with as many blocks as the first one.
    pub(crate) async fn warm_up(&self, group: &mut Group) -> Result<(), GroupError> {
        let pool = group.warm_up(&self.warm_up).await?;
        match self.warm_up.num_blocks {
            Some(expected) if u64::from(pool.num_blocks) < expected => {
                Err(GroupError::FewerBlocks { num_blocks: pool.num_blocks, expected })
            }
            _ => Ok(()),
        }
    }

    /// Like the function `load`, with the recipe's options.
    pub(crate) fn load(&self, workers: &Workers, background: bool) -> Loading {
        load(&self.load, workers, background)
    }
}

/// Connects to spawned workers and loads the model; `background` as in `LoadOptions`.
pub(crate) fn load(options: &LoadOptions, workers: &Workers, background: bool) -> Loading {
    let connecting = connect(workers);
    let load = LoadOptions { background, ..options.clone() };
    let loading = async move {
        let (mut group, Meeting { rendezvous, token, .. }) = connecting.await?;
        let connected = Instant::now();
        group.load(&LoadOptions { rendezvous, token, ..load }).await?;
        Ok(Loaded { group, connected })
    };
    loading.boxed()
}

/// Waits until the workers listen. Until they are forked, the fork server may load a model of any size.
pub(crate) fn connect(workers: &Workers) -> impl Future<Output = Result<(Group, Meeting), GroupError>> + use<> {
    let started = workers.started();
    async move {
        let meeting = started.await;
        Ok((Group::connect(&meeting.endpoints, CONNECT_TIMEOUT).await?, meeting))
    }
}

/// Awaits a task of the workers. A worker's exit ends it, and explains a lost connection.
pub(crate) async fn run<T>(
    workers: &mut Workers,
    task: impl Future<Output = Result<T, GroupError>>,
) -> Result<T, GroupError> {
    match while_alive(workers, task).await.flatten() {
        Err(error) => Err(error.explained(workers).await),
        result => result,
    }
}

/// Awaits `task`, unless a worker exits first.
pub(crate) async fn while_alive<T>(workers: &mut Workers, task: impl Future<Output = T>) -> Result<T, GroupError> {
    tokio::select! {
        result = task => Ok(result),
        reason = workers.exit() => Err(GroupError::Exited(reason)),
    }
}

/// The reason of a worker's exit; `None` if none exits soon.
pub(crate) async fn exit_reason(workers: &mut Workers) -> Option<String> {
    tokio::time::timeout(EXIT_REASON_TIMEOUT, workers.exit()).await.ok()
}
