//! What the server says about itself: metrics, and one log line per request. Never the content of a request.

pub mod metrics;
mod record;

pub(crate) use record::{RequestRecord, RequestSummary};
