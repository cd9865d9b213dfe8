//! vLLM's routes that add LoRA adapters to a running server, and remove them.

use axum::extract::State;

use super::dialect::{OpenAiError, OpenAiJson};
use super::document::OpenAiAdmissionFailures;
use super::service::Service;
use crate::api::adapter::{LoadAdapter, UnloadAdapter};
use crate::api::error::{ApiError, OpenAiErrorBody};

/// Add a LoRA adapter. Only with `--enable-lora-updates`.
#[utoipa::path(
    post,
    path = "/v1/load_lora_adapter",
    tag = "OpenAI",
    request_body = LoadAdapter,
    responses(
        (status = 200, description = "The adapter is loaded, and requests may name it as their model.", content_type = "text/plain", body = String),
        (status = 404, description = "The server runs without `--enable-lora-updates`.", body = OpenAiErrorBody),
        OpenAiAdmissionFailures
    )
)]
pub(super) async fn load(
    State(service): State<Service>,
    OpenAiJson(request): OpenAiJson<LoadAdapter>,
) -> Result<String, OpenAiError> {
    expect_enabled(&service)?;
    let place = request.place(&service.config().served_model_names)?;
    let name = &request.lora_name;
    let added = service.generation().add_adapter(name, place, request.load_inplace).await;
    added.map_err(ApiError::from)?;
    tracing::info!("added the adapter {name}");
    // COMPAT: vLLM's words, here and below.
    Ok(format!("Success: LoRA adapter '{name}' added successfully."))
}

/// Remove a LoRA adapter. Its running requests go on. Only with `--enable-lora-updates`.
#[utoipa::path(
    post,
    path = "/v1/unload_lora_adapter",
    tag = "OpenAI",
    request_body = UnloadAdapter,
    responses(
        (status = 200, description = "Requests may no longer name the adapter.", content_type = "text/plain", body = String),
        (status = 404, description = "There is no such adapter, or the server runs without `--enable-lora-updates`.", body = OpenAiErrorBody)
    )
)]
pub(super) async fn unload(
    State(service): State<Service>,
    OpenAiJson(UnloadAdapter { lora_name: name, .. }): OpenAiJson<UnloadAdapter>,
) -> Result<String, OpenAiError> {
    expect_enabled(&service)?;
    service.generation().remove_adapter(&name).map_err(ApiError::from)?;
    tracing::info!("removed the adapter {name}");
    Ok(format!("Success: LoRA adapter '{name}' removed successfully."))
}

/// COMPAT: 404, as on a server of vLLM's that lacks the routes.
fn expect_enabled(service: &Service) -> Result<(), ApiError> {
    if service.config().adapters.can_change {
        return Ok(());
    }
    Err(ApiError::NotFound(
        "adapters cannot be added and removed here; start the server with --enable-lora-updates".to_owned(),
    ))
}
