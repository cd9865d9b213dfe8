//! Workers that wait to take the place of others, with their weights loaded. Without, they would save next to nothing:
//! a worker is forked in hundredths of a second.

use futures::FutureExt;

use crate::fork_server::ForkServer;
use crate::memory;
use crate::supervise::{Loading, Recipe};
use crate::workers::Workers;

/// Memory that must be left beside their weights, for each rank: several times what is a worker's own before its
/// warm-up. Its imports are the fork server's.
const MEMORY_BYTES: u64 = 512 << 20;

/// Dropping it ends its processes.
pub struct Reserve {
    workers: Workers,
    /// Taken to its end before or after they take over, whichever comes first.
    loading: Loading,
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
        let Some(weight_bytes) = recipe.weight_bytes else {
            return Err("a device has no room for two copies of the weights".to_owned());
        };
        // Packing takes as much as what is packed.
        let needed_bytes = MEMORY_BYTES * recipe.workers.num_ranks as u64 + 2 * weight_bytes;
        // Where the system does not say, there is no telling.
        if memory::available_bytes().unwrap_or(0) < needed_bytes {
            return Err(format!("less than {} MiB are available", needed_bytes >> 20));
        }
        let workers = Workers::spawn(&recipe.workers, fork_server, number).map_err(|error| error.to_string())?;
        let loading = recipe.load(&workers);
        Ok(Self { workers, loading, is_ready: false })
    }

    pub fn is_alive(&self) -> bool {
        self.workers.are_alive()
    }

    /// Cancel safe. Nothing comes after `Lost`.
    pub async fn next_event(&mut self) -> ReserveEvent {
        tokio::select! {
            words = self.workers.death() => ReserveEvent::Lost(words),
            loaded = &mut self.loading, if !self.is_ready => match loaded {
                Ok(loaded) => {
                    self.is_ready = true;
                    self.loading = futures::future::ready(Ok(loaded)).boxed();
                    ReserveEvent::Ready
                }
                Err(error) => ReserveEvent::Lost(error.to_string()),
            },
        }
    }

    /// The processes, and the rest of their preparation.
    pub fn into_parts(self) -> (Workers, Loading) {
        (self.workers, self.loading)
    }
}
