//! Routes of embedding models: `/embed`, and `/v1/embeddings`.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use super::dialect::{OpenAiError, OpenAiJson, TgiError, TgiJson};
use super::document::{OpenAiFailures, TgiFailures};
use super::header;
use super::service::Service;
use crate::api::error::{ApiError, EMBEDDING_NAMES};
use crate::api::openai::{EmbeddingList, EmbeddingRequest};
use crate::api::pooling::{check_dimensions, finish};
use crate::api::tei::EmbedRequest;
use crate::sequence::Task;
use crate::telemetry::RequestRecord;

/// Make embeddings: a vector for each input.
#[utoipa::path(
    post,
    path = "/embed",
    tag = "TEI",
    request_body = EmbedRequest,
    responses((status = 200, description = "A vector for each input, in their order.", body = Vec<Vec<f32>>), TgiFailures)
)]
pub(super) async fn embed(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    TgiJson(request): TgiJson<EmbedRequest>,
) -> Result<Response, TgiError> {
    Ok(vectors(&service, &record, request).await?)
}

/// Make embeddings: `/embed` at the model's own address.
#[utoipa::path(
    post,
    path = "/",
    tag = "TEI",
    request_body = EmbedRequest,
    responses((status = 200, description = "A vector for each input, in their order.", body = Vec<Vec<f32>>), TgiFailures)
)]
pub(super) async fn root(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    TgiJson(request): TgiJson<EmbedRequest>,
) -> Result<Response, TgiError> {
    Ok(vectors(&service, &record, request).await?)
}

async fn vectors(service: &Service, record: &RequestRecord, request: EmbedRequest) -> Result<Response, ApiError> {
    record.generates();
    let generation = service.generation();
    let (dimensions, normalizes) = (request.dimensions, request.normalize.unwrap_or(true));
    check_dimensions(dimensions, generation.pooling(Task::Embed)?)?;
    let request = request.into_pooling(&service.config().limits, generation.text().prompts())?;
    let num_characters = request.num_characters();
    let mut pooled = generation.pool(request, record).await?;
    finish(&mut pooled.vectors, dimensions, normalizes);
    record.answered(pooled.summary);
    Ok((header::of_answer(service, num_characters, &pooled.summary), Json(pooled.vectors)).into_response())
}

/// Make embeddings: a vector for each input.
#[utoipa::path(
    post,
    path = "/v1/embeddings",
    tag = "OpenAI",
    request_body = EmbeddingRequest,
    responses((status = 200, description = "A vector for each input, in their order.", body = EmbeddingList), OpenAiFailures)
)]
pub(super) async fn embeddings(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    OpenAiJson(request): OpenAiJson<EmbeddingRequest>,
) -> Result<Json<EmbeddingList>, OpenAiError> {
    Ok(Json(list(&service, &record, request).await.map_err(|error| OpenAiError::named(error, EMBEDDING_NAMES))?))
}

async fn list(service: &Service, record: &RequestRecord, request: EmbeddingRequest) -> Result<EmbeddingList, ApiError> {
    record.generates();
    let (generation, config) = (service.generation(), service.config());
    let (dimensions, format) = (request.dimensions, request.encoding_format.unwrap_or_default());
    let normalizes = request.normalize;
    let model = service.model_name(request.model.as_deref())?;
    let pooling = generation.pooling(Task::Embed)?;
    check_dimensions(dimensions, pooling)?;
    let request = request.into_pooling(&config.limits, generation.text().prompts())?;
    let mut pooled = generation.pool(request, record).await?;
    finish(&mut pooled.vectors, dimensions, normalizes.unwrap_or(pooling.is_normalized));
    record.answered(pooled.summary);
    Ok(EmbeddingList::new(model, pooled.vectors, format, &pooled.summary))
}
