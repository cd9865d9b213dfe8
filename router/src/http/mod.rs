//! HTTP: routes, headers, event streams and admission. What requests mean is decided in `api`, what they do in `text`.

mod admission;
pub(crate) mod auth;
mod candidate;
mod chat;
mod completion;
pub(crate) mod connection;
mod dialect;
mod envelope;
mod generate;
mod header;
mod invocations;
mod logprob;
mod observe;
mod request_id;
mod running;
mod service;
mod side_by_side;
mod slow_body;
mod sse;
mod status;
mod tokenize;
mod vertex;
mod vertex_route;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

pub(crate) use service::Service;

use crate::api::error::ApiError;

/// `--cors-allow-origin` was given something that cannot be an origin.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not an origin; give something like https://example.org")]
pub struct OriginError(String);

pub(crate) fn router(service: Service) -> Result<Router, OriginError> {
    let config = service.config();
    let cors = cors(&config.cors_allow_origins)?;
    let max_body_bytes = config.payload_limit_bytes;
    let body_timeout = config.connections.body_timeout;
    let api_keys = config.api_keys.clone();
    let router = Router::new()
        .route("/", post(generate::compat).get(status::health))
        .route("/generate", post(generate::generate))
        .route("/generate_stream", post(generate::generate_stream))
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route("/v1/completions", post(completion::completions))
        .route("/v1/models", get(status::models))
        .route("/v1/models/{*id}", get(status::model))
        .route("/invocations", post(invocations::invocations))
        .route("/vertex", post(vertex::vertex))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/chat_tokenize", post(tokenize::chat_tokenize))
        .route("/info", get(status::info))
        .route("/health", get(status::health))
        .route("/ping", get(status::health))
        .route("/metrics", get(status::metrics))
        .fallback(unknown_route)
        .with_state(service)
        .layer(DefaultBodyLimit::max(max_body_bytes))
        .layer(middleware::from_fn_with_state(body_timeout, slow_body::limit))
        .layer(middleware::from_fn_with_state(api_keys, auth::require_key))
        .layer(middleware::from_fn(observe::observe))
        .layer(cors)
        .layer(middleware::from_fn(request_id::identify));
    Ok(router)
}

/// COMPAT: TGI's 404 has no body; OpenAI's clients expect an error object.
async fn unknown_route(request: Request) -> Response {
    let path = request.uri().path();
    if dialect::is_openai(path) {
        return dialect::OpenAiError(ApiError::NotFound(format!("there is no route {path}"))).into_response();
    }
    StatusCode::NOT_FOUND.into_response()
}

/// What scripts in a browser may read of an answer beside its body.
const EXPOSED_HEADERS: [HeaderName; 12] = [
    request_id::REQUEST_ID,
    axum::http::header::RETRY_AFTER,
    HeaderName::from_static("x-compute-type"),
    HeaderName::from_static("x-compute-time"),
    HeaderName::from_static("x-compute-characters"),
    HeaderName::from_static("x-total-time"),
    HeaderName::from_static("x-validation-time"),
    HeaderName::from_static("x-queue-time"),
    HeaderName::from_static("x-inference-time"),
    HeaderName::from_static("x-time-per-token"),
    HeaderName::from_static("x-prompt-tokens"),
    HeaderName::from_static("x-generated-tokens"),
];

/// Any request header is allowed: browsers' SDKs send `Authorization` and some of their own.
fn cors(origins: &[String]) -> Result<CorsLayer, OriginError> {
    let allowed = if origins.is_empty() {
        AllowOrigin::any()
    } else {
        let parse = |origin: &String| {
            let is_origin = origin == "*" || origin.contains("://");
            HeaderValue::from_str(origin).ok().filter(|_| is_origin).ok_or_else(|| OriginError(origin.clone()))
        };
        let origins = origins.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        if origins.iter().any(|origin| origin == "*") { AllowOrigin::any() } else { AllowOrigin::list(origins) }
    };
    Ok(CorsLayer::new()
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED_HEADERS)
        .allow_origin(allowed))
}
