//! Workers that wait to take the place of others: their imports are done and, where memory allows, their weights loaded.

use futures::FutureExt;
use futures::future::BoxFuture;
use penstock_router::worker::{Group, LoadOptions};

use crate::fork_server::ForkServer;
use crate::memory;
use crate::start::{self, StartError};
use crate::supervise::Recipe;
use crate::workers::Workers;

/// Memory that must be left beside them, for each rank: several times what a Python needs that has imported torch.
const MEMORY_BYTES: u64 = 2 << 30;

/// A group that answers, and whether it is loaded.
type Connected = Result<(Group, bool), StartError>;

/// Dropping it ends its processes.
pub struct Reserve {
    workers: Workers,
    /// Taken to its end before or after they take over, whichever comes first.
    preparing: BoxFuture<'static, Connected>,
    is_ready: bool,
}

pub enum ReserveEvent {
    Ready,
    /// Why.
    Lost(String),
}

impl Reserve {
    /// Call it on the main thread (see `process::python_module`). The error is the reason why there is none.
    pub fn start(recipe: &Recipe, fork_server: &mut ForkServer, number: usize) -> Result<Self, String> {
        let needed_bytes = MEMORY_BYTES.saturating_mul(recipe.workers.num_ranks as u64);
        // Where the system does not say, there is no telling.
        let available_bytes = memory::available_bytes().unwrap_or(0);
        if available_bytes < needed_bytes {
            return Err(format!("less than {} MiB are available", needed_bytes >> 20));
        }
        let workers = Workers::spawn(&recipe.workers, fork_server, number).map_err(|error| error.to_string())?;
        // Packing takes as much as what is packed.
        let fits = |weight_bytes: u64| available_bytes - needed_bytes >= 2 * weight_bytes;
        let load = recipe
            .weight_bytes
            .is_some_and(fits)
            .then(|| LoadOptions { rendezvous: workers.rendezvous(), ..recipe.load.clone() });
        let sockets = workers.sockets().to_vec();
        let preparing = async move {
            let mut group = start::connect(&sockets).await?;
            if let Some(load) = &load {
                group.load(load).await?;
            }
            Ok((group, load.is_some()))
        };
        Ok(Self { workers, preparing: preparing.boxed(), is_ready: false })
    }

    pub fn is_alive(&self) -> bool {
        self.workers.are_alive()
    }

    /// Cancel safe. Nothing comes after `Lost`.
    pub async fn next_event(&mut self) -> ReserveEvent {
        tokio::select! {
            words = self.workers.death() => ReserveEvent::Lost(words),
            connected = &mut self.preparing, if !self.is_ready => match connected {
                Ok(connected) => {
                    self.is_ready = true;
                    self.preparing = futures::future::ready(Ok(connected)).boxed();
                    ReserveEvent::Ready
                }
                Err(error) => ReserveEvent::Lost(error.to_string()),
            },
        }
    }

    /// The processes, and the rest of their preparation: what it brings tells whether the weights are loaded.
    pub fn into_parts(self) -> (Workers, BoxFuture<'static, Connected>) {
        (self.workers, self.preparing)
    }
}
