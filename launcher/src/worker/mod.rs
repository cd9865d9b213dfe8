//! Worker processes: how they start, load, are watched, end and are replaced.

pub(crate) mod fork_protocol;
pub(crate) mod fork_server;
pub(crate) mod group;
pub(crate) mod hosts;
pub(crate) mod memory;
pub(crate) mod output;
pub(crate) mod process;
pub(crate) mod standby;
pub(crate) mod supervise;
pub(crate) mod workers;
