//! What the server says about itself: metrics, and one log line per request. Never the content of a request.

mod identity;
pub mod metrics;
mod record;
mod table;

pub(crate) use identity::RequestIdentity;
pub(crate) use record::{RequestRecord, RequestSummary};
