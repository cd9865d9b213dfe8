//! Routes that report the served model, the limits and the metrics.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::dialect::OpenAiError;
use super::envelope;
use super::service::{SERVED, Service};
use crate::api::error::{ApiError, OpenAiErrorBody};
use crate::api::openai::{Model, ModelList, Version};
use crate::api::tgi::Info;
use crate::generation::AdapterReport;
use crate::telemetry::metrics;

/// COMPAT: TGI's name for its router, which scripts look for.
const ROUTER: &str = "text-generation-router";

/// Metrics for Prometheus.
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "Server",
    responses((status = 200, description = "Metrics in Prometheus's text format.", content_type = "text/plain", body = String))
)]
pub(super) async fn metrics(State(service): State<Service>) -> Response {
    metrics::load(&service.generation().stats(), service.queued_tokens());
    metrics::replicas(&service.generation().replicas());
    let mut text = service.metrics().render();
    if let Some(AdapterReport { max_loaded, loaded, waiting }) = service.generation().adapters().report() {
        text += &metrics::adapters(max_loaded, &loaded, &waiting, envelope::unix_seconds());
    }
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response()
}

/// The served model and the limits of requests.
#[utoipa::path(
    get,
    path = "/info",
    tag = "Server",
    responses((status = 200, description = "The model and the limits.", body = Info))
)]
pub(super) async fn info(State(service): State<Service>) -> Json<Info> {
    let config = service.config();
    let limits = &config.limits;
    Json(Info {
        model_id: config.model_id.clone(),
        model_sha: config.model_sha.clone(),
        model_pipeline_tag: config.pipeline_tag.clone(),
        max_concurrent_requests: limits.max_concurrent_requests,
        max_best_of: limits.max_best_of,
        max_stop_sequences: limits.max_stop_sequences,
        max_input_tokens: limits.max_input_tokens,
        max_total_tokens: limits.max_total_tokens,
        validation_workers: config.validation_workers,
        max_client_batch_size: limits.max_client_batch_size,
        router: ROUTER,
        version: env!("CARGO_PKG_VERSION"),
        sampling_defaults: config.sampling_defaults,
    })
}

/// The server's version.
#[utoipa::path(
    get,
    path = "/version",
    tag = "Server",
    responses((status = 200, description = "The version.", body = Version))
)]
pub(super) async fn version() -> Json<Version> {
    Json(Version { version: env!("CARGO_PKG_VERSION") })
}

/// List the names of the served model, and its LoRA adapters.
#[utoipa::path(
    get,
    path = "/v1/models",
    tag = "OpenAI",
    responses((status = 200, description = "An entry for each name of the served model, then one for each adapter.", body = ModelList))
)]
pub(super) async fn models(State(service): State<Service>) -> Json<ModelList> {
    let models = service.config().served_model_names.iter().map(|name| served_model(&service, name));
    let names = service.generation().adapters().names();
    let adapters = names.iter().map(|name| adapter(&service, name));
    Json(ModelList { object: "list", data: models.chain(adapters).collect() })
}

/// Get a model by its id.
#[utoipa::path(
    get,
    path = "/v1/models/{*id}",
    tag = "OpenAI",
    params(("id" = String, Path, description = "The model id; may contain slashes.")),
    responses(
        (status = 200, description = "The served model.", body = Model),
        (status = 404, description = "The server does not serve this model.", body = OpenAiErrorBody)
    )
)]
pub(super) async fn model(
    State(service): State<Service>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, OpenAiError> {
    let served = &service.config().served_model_names;
    match id {
        Ok(Path(id)) if service.generation().adapters().contains(&id) => Ok(Json(adapter(&service, &id))),
        // Requests that generate accept these names.
        Ok(Path(id)) if served.contains(&id) || id == SERVED && service.model_name(Some(SERVED)).is_ok() => {
            Ok(Json(served_model(&service, &id)))
        }
        Ok(Path(given)) => Err(ApiError::UnknownModel { given, served: served.join(", ") }.into()),
        Err(_) => Err(ApiError::NotFound("a model's id is UTF-8".to_owned()).into()),
    }
}

fn served_model(service: &Service, name: &str) -> Model {
    let config = service.config();
    Model {
        id: name.to_owned(),
        object: "model",
        created: service.started(),
        owned_by: name.to_owned(),
        root: config.model_id.clone(),
        parent: None,
        max_model_len: config.limits.max_total_tokens,
    }
}

fn adapter(service: &Service, name: &str) -> Model {
    Model { parent: Some(service.config().model_name().to_owned()), ..served_model(service, name) }
}
