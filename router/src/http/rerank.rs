//! Routes of rerankers: `/rerank`, and `/v1/rerank`.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use super::dialect::{OpenAiError, OpenAiJson, TgiError, TgiJson};
use super::document::{OpenAiFailures, TgiFailures};
use super::header;
use super::service::Service;
use crate::api::error::{ApiError, RERANK_NAMES};
use crate::api::rerank::{DocumentsRequest, RankedDocuments};
use crate::api::tei::{Rank, RerankRequest, probability};
use crate::generation::Pooled;
use crate::telemetry::RequestRecord;

/// Score how relevant texts are to a query.
#[utoipa::path(
    post,
    path = "/rerank",
    tag = "TEI",
    request_body = RerankRequest,
    responses((status = 200, description = "The texts' scores, the most relevant text first.", body = Vec<Rank>), TgiFailures)
)]
pub(super) async fn rerank(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    TgiJson(request): TgiJson<RerankRequest>,
) -> Result<Response, TgiError> {
    record.generates();
    let (is_raw, returns_text) = (request.raw_scores, request.return_text);
    let (texts, request) = request.into_pooling(&service.config().limits)?;
    let num_characters = request.num_characters();
    let pooled = service.generation().pool(request, &record).await?;
    record.answered(pooled.summary);
    let scores = logits(&pooled).map(|logit| if is_raw { logit } else { probability(logit) }).collect();
    let ranks = Rank::list(scores, returns_text.then_some(texts));
    Ok((header::of_answer(&service, num_characters, &pooled.summary), Json(ranks)).into_response())
}

/// Score how relevant documents are to a query, as Cohere's and Jina's routes do.
#[utoipa::path(
    post,
    path = "/v1/rerank",
    tag = "OpenAI",
    request_body = DocumentsRequest,
    responses(
        (status = 200, description = "The documents' scores, the most relevant document first.", body = RankedDocuments),
        OpenAiFailures
    )
)]
pub(super) async fn rerank_documents(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    OpenAiJson(request): OpenAiJson<DocumentsRequest>,
) -> Result<Json<RankedDocuments>, OpenAiError> {
    Ok(Json(documents(&service, &record, request).await.map_err(|error| OpenAiError::named(error, RERANK_NAMES))?))
}

async fn documents(
    service: &Service,
    record: &RequestRecord,
    request: DocumentsRequest,
) -> Result<RankedDocuments, ApiError> {
    record.generates();
    let model = service.model_name(request.model.as_deref())?;
    let (top_n, returns_documents) = (request.top_n, request.return_documents);
    let (texts, request) = request.into_pooling(&service.config().limits)?;
    let pooled = service.generation().pool(request, record).await?;
    record.answered(pooled.summary);
    let scores = logits(&pooled).map(probability).collect();
    let texts = returns_documents.then_some(texts);
    Ok(RankedDocuments::new(model, scores, texts, top_n, &pooled.summary))
}

fn logits(pooled: &Pooled) -> impl Iterator<Item = f32> {
    pooled.vectors.iter().map(|vector| vector.first().copied().unwrap_or_default())
}
