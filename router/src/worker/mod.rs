//! The client of a worker group: all ranks of one model copy load it, warm up and execute steps as one.
//!
//! Its callers know plans, reports and `WorkerError`.

mod adapter;
pub(crate) mod convert;
mod description;
mod endpoint;
mod error;
mod grammar;
mod group;
mod image;
mod options;
mod progress;
mod rank;
mod report;
mod step;

pub use description::{Description, Phase};
pub use endpoint::{Endpoint, WORKER_NAME, WorkerTls};
pub use error::WorkerError;
pub use group::{Group, HealthProbe};
pub use options::{LoadOptions, Pool, WarmUpOptions};
pub use progress::{DeviceProgress, RankProgress};

pub(crate) use adapter::AdapterLoader;
pub(crate) use grammar::GrammarCompiler;
pub(crate) use image::ImageEncoder;
pub(crate) use report::{Fault, Output, OutputError, StepReport, WorkerTiming};
pub(crate) use step::Steps;

/// The version of the worker protocol that this build speaks; a worker with another version is refused.
pub const PROTOCOL_VERSION: u32 = penstock_proto::ProtocolVersion::Current as u32;
