//! vLLM's requests that add LoRA adapters to a running server, and remove them.

use std::path::{Path, PathBuf};

use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::ToSchema;

use super::error::ApiError;
use super::field::or_default;
use crate::generation::AdapterUpdateError;

/// An adapter to add.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"lora_name": "sql", "lora_path": "/adapters/sql"}))]
pub(crate) struct LoadAdapter {
    /// The name by which requests ask for it.
    pub(crate) lora_name: String,
    /// Absolute path of its folder on the server, in PEFT's layout.
    #[schema(value_type = String)]
    lora_path: PathBuf,
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
    /// The adapter's folder. `served`: the names of the model, which adapters cannot have.
    pub(crate) fn folder(&self, served: &[String]) -> Result<&Path, ApiError> {
        if self.lora_name.is_empty() || served.contains(&self.lora_name) {
            let reason = format!("`lora_name` is {:?}, must be a name that the model does not have", self.lora_name);
            return Err(invalid("lora_name", reason));
        }
        if !self.lora_path.is_absolute() {
            let given = self.lora_path.display();
            return Err(invalid("lora_path", format!("`lora_path` is {given}, must be an absolute path of a folder")));
        }
        Ok(&self.lora_path)
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
