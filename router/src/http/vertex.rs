//! `/vertex`: several prompts and chats in one request, as Vertex AI sends them.
//!
//! COMPAT: the failure of one instance fails the request with `Incomplete generation`; the log has the reason. A wrong model
//! is 404, as on the other routes.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::future::try_join_all;

use super::dialect::TgiJson;
use super::service::Service;
use super::{dialect, generate};
use crate::api::error::{ApiError, TgiErrorBody};
use crate::api::openai::ChatRequest;
use crate::api::vertex::{VertexInstance, VertexRequest, VertexResponse};
use crate::config::SamplingDefaults;
use crate::generation::{GenerationError, GenerationRequest, ValidationError};
use crate::telemetry::{RequestRecord, RequestSummary};

/// An error as TGI writes it on this route: `error` and `error_type` are the same.
#[derive(Debug)]
pub(super) struct VertexError(ApiError);

impl IntoResponse for VertexError {
    fn into_response(self) -> Response {
        let (status, message) = match &self.0 {
            ApiError::UnknownModel { .. } => {
                return dialect::render(self.0.tgi_status(), self.0.tgi_body(), self.0);
            }
            ApiError::Generation(GenerationError::Validation(ValidationError::NoInstances)) => {
                (StatusCode::UNPROCESSABLE_ENTITY, "Input validation error")
            }
            _ => (StatusCode::INTERNAL_SERVER_ERROR, "Incomplete generation"),
        };
        let body = TgiErrorBody { error: message.to_owned(), error_type: message };
        dialect::render(status, body, self.0)
    }
}

/// Generate a text for each instance of a Vertex AI request.
#[utoipa::path(
    post,
    path = "/vertex",
    tag = "Clouds",
    request_body = VertexRequest,
    responses(
        (status = 200, description = "A text for each instance, in the order of the instances.", body = VertexResponse),
        (status = 404, description = "An instance names a model that is not served; only with `--check-model-name`.", body = TgiErrorBody),
        (status = 500, description = "An instance failed; the log has the reason.", body = TgiErrorBody)
    )
)]
pub(super) async fn vertex(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    TgiJson(request): TgiJson<VertexRequest>,
) -> Result<Json<VertexResponse>, VertexError> {
    record.generates();
    if request.instances.is_empty() {
        return Err(VertexError(ValidationError::NoInstances.into()));
    }
    let answers = request.instances.into_iter().map(|instance| answer(&service, &record, instance));
    // The first failure drops the other instances, which aborts them.
    let answers = try_join_all(answers).await.map_err(VertexError)?;
    let mut summary = RequestSummary::default();
    answers.iter().for_each(|(_, cost)| summary.add(cost));
    record.answered(summary);
    Ok(Json(VertexResponse { predictions: answers.into_iter().map(|(text, _)| text).collect() }))
}

async fn answer(
    service: &Service,
    record: &RequestRecord,
    instance: VertexInstance,
) -> Result<(String, RequestSummary), ApiError> {
    match instance {
        VertexInstance::Generate(request) => {
            let answer = generate::answer(service, record, (*request).into()).await?;
            Ok((answer.response.generated_text, answer.summary))
        }
        VertexInstance::Chat(request) => Box::pin(answer_chat(service, record, *request)).await,
    }
}

/// COMPAT: the text as the model wrote it, tool calls not parsed; `stream` has no effect. The defaults are TGI's.
async fn answer_chat(
    service: &Service,
    record: &RequestRecord,
    request: ChatRequest,
) -> Result<(String, RequestSummary), ApiError> {
    service.model_name(request.model.as_deref())?;
    let adapter_id = service.adapter_named(request.model.as_deref());
    let request = request.into_generation(service.config(), &SamplingDefaults::NONE)?;
    let mut request = GenerationRequest { streams: false, ..request };
    request.parameters.adapter_id = adapter_id;
    if let Some(given) = request.parameters.extension.n.filter(|&n| n > 1) {
        return Err(ValidationError::Generations { max: 1, given }.into());
    }
    let (finished, summary) = service.generation().start(request, record).await?.collect().await?;
    Ok((finished.into_iter().map(|finished| finished.text).collect(), summary))
}
