//! The router over real HTTP, with an engine that the test scripts.
#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod admission;
mod chat;
mod completion;
mod drain;
mod error;
mod generate;
mod model;
mod server;
mod status;
mod stream;
