//! Metrics, and one log line and one trace per request. Never the content of a request.

mod identity;
mod label;
mod metric;
pub mod metrics;
mod outcome;
mod record;
mod summary;
mod table;
mod trace;
mod warning;

pub(crate) use identity::RequestIdentity;
pub(crate) use record::RequestRecord;
pub(crate) use summary::RequestSummary;
pub use trace::TracesError;
pub(crate) use trace::{Exchange, Operation, RequestParameters, Traces};
pub(crate) use warning::{WARNING, Warnings};
