//! The protocols, generated at build time from `worker.proto` and `engine.proto`, which are also their specifications.
//! Nothing is written by hand here: conversions live with their clients in the router.

#![allow(clippy::all)]

pub use prost::Message;

tonic::include_proto!("penstock.worker.v1");

/// Between `penstock route` and the servers behind it.
pub mod engine {
    tonic::include_proto!("penstock.engine.v1");
}
