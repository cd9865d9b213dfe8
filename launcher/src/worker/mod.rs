//! Worker processes: how they start, load, are watched, end and are replaced.

pub(crate) mod fork_server;
pub(crate) mod group;
pub(crate) mod host;
pub(crate) mod process;
pub(crate) mod standby;
pub(crate) mod supervisor;
