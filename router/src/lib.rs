//! The router: HTTP → generation → text → replicas → engine → scheduler → workers, and back as events.
//!
//! It never touches a tensor; the workers never see text, HTTP or a queue.

mod api;
pub mod config;
pub mod engine;
mod fetch;
mod generation;
mod http;
pub mod limits;
pub mod remote;
pub mod replica;
pub mod sequence;
mod serve;
pub mod telemetry;
pub mod text;
pub mod worker;

pub use config::Config;
pub use fetch::{AllowedHost, AllowedHostError, ImageUrlConfig};
pub use generation::{AdapterDownload, AdapterPlace, Adapters, BadDefault, SamplingDefaults, is_hub_id};
pub use http::{Listener, OriginError};
pub use serve::{ServeError, Services, serve};
