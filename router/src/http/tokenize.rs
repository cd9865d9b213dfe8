//! `/tokenize`, `/detokenize` and `/chat_tokenize`: the tokens of a prompt or a chat. All take a permit, as generating
//! requests do.

use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{FromRequest, Request, State};
use axum::response::{IntoResponse, Response};
use serde::Deserialize;
use serde::de::IgnoredAny;
use utoipa::ToSchema;

use super::dialect::{DETOKENIZE, OpenAiError, OpenAiJson, TOKENIZE, TgiError, TgiJson};
use super::document::{AdmissionFailures, EitherAdmissionFailures, OpenAiAdmissionFailures};
use super::service::Service;
use crate::api::openai::{ChatRequest, DetokenizeRequest, Detokenized, TokenizeChat, TokenizePrompt, Tokenized};
use crate::api::tgi::{ChatTokenizeResponse, GenerateRequest, SimpleToken, split_images};
use crate::generation::TokenizedChat;
use crate::text::TokenSpan;

/// A text in TGI's shape, or a text or a chat in vLLM's.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes a body of which only one shape is read")]
enum TokenizeRequest {
    Tgi(Box<GenerateRequest>),
    Prompt(TokenizePrompt),
    Chat(Box<TokenizeChat>),
}

/// The tokens in the shape of the request.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "describes two answers")]
enum TokenizeAnswer {
    Tgi(Vec<SimpleToken>),
    Vllm(Tokenized),
}

/// The fields that tell the shapes apart.
#[derive(Default, Deserialize)]
struct Markers {
    inputs: Option<IgnoredAny>,
    prompt: Option<IgnoredAny>,
    messages: Option<IgnoredAny>,
}

/// Tokenize a prompt or a chat.
#[utoipa::path(
    post,
    path = TOKENIZE,
    tag = "TGI",
    request_body = TokenizeRequest,
    responses(
        (status = 200, description = "The tokens, in the shape of the request.", body = inline(TokenizeAnswer)),
        EitherAdmissionFailures
    )
)]
pub(super) async fn tokenize(State(service): State<Service>, request: Request) -> Response {
    let (parts, body) = request.into_parts();
    let bytes = match Bytes::from_request(Request::from_parts(parts.clone(), body), &service).await {
        Ok(bytes) => bytes,
        Err(rejection) => return rejection.into_response(),
    };
    let markers: Markers = serde_json::from_slice(&bytes).unwrap_or_default();
    let request = Request::from_parts(parts, Body::from(bytes));
    match markers {
        Markers { inputs: None, messages: Some(_), .. } => tokenize_chat(&service, request).await.into_response(),
        Markers { inputs: None, prompt: Some(_), .. } => tokenize_prompt(&service, request).await.into_response(),
        _ => match TgiJson::from_request(request, &service).await {
            Ok(TgiJson(request)) => tokenize_inputs(&service, request).await.into_response(),
            Err(rejection) => rejection,
        },
    }
}

// COMPAT: the parameters have no effect, not even `truncate`.
async fn tokenize_inputs(service: &Service, request: GenerateRequest) -> Result<Json<Vec<SimpleToken>>, TgiError> {
    let (text, images) = split_images(request.inputs, service.config());
    let spans = service.generation().tokenize(Arc::clone(&text), &images, true).await?;
    Ok(Json(tokens(&text, spans)))
}

async fn tokenize_prompt(service: &Service, request: Request) -> Result<Json<Tokenized>, OpenAiError> {
    let OpenAiJson(request) = OpenAiJson::<TokenizePrompt>::from_request(request, service).await?;
    service.model_name(request.model.as_deref())?;
    let add_special_tokens = request.add_special_tokens != Some(false);
    let spans = service.generation().tokenize(request.prompt.into(), &[], add_special_tokens).await?;
    Ok(tokenized(service, &spans, request.return_token_strs))
}

async fn tokenize_chat(service: &Service, request: Request) -> Result<Json<Tokenized>, OpenAiError> {
    let OpenAiJson(request) = OpenAiJson::<TokenizeChat>::from_request(request, service).await?;
    let names = request.chat.names();
    service.model_name(request.chat.model.as_deref())?;
    let add_special_tokens = request.chat.vllm.add_special_tokens == Some(true);
    let chat = request.chat.into_chat(service.config()).map_err(|error| OpenAiError::named(error, names))?;
    let chat = service.generation().tokenize_chat(chat, add_special_tokens).await;
    let chat = chat.map_err(|error| OpenAiError::named(error, names))?;
    Ok(tokenized(service, &chat.spans, request.return_token_strs))
}

fn tokenized(service: &Service, spans: &[TokenSpan], with_strings: Option<bool>) -> Json<Tokenized> {
    let tokens: Vec<u32> = spans.iter().map(|span| span.id).collect();
    let strings = || service.generation().text().spellings(&tokens);
    Json(Tokenized {
        count: tokens.len(),
        max_model_len: service.config().limits.max_total_tokens,
        token_strs: (with_strings == Some(true)).then(strings),
        tokens,
    })
}

/// The text of tokens.
#[utoipa::path(
    post,
    path = DETOKENIZE,
    tag = "OpenAI",
    request_body = DetokenizeRequest,
    responses((status = 200, description = "The text.", body = Detokenized), OpenAiAdmissionFailures)
)]
pub(super) async fn detokenize(
    State(service): State<Service>,
    OpenAiJson(request): OpenAiJson<DetokenizeRequest>,
) -> Result<Json<Detokenized>, OpenAiError> {
    service.model_name(request.model.as_deref())?;
    Ok(Json(Detokenized { prompt: service.generation().detokenize(request.tokens).await? }))
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
    TgiJson(request): TgiJson<ChatRequest>,
) -> Result<Json<ChatTokenizeResponse>, TgiError> {
    service.model_name(request.model.as_deref())?;
    let TokenizedChat { text, spans } =
        service.generation().tokenize_chat(request.into_chat(service.config())?, false).await?;
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
