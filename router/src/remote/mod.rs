//! The engine protocol (proto/engine.proto): its messages, and a router's client of an engine on another server.
//!
//! Sequences cross as tokens. Everything that is needed to continue one stays with the router
//! (docs/adr/replicas-and-routing.md).

mod access;
mod client;
pub(crate) mod convert;
mod description;
mod error;
mod totals;

pub use access::{Access, UrlError};
pub use client::Remote;
pub(crate) use client::{Client, SequenceUpdate};
pub(crate) use description::ServerState;
pub use description::{Properties, RequestLimits, ServerDescription};
pub use error::RemoteError;
pub(crate) use totals::Totals;

use std::time::Duration;

/// The version of the engine protocol that this build speaks; a server with another version is not used.
pub const PROTOCOL_VERSION: u32 = penstock_proto::engine::ProtocolVersion::Current as u32;

/// A sequence with images carries them.
pub(crate) const MAX_MESSAGE_BYTES: usize = 64 << 20;
/// How often a server reports its state while nothing changes.
pub(crate) const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// Flow-control window of a connection, which all its sequences share.
pub(crate) const CONNECTION_WINDOW_BYTES: u32 = 4 << 20;
