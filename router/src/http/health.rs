//! Health: whether the server can recover by itself, whether it accepts requests now, and whether steps make progress.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::dialect::TgiError;
use super::document;
use super::playground;
use super::service::Service;
use crate::api::error::ApiError;
use crate::generation::GenerationError;

/// Health of the server, with the reason for each condition that does not hold.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Health)]
pub(super) struct Report {
    /// The server works, or recovers without a restart.
    live: Condition,
    /// The server accepts requests and can generate.
    ready: Condition,
    /// No step of the model exceeds the step deadline.
    progressing: Condition,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HealthCondition)]
struct Condition {
    ok: bool,
    /// Why the condition does not hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl Condition {
    fn unless(reason: Option<String>) -> Self {
        Self { ok: reason.is_none(), reason }
    }
}

impl Report {
    fn of(service: &Service) -> Self {
        let health = service.generation().health();
        let reason = health.public_reason();
        let draining = service.generation().is_draining().then(|| GenerationError::ShuttingDown.to_string());
        Self {
            live: Condition::unless(reason.clone().filter(|_| health.is_permanent())),
            progressing: Condition::unless(reason.clone().filter(|_| health.is_stuck())),
            ready: Condition::unless(draining.or(reason)),
        }
    }

    /// The report, with the status of one condition.
    fn answer(self, condition: impl Fn(&Self) -> &Condition) -> (StatusCode, Json<Self>) {
        let status = if condition(&self).ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        (status, Json(self))
    }
}

/// Whether the server can generate.
#[utoipa::path(get, path = "/health", tag = "Server", responses(document::Health))]
pub(super) async fn health(State(service): State<Service>) -> Result<StatusCode, TgiError> {
    // COMPAT: as in TGI, no body when healthy, and always the same body when not.
    if Report::of(&service).ready.ok { Ok(StatusCode::OK) } else { Err(ApiError::Unhealthy.into()) }
}

/// The same as `/health`, for SageMaker.
#[utoipa::path(get, path = "/ping", tag = "Clouds", responses(document::Health))]
pub(super) async fn ping(service: State<Service>) -> Result<StatusCode, TgiError> {
    health(service).await
}

/// The same as `/health`. A browser, which asks for `text/html`, gets the playground.
#[utoipa::path(get, path = "/", tag = "Server", responses(document::Health))]
pub(super) async fn root(service: State<Service>, headers: HeaderMap) -> Response {
    if service.config().playground && playground::wants_page(&headers) {
        return playground::page();
    }
    health(service).await.into_response()
}

/// Liveness: fails only when a restart of the server is needed. The server restarts lost workers itself.
#[utoipa::path(
    get,
    path = "/health/live",
    tag = "Server",
    responses(
        (status = 200, description = "The server works, or recovers without a restart.", body = Report),
        (status = 503, description = "The server must be restarted.", body = Report)
    )
)]
pub(super) async fn live(State(service): State<Service>) -> (StatusCode, Json<Report>) {
    Report::of(&service).answer(|report| &report.live)
}

/// Readiness: `/health` with the reasons.
#[utoipa::path(
    get,
    path = "/health/ready",
    tag = "Server",
    responses(
        (status = 200, description = "The server accepts requests.", body = Report),
        (status = 503, description = "The server accepts no requests; the body has the reasons.", body = Report)
    )
)]
pub(super) async fn ready(State(service): State<Service>) -> (StatusCode, Json<Report>) {
    Report::of(&service).answer(|report| &report.ready)
}
