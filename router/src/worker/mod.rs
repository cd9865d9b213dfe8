//! The workers as the router sees them: a group of ranks that load a model, warm up, and execute steps.
//!
//! Everything about gRPC and protobuf ends in this room; its callers know plans, reports and `WorkerError`.

mod convert;
mod error;
mod grammar;
mod group;
mod probe;
mod rank;
mod step;

pub use error::WorkerError;
pub use grammar::GrammarCompiler;
pub use group::{Description, Group, LoadOptions, Phase, Pool, WarmUpOptions};
pub use rank::RankHealth;
pub use step::{Steps, WorkerTiming};

pub(crate) use probe::HealthProbe;
pub(crate) use step::{Output, StepReport};

/// What this build speaks; a worker of another version is refused.
pub const PROTOCOL_VERSION: u32 = penstock_proto::ProtocolVersion::Current as u32;
