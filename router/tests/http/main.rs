//! The router over real HTTP, with an engine that the test scripts.

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
