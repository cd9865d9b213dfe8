//! TGI's response headers about the cost of an answer.

use axum::http::{HeaderMap, HeaderName, HeaderValue};

use super::service::Service;
use crate::telemetry::RequestSummary;

/// For a plain answer. Times are in whole milliseconds, except `x-compute-time` in seconds.
pub(super) fn of_answer(service: &Service, num_characters: usize, summary: &RequestSummary) -> HeaderMap {
    let mut headers = HeaderMap::new();
    insert(&mut headers, "x-compute-type", &service.config().compute_type);
    insert(&mut headers, "x-compute-time", summary.total().as_secs_f64());
    insert(&mut headers, "x-compute-characters", num_characters);
    insert(&mut headers, "x-total-time", summary.total().as_millis());
    insert(&mut headers, "x-validation-time", summary.validation.as_millis());
    insert(&mut headers, "x-queue-time", summary.queue.as_millis());
    insert(&mut headers, "x-inference-time", summary.inference.as_millis());
    insert(&mut headers, "x-time-per-token", summary.per_token().as_millis());
    insert(&mut headers, "x-prompt-tokens", summary.num_prompt_tokens);
    insert(&mut headers, "x-generated-tokens", summary.num_generated_tokens);
    headers
}

/// For a stream, whose cost is not known yet.
pub(super) fn of_stream(service: &Service, num_characters: usize) -> HeaderMap {
    let mut headers = HeaderMap::new();
    insert(&mut headers, "x-compute-type", &service.config().compute_type);
    insert(&mut headers, "x-compute-characters", num_characters);
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    headers
}

fn insert(headers: &mut HeaderMap, name: &'static str, value: impl ToString) {
    // Only the configured compute type can be invalid as a header; it is left out then.
    if let Ok(value) = HeaderValue::from_str(&value.to_string()) {
        headers.insert(HeaderName::from_static(name), value);
    }
}
