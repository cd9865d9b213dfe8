//! How a request ended.

use super::metrics::Failure;
use super::summary::RequestSummary;

#[derive(Clone, Debug)]
pub(super) enum Outcome {
    Answered(RequestSummary),
    /// `detail` is for the log, when the server is at fault.
    Failed {
        failure: Option<Failure>,
        error_type: &'static str,
        detail: Option<String>,
    },
}
