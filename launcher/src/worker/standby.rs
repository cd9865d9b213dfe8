//! A standby group: workers with their weights loaded, ready to replace a failed group. Standby workers without weights
//! would save almost nothing, because a fork takes hundredths of a second. The load yields the processors to running
//! requests, so only a finished one is taken over.

use futures::FutureExt;

use crate::flag::standby::Standby;
use crate::process::memory::{self, Size};
use crate::worker::group::{Loaded, Loading, Recipe};
use crate::worker::host::Hosts;
use crate::worker::process::Workers;

/// Memory per rank that must be available in addition to the weights: several times what a worker uses before warm-up.
/// The imports are shared with the fork server.
const RANK_BYTES: u64 = 512 << 20;

/// Host memory of a standby group. The error says why there is none. `weight_bytes` are those of all ranks that are not shared
/// with other groups, `room_bytes` as in `Pool`.
pub(crate) fn host_bytes(
    standby: Standby,
    weight_bytes: u64,
    room_bytes: Option<i64>,
    num_ranks: usize,
) -> Result<u64, String> {
    if standby == Standby::Off {
        return Err("--standby is off".to_owned());
    }
    let processes = RANK_BYTES * num_ranks as u64;
    match room_bytes {
        // Packing a weight needs as much memory again.
        None => Ok(processes + 2 * weight_bytes),
        Some(room) if room < 0 => Err(format!(
            "a GPU lacks {} MiB for a second copy of the weights beside the KV cache and the largest step; use \
             --standby reserve, lower --max-batch-total-tokens or raise --cuda-memory-fraction",
            room.unsigned_abs().div_ceil(1 << 20)
        )),
        Some(_) => Ok(processes),
    }
}

/// Dropping it kills its processes.
pub(crate) struct StandbyGroup {
    workers: Workers,
    loading: Loading,
    is_ready: bool,
}

/// An event of a standby group.
pub(crate) enum StandbyEvent {
    Ready,
    /// It cannot be used any more; the text says why.
    Lost(String),
}

impl StandbyGroup {
    /// Spawns the workers and starts to load them. Call it on the main thread (see `python::module`). The error
    /// says why there is no standby group. `number` as in `Workers::spawn`.
    pub(crate) fn start(recipe: &Recipe, hosts: &mut Hosts, number: usize) -> Result<Self, String> {
        let required_bytes = recipe.standby_bytes.clone()?;
        // An unknown amount of available memory counts as none.
        if memory::available_bytes().unwrap_or(0) < required_bytes {
            return Err(format!("less than {} of memory are available", Size(required_bytes)));
        }
        let workers = Workers::spawn(&recipe.workers, hosts, number).map_err(|error| error.to_string())?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_copy_of_the_weights_is_in_host_memory_or_fits_on_every_gpu() {
        assert_eq!(host_bytes(Standby::Auto, 5 << 30, None, 2), Ok((10 << 30) + 2 * RANK_BYTES));
        for standby in [Standby::Auto, Standby::Reserve] {
            assert_eq!(host_bytes(standby, 5 << 30, Some(0), 2), Ok(2 * RANK_BYTES));
            let reason = host_bytes(standby, 5 << 30, Some(-(3 << 20) + 1), 2).unwrap_err();
            assert!(reason.starts_with("a GPU lacks 3 MiB for a second copy of the weights"), "{reason}");
        }
    }

    #[test]
    fn a_standby_group_can_be_off() {
        for room in [None, Some(1)] {
            assert_eq!(host_bytes(Standby::Off, 5 << 30, room, 2), Err("--standby is off".to_owned()));
        }
    }
}
