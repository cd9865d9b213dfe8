//! vLLM's requests that add LoRA adapters to a running server, and remove them.

use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::ToSchema;

use super::error::ApiError;
use super::field::or_default;
use crate::generation::{AdapterPlace, AdapterUpdateError};

/// An adapter to add.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"lora_name": "sql", "lora_path": "/adapters/sql"}))]
pub(crate) struct LoadAdapter {
    /// The name by which requests ask for it.
    pub(crate) lora_name: String,
    /// Absolute path of its folder on the server, in PEFT's layout; or its id on the hub, `owner/name` or `owner/name@revision`.
    lora_path: String,
    /// Whether it may replace an adapter with its name.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) load_inplace: bool,
}

/// An adapter to remove.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"lora_name": "sql"}))]
pub(crate) struct UnloadAdapter {
    pub(crate) lora_name: String,
    /// vLLM's number of the adapter; without effect.
    #[serde(rename = "lora_int_id")]
    _lora_int_id: Option<u64>,
}

impl LoadAdapter {
    /// The location of the adapter. `served`: the names of the model, which adapters cannot have.
    pub(crate) fn place(&self, served: &[String]) -> Result<AdapterPlace, ApiError> {
        if self.lora_name.is_empty() || served.contains(&self.lora_name) {
            let reason = format!("`lora_name` is {:?}, must be a name that the model does not have", self.lora_name);
            return Err(invalid("lora_name", reason));
        }
        AdapterPlace::read(&self.lora_path).ok_or_else(|| {
            let given = &self.lora_path;
            let reason = format!("`lora_path` is {given:?}, must be an absolute path of a folder, or an id on the hub");
            invalid("lora_path", reason)
        })
    }
}

impl From<AdapterUpdateError> for ApiError {
    fn from(error: AdapterUpdateError) -> Self {
        let message = error.to_string();
        match error {
            AdapterUpdateError::Taken(_) => invalid("lora_name", message),
            AdapterUpdateError::Unusable(_) => invalid("lora_path", message),
            AdapterUpdateError::Unknown(_) => Self::NotFound(message),
            AdapterUpdateError::Generation(error) => error.into(),
        }
    }
}

fn invalid(param: &str, message: String) -> ApiError {
    ApiError::Malformed { status: StatusCode::BAD_REQUEST, message, param: Some(param.to_owned()) }
}
