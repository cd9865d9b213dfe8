//! The router from its port to a scripted worker's socket: disconnects, and traces.
#![allow(clippy::unwrap_used, unreachable_pub, reason = "helpers of tests are tests")]

mod collector;
#[allow(dead_code, reason = "shared with tests/engine.rs")]
#[path = "../fake_worker/mod.rs"]
mod fake_worker;
#[allow(dead_code, reason = "shared with tests/http")]
#[path = "../http/server.rs"]
mod http_server;
mod leave;
#[allow(dead_code, reason = "shared with tests/http")]
#[path = "../http/model.rs"]
mod model;
mod server;
mod traces;
