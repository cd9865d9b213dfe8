//! How the server is. Three things: whether it is worth keeping, whether it can take a request now, and whether what it
//! is doing gets on.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Serialize;
use utoipa::ToSchema;

use super::dialect::TgiError;
use super::document;
use super::service::Service;
use crate::api::error::ApiError;
use crate::generation::GenerationError;

/// How the server is; each of the three with the reason, where it is not so.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Health)]
pub(super) struct Report {
    /// It works, or will again without being started anew.
    live: Condition,
    /// It can generate now, and takes requests.
    ready: Condition,
    /// The oldest step of the model is no older than a step may be, or there is none.
    progressing: Condition,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HealthCondition)]
struct Condition {
    ok: bool,
    /// For people.
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

    /// Its status is that of one of the three.
    fn answer(self, asked: impl Fn(&Self) -> &Condition) -> (StatusCode, Json<Self>) {
        let status = if asked(&self).ok { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        (status, Json(self))
    }
}

/// Whether the server can generate.
#[utoipa::path(get, path = "/health", tag = "Server", responses(document::Health))]
pub(super) async fn health(State(service): State<Service>) -> Result<StatusCode, TgiError> {
    // COMPAT: no body when it is well, and always the same one when it is not.
    if Report::of(&service).ready.ok { Ok(StatusCode::OK) } else { Err(ApiError::Unhealthy.into()) }
}

/// The same as `/health`; SageMaker asks here.
#[utoipa::path(get, path = "/ping", tag = "Clouds", responses(document::Health))]
pub(super) async fn ping(service: State<Service>) -> Result<StatusCode, TgiError> {
    health(service).await
}

/// The same as `/health`.
#[utoipa::path(get, path = "/", tag = "Server", responses(document::Health))]
pub(super) async fn root(service: State<Service>) -> Result<StatusCode, TgiError> {
    health(service).await
}

/// Whether the server is worth keeping: a loss of its workers, which it repairs itself, is no reason to restart it.
#[utoipa::path(
    get,
    path = "/health/live",
    tag = "Server",
    responses(
        (status = 200, description = "It works, or will again without being started anew.", body = Report),
        (status = 503, description = "It is to be started anew.", body = Report)
    )
)]
pub(super) async fn live(State(service): State<Service>) -> (StatusCode, Json<Report>) {
    Report::of(&service).answer(|report| &report.live)
}

/// Whether the server takes requests: `/health` with the reasons.
#[utoipa::path(
    get,
    path = "/health/ready",
    tag = "Server",
    responses(
        (status = 200, description = "It takes requests.", body = Report),
        (status = 503, description = "It does not, for the reasons that are given.", body = Report)
    )
)]
pub(super) async fn ready(State(service): State<Service>) -> (StatusCode, Json<Report>) {
    Report::of(&service).answer(|report| &report.ready)
}
