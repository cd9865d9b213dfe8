//! Metrics, and one log line per request. Never the content of a request.

mod identity;
mod label;
mod metric;
pub mod metrics;
mod record;
mod summary;
mod table;

pub(crate) use identity::RequestIdentity;
pub(crate) use record::RequestRecord;
pub(crate) use summary::RequestSummary;
