//! The protocols, generated at build time from `worker.proto` and `engine.proto`, which are also their specifications.
//! Conversions live with their clients in the router.

#![allow(clippy::all)]

#[warn(clippy::all, clippy::too_many_lines)]
mod frames;

pub use frames::{Frames, steps_socket};
pub use prost::Message;

tonic::include_proto!("penstock.worker.v1");

/// Between `penstock route` and the servers behind it.
pub mod engine {
    tonic::include_proto!("penstock.engine.v1");
}
