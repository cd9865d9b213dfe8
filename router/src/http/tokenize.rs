//! `/tokenize` and `/chat_tokenize`: the tokens of a prompt or a chat. Both take a permit, as generating requests do.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;

use super::dialect::TgiError;
use super::document::AdmissionFailures;
use super::service::Service;
use crate::api::openai::ChatRequest;
use crate::api::tgi::{ChatTokenizeResponse, GenerateRequest, SimpleToken};
use crate::generation::TokenizedChat;
use crate::text::TokenSpan;

/// Tokenize a prompt.
#[utoipa::path(
    post,
    path = "/tokenize",
    tag = "TGI",
    request_body = GenerateRequest,
    responses((status = 200, description = "The prompt's tokens.", body = Vec<SimpleToken>), AdmissionFailures)
)]
// COMPAT: the parameters have no effect, not even `truncate`.
pub(super) async fn tokenize(
    State(service): State<Service>,
    Json(request): Json<GenerateRequest>,
) -> Result<Json<Vec<SimpleToken>>, TgiError> {
    let text = request.inputs.into();
    let spans = service.generation().tokenize(Arc::clone(&text)).await?;
    Ok(Json(tokens(&text, spans)))
}

/// Apply the chat template and tokenize the result.
#[utoipa::path(
    post,
    path = "/chat_tokenize",
    tag = "TGI",
    request_body = ChatRequest,
    responses((status = 200, description = "The prompt and its tokens.", body = ChatTokenizeResponse), AdmissionFailures)
)]
pub(super) async fn chat_tokenize(
    State(service): State<Service>,
    Json(request): Json<ChatRequest>,
) -> Result<Json<ChatTokenizeResponse>, TgiError> {
    let TokenizedChat { text, spans } = service.generation().tokenize_chat(request.into_chat()?).await?;
    Ok(Json(ChatTokenizeResponse { tokenize_response: tokens(&text, spans), templated_text: text.as_ref().into() }))
}

fn tokens(text: &str, spans: Vec<TokenSpan>) -> Vec<SimpleToken> {
    let token = |span: TokenSpan| SimpleToken {
        id: span.id,
        text: text.get(span.start..span.stop).unwrap_or_default().to_owned(),
        start: span.start,
        stop: span.stop,
    };
    spans.into_iter().map(token).collect()
}
