//! The router: HTTP → generation → text → replicas → engine → scheduler → workers, and back as events.
//!
//! It never touches a tensor; the workers never see text, HTTP or a queue.

#![warn(clippy::too_many_lines)]

mod api;
pub mod config;
pub mod engine;
pub mod engine_server;
mod fetch;
mod generation;
pub mod generator;
mod http;
pub mod limits;
pub mod remote;
pub mod replica;
pub mod sequence;
mod serve;
pub mod telemetry;
pub mod text;
pub mod tls;
pub mod worker;

pub use config::{AllowedHost, AllowedHostError, BadDefault, Config, ImageUrlConfig, SamplingDefaults};
pub use generation::{AdapterDownload, AdapterPlace, Adapters, is_hub_id};
pub use http::{Listener, OriginError};
pub use serve::{ServeError, Services, serve};
