//! The worker protocol, generated at build time from `worker.proto`, which is also its specification.
//! Nothing is written by hand here: conversions live with the router's worker client.

#![allow(clippy::all)]

tonic::include_proto!("penstock.worker.v1");
