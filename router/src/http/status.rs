//! Routes that report the served model, the limits and the metrics.

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};

use super::dialect::OpenAiError;
use super::service::Service;
use crate::api::error::{ApiError, OpenAiErrorBody};
use crate::api::openai::{Model, ModelList};
use crate::api::tgi::Info;
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
    metrics::load(&service.generation().stats(), service.generation().queued_tokens());
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], service.metrics().render()).into_response()
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
    })
}

/// List the served model.
#[utoipa::path(
    get,
    path = "/v1/models",
    tag = "OpenAI",
    responses((status = 200, description = "A list with one model.", body = ModelList))
)]
pub(super) async fn models(State(service): State<Service>) -> Json<ModelList> {
    Json(ModelList { object: "list", data: vec![served_model(&service)] })
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
    let served = &service.config().model_id;
    match id {
        Ok(Path(id)) if id == *served => Ok(Json(served_model(&service))),
        Ok(Path(id)) => {
            let message = format!("there is no model {id} here; the one that is served is {served}");
            Err(ApiError::NotFound(message).into())
        }
        Err(_) => Err(ApiError::NotFound("a model's id is UTF-8".to_owned()).into()),
    }
}

fn served_model(service: &Service) -> Model {
    let id = service.config().model_id.clone();
    // COMPAT: as in TGI, the creation time is unknown.
    Model { id: id.clone(), object: "model", created: 0, owned_by: id }
}
