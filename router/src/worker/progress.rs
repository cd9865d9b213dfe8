//! How far a rank is with its work.

use std::time::Duration;

/// What one rank answers to a health check.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankProgress {
    /// Processor time of the worker's process since its start, over all cores.
    pub processor_time: Duration,
    /// Its GPU; `None`: the model runs on CPUs.
    pub device: Option<DeviceProgress>,
    /// Whether the KV pool is still taking memory that the system reports as available.
    pub is_backing_pool: bool,
}

/// How far a GPU is with the work that its process has given to it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceProgress {
    /// Parts of the work that are finished, since the start.
    pub num_finished: u64,
    /// Whether some part is not finished.
    pub is_busy: bool,
}
