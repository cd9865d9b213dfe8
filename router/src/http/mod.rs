//! HTTP: connections, routes, keys, headers, event streams, and the rendering of answers in each dialect.
//!
//! A generating handler extracts its request (`api`), starts it (`generation`) and renders the deltas.

mod adapter;
mod auth;
mod body_drain;
mod candidate;
mod chat;
mod completion;
pub(crate) mod connection;
mod content_encoding;
mod dialect;
mod document;
mod embed;
mod envelope;
mod generate;
mod guarded_body;
mod header;
mod health;
mod invocations;
mod joined_writes;
mod key_hash;
mod logprob;
mod message_answer;
mod messages;
mod observe;
mod openai_answer;
mod playground;
mod render;
mod request_id;
mod rerank;
mod response_store;
mod responses;
mod service;
mod slow_body;
mod socket;
mod sse;
mod stalled_client;
mod status;
mod tokenize;
mod vertex;
mod vertex_route;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::http::{HeaderName, HeaderValue, Method};
use axum::middleware;
use axum::response::Response;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};
use utoipa::OpenApi as _;
use utoipa::openapi::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) use service::Service;
pub use socket::Listener;

use crate::api::error::ApiError;
use crate::limits::ConnectionLimits;
use crate::sequence::Task;
use crate::telemetry::WARNING;

/// A value of `--cors-allow-origin` is not an origin.
#[derive(Debug, thiserror::Error)]
#[error("`{0}` is not an origin; give something like https://example.org")]
pub struct OriginError(String);

pub(crate) fn router(service: Service) -> Result<Router, OriginError> {
    let config = service.config();
    let cors = cors(&config.cors_allow_origins)?;
    let max_body_bytes = config.payload_limit_bytes;
    let ConnectionLimits { body_timeout, client_timeout, .. } = config.connections;
    let api_keys = config.api_keys.clone();
    let traces = service.traces().cloned();
    let serves_embeddings = config.pooling.as_ref().is_some_and(|pooling| pooling.task == Task::Embed);
    let (router, mut document) = routes(serves_embeddings);
    document::set_sampling_defaults(&mut document, &config.sampling_defaults);
    let playground = if config.playground { playground::routes() } else { Router::new() };
    let router = router
        .merge(document::pages(document))
        .merge(playground)
        .fallback(unknown_route)
        .method_not_allowed_fallback(unknown_method)
        .with_state(service)
        .layer(middleware::from_fn(content_encoding::decode))
        .layer(DefaultBodyLimit::max(max_body_bytes))
        .layer(middleware::from_fn_with_state(body_timeout, slow_body::limit))
        .layer(middleware::from_fn_with_state(api_keys, auth::require_key))
        .layer(middleware::from_fn_with_state(traces.clone(), observe::observe))
        .layer(middleware::from_fn_with_state(client_timeout, stalled_client::limit))
        .layer(middleware::from_fn(body_drain::discard))
        .layer(cors)
        .layer(middleware::from_fn_with_state(traces, request_id::identify));
    Ok(router)
}

/// All routes of the API, and the OpenAPI document that describes them.
fn routes(serves_embeddings: bool) -> (Router<Service>, OpenApi) {
    // COMPAT: clients of single models post to the root.
    let root =
        if serves_embeddings { routes!(embed::root, health::root) } else { routes!(generate::compat, health::root) };
    let (router, mut document) = OpenApiRouter::with_openapi(document::Outline::openapi())
        .routes(root)
        .routes(routes!(generate::generate))
        .routes(routes!(generate::generate_stream))
        .routes(routes!(tokenize::tokenize))
        .routes(routes!(tokenize::detokenize))
        .routes(routes!(tokenize::chat_tokenize))
        .routes(routes!(chat::chat_completions))
        .routes(routes!(completion::completions))
        .routes(routes!(render::chat_completions))
        .routes(routes!(render::completions))
        .routes(routes!(embed::embeddings))
        .routes(routes!(embed::embed))
        .routes(routes!(rerank::rerank))
        .routes(routes!(rerank::rerank_documents))
        .routes(routes!(responses::responses))
        .routes(routes!(responses::input_tokens))
        .routes(routes!(responses::compact))
        .routes(routes!(responses::response, responses::delete))
        .routes(routes!(responses::input_items))
        .routes(routes!(responses::cancel))
        .routes(routes!(messages::messages))
        .routes(routes!(messages::count_tokens))
        .routes(routes!(adapter::load))
        .routes(routes!(adapter::unload))
        .routes(routes!(status::models))
        .routes(routes!(status::model))
        .routes(routes!(invocations::invocations))
        .routes(routes!(vertex::vertex))
        .routes(routes!(status::info))
        .routes(routes!(status::version))
        .routes(routes!(health::health))
        .routes(routes!(health::live))
        .routes(routes!(health::ready))
        .routes(routes!(health::ping))
        .routes(routes!(status::metrics))
        .split_for_parts();
    document::complete(&mut document);
    (router, document)
}

async fn unknown_route(request: Request) -> Response {
    let path = request.uri().path();
    dialect::error_response(path, ApiError::NotFound(format!("there is no route {path}")))
}

async fn unknown_method(request: Request) -> Response {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("the route {path} does not accept {method}; the header `allow` says what it accepts");
    dialect::error_response(path, ApiError::Method(message))
}

/// Response headers that scripts in a browser may read.
const EXPOSED_HEADERS: [HeaderName; 14] = [
    request_id::REQUEST_ID,
    request_id::TRACEPARENT,
    axum::http::header::RETRY_AFTER,
    HeaderName::from_static(WARNING),
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

/// Allows any request header: browser SDKs send `Authorization` and headers of their own.
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
        .allow_methods([Method::GET, Method::POST, Method::DELETE])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED_HEADERS)
        .allow_origin(allowed))
}
