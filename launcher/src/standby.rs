//! A standby group: workers with their weights loaded, ready to replace a failed group. Standby workers without weights
//! would save almost nothing, because a fork takes hundredths of a second. The load yields the processors to running
//! requests, so only a finished one is taken over.

use futures::FutureExt;

use crate::fork_server::ForkServer;
use crate::group::{Loaded, Loading, Recipe};
use crate::memory;
use crate::workers::Workers;

/// Memory per rank that must be available in addition to the weights: several times what a worker uses before warm-up.
/// The imports are shared with the fork server.
const RANK_BYTES: u64 = 512 << 20;

/// Dropping it kills its processes.
pub(crate) struct StandbyGroup {
    workers: Workers,
    loading: Loading,
    is_ready: bool,
}

/// What happened to a standby group.
pub(crate) enum StandbyEvent {
    Ready,
    /// It cannot be used any more; the text says why.
    Lost(String),
}

impl StandbyGroup {
    /// Spawns the workers and starts to load them. Call it on the main thread (see `process::python_module`). The error
    /// says why there is no standby group. `number` as in `Workers::spawn`.
    pub(crate) fn start(recipe: &Recipe, fork_server: &mut ForkServer, number: usize) -> Result<Self, String> {
        let Some(weight_bytes) = recipe.weight_bytes else {
            return Err("the device has no room for a second copy of the weights".to_owned());
        };
        // Packing a weight needs as much memory again.
        let required_bytes = RANK_BYTES * recipe.workers.num_ranks as u64 + 2 * weight_bytes;
        // An unknown amount of available memory counts as none.
        if memory::available_bytes().unwrap_or(0) < required_bytes {
            return Err(format!("less than {} MiB of memory are available", required_bytes >> 20));
        }
        let workers = Workers::spawn(&recipe.workers, fork_server, number).map_err(|error| error.to_string())?;
        let loading = recipe.load(&workers, true);
        Ok(Self { workers, loading, is_ready: false })
    }

    /// The next event. Cancel safe. `Lost` is the last one.
    pub(crate) async fn next_event(&mut self) -> StandbyEvent {
        tokio::select! {
            reason = self.workers.exit() => StandbyEvent::Lost(reason),
            loaded = &mut self.loading, if !self.is_ready => match loaded {
                Ok(loaded) => {
                    self.is_ready = true;
                    self.loading = futures::future::ready(Ok(loaded)).boxed();
                    StandbyEvent::Ready
                }
                Err(error) => StandbyEvent::Lost(error.to_string()),
            },
        }
    }

    /// The processes and what they loaded. `None` if a process has exited or the load has not finished.
    pub(crate) fn into_ready(self) -> Option<(Workers, Loaded)> {
        let is_alive = self.workers.are_alive();
        let loaded = self.loading.now_or_never().filter(|_| is_alive)?;
        Some((self.workers, loaded.ok()?))
    }
}
