//! OpenTelemetry traces of requests (docs/adr/metrics-and-traces.md).
//!
//! No function is instrumented. A request's spans are built once, when its record is closed, from the times that its
//! record and its sequences' timelines hold, and wait in a bounded queue for the exporter. Never the content of a request.

mod context;
mod export;
mod request;
mod span;

pub(super) use context::TraceContext;
pub(crate) use export::Traces;
pub use export::TracesError;
pub(super) use request::RequestTrace;
pub(crate) use request::{Operation, RequestParameters};
pub(crate) use span::Exchange;
pub(super) use span::{ClosedRequest, spans};
