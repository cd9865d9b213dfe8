//! `/v1/completions/render` and `/v1/chat/completions/render`, vLLM's routes: the tokens of a request's prompts. The request
//! is checked as the route without `/render` checks it, so that a client knows beforehand whether it will be refused.

use axum::extract::State;
use axum::{Extension, Json};

use super::dialect::{OpenAiError, OpenAiJson};
use super::document::OpenAiFailures;
use super::service::Service;
use crate::api::openai::{ChatRequest, CompletionRequest, Rendered};
use crate::generation::{FieldNames, GenerationRequest, StartedPrompt};
use crate::telemetry::RequestRecord;

/// Check a completion, and render its prompts without generating.
#[utoipa::path(
    post,
    path = "/v1/completions/render",
    tag = "OpenAI",
    request_body = CompletionRequest,
    responses((status = 200, description = "The tokens of each prompt.", body = Vec<Rendered>), OpenAiFailures)
)]
pub(super) async fn completions(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    OpenAiJson(request): OpenAiJson<CompletionRequest>,
) -> Result<Json<Vec<Rendered>>, OpenAiError> {
    let (model, names) = (request.model.clone(), request.names());
    let (generation, _) = request.into_generation(service.config(), &service.config().sampling_defaults)?;
    rendered(&service, &record, model.as_deref(), generation, names).await.map(Json)
}

/// Check a chat, and render its prompt without generating.
#[utoipa::path(
    post,
    path = "/v1/chat/completions/render",
    tag = "OpenAI",
    request_body = ChatRequest,
    responses((status = 200, description = "The tokens of the prompt.", body = Rendered), OpenAiFailures)
)]
pub(super) async fn chat_completions(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    OpenAiJson(request): OpenAiJson<ChatRequest>,
) -> Result<Json<Rendered>, OpenAiError> {
    let (model, names) = (request.model.clone(), request.names());
    let defaults = &service.config().sampling_defaults;
    let generation = request.into_generation(service.config(), defaults);
    let generation = generation.map_err(|error| OpenAiError::named(error, names))?;
    let mut rendered = rendered(&service, &record, model.as_deref(), generation, names).await?;
    Ok(Json(rendered.remove(0)))
}

/// One for each prompt, of which a request has at least one.
async fn rendered(
    service: &Service,
    record: &RequestRecord,
    model: Option<&str>,
    mut request: GenerationRequest,
    names: FieldNames,
) -> Result<Vec<Rendered>, OpenAiError> {
    let served = service.model_name(model)?;
    request.parameters.adapter_id = service.adapter_named(model);
    let prompts = service.generation().render(request, record).await;
    let prompts = prompts.map_err(|error| OpenAiError::named(error, names))?;
    let rendered = |(prompt, max_tokens): (_, u32)| {
        let StartedPrompt { token_ids, .. } = prompt;
        Rendered { model: served.clone(), token_ids, max_tokens }
    };
    Ok(prompts.into_iter().map(rendered).collect())
}
