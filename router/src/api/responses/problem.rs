//! Errors that name a part of a request.

use serde_json::Value;

use crate::generation::ValidationError;

pub(super) fn problem(path: &str, problem: &str) -> ValidationError {
    ValidationError::Item { path: path.to_owned(), problem: problem.to_owned() }
}

/// Whether a value is absent or empty; it must be, if it is not supported.
pub(super) fn refuse_given(fields: &[(&'static str, &Option<Value>, &'static str)]) -> Result<(), ValidationError> {
    match fields.iter().find(|(_, value, _)| crate::api::field::is_given(value.as_ref())) {
        Some(&(field, _, why)) => Err(ValidationError::Unsupported { field, why }),
        None => Ok(()),
    }
}
