//! `/tokenize` and `/chat_tokenize`: what a prompt or a chat becomes before anything is generated.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;

use super::chat;
use super::dialect::TgiError;
use super::service::Service;
use crate::api::error::ApiError;
use crate::api::openai::ChatRequest;
use crate::api::tgi::{ChatTokenizeResponse, GenerateRequest, SimpleToken};
use crate::text::TokenSpan;

/// Tokenize a prompt.
#[utoipa::path(
    post,
    path = "/tokenize",
    tag = "TGI",
    request_body = GenerateRequest,
    responses((status = 200, description = "The prompt's tokens.", body = Vec<SimpleToken>))
)]
// COMPAT: of the parameters, none has an effect, `truncate` neither.
pub(super) async fn tokenize(
    State(service): State<Service>,
    Json(request): Json<GenerateRequest>,
) -> Result<Json<Vec<SimpleToken>>, TgiError> {
    Ok(Json(tokens(&service, &request.inputs.into(), true).await?))
}

/// Apply the chat template and tokenize the result.
#[utoipa::path(
    post,
    path = "/chat_tokenize",
    tag = "TGI",
    request_body = ChatRequest,
    responses((status = 200, description = "The prompt and its tokens.", body = ChatTokenizeResponse))
)]
// The template has written the special tokens.
pub(super) async fn chat_tokenize(
    State(service): State<Service>,
    Json(mut request): Json<ChatRequest>,
) -> Result<Json<ChatTokenizeResponse>, TgiError> {
    let text = chat::render(&service, &mut request).await?.text;
    let tokenize_response = tokens(&service, &text, false).await?;
    Ok(Json(ChatTokenizeResponse { tokenize_response, templated_text: text.as_ref().into() }))
}

async fn tokens(service: &Service, text: &Arc<str>, add_special_tokens: bool) -> Result<Vec<SimpleToken>, ApiError> {
    let spans = service.text().encode_spans(Arc::clone(text), add_special_tokens).await?;
    let token = |span: TokenSpan| SimpleToken {
        id: span.id,
        text: text.get(span.start..span.stop).unwrap_or_default().to_owned(),
        start: span.start,
        stop: span.stop,
    };
    Ok(spans.into_iter().map(token).collect())
}
