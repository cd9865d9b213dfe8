//! `/v1/chat/completions`.

mod choice;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;

use super::dialect::{OpenAiError, OpenAiJson};
use super::document::OpenAiFailures;
use super::envelope;
use super::logprob::TokenNames;
use super::openai_answer::OpenAiAnswer;
use super::service::Service;
use crate::api::error::ApiError;
use crate::api::openai::{ChatChunk, ChatCompletion, ChatRequest};
use crate::config::SamplingDefaults;
use crate::telemetry::RequestRecord;
use choice::{ChatReader, ChatShape, ChatSum};

/// Answer a conversation.
#[utoipa::path(
    post,
    path = "/v1/chat/completions",
    tag = "OpenAI",
    request_body = ChatRequest,
    responses(
        (
            status = 200,
            description = "The answer; with `stream` as a stream of chunks that ends with the event `[DONE]`.",
            content((ChatCompletion = "application/json"), (ChatChunk = "text/event-stream"))
        ),
        OpenAiFailures
    )
)]
pub(super) async fn chat_completions(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    OpenAiJson(request): OpenAiJson<ChatRequest>,
) -> Result<Response, OpenAiError> {
    let defaults = service.config().sampling_defaults;
    Box::pin(answer(service, record, request, &defaults)).await
}

/// `defaults` fill in what the request leaves out.
pub(super) async fn answer(
    service: Service,
    record: RequestRecord,
    request: ChatRequest,
    defaults: &SamplingDefaults,
) -> Result<Response, OpenAiError> {
    record.generates();
    let (streams, stream_options) = (request.stream, request.stream_options.unwrap_or_default());
    let object = if streams { "chat.completion.chunk" } else { "chat.completion" };
    let model = service.model_name(request.model.as_deref())?;
    let envelope = envelope::new(object, "chatcmpl", model);
    let logprobs_of = request.logprobs.then(|| TokenNames {
        text_model: service.generation().text().clone(),
        are_ids: request.vllm.return_tokens_as_token_ids,
    });
    let mut shape = ChatShape {
        logprobs_of,
        echo: request.echoed(),
        with_prompt_logprobs: request.vllm.prompt_logprobs.is_some(),
        hides_reasoning: request.include_reasoning == Some(false),
        shows_drafts: request.shows_drafts(),
        ..ChatShape::default()
    };
    let shows_token_ids = request.vllm.return_token_ids;
    let names = request.names();
    let refused = |error: ApiError| OpenAiError::named(error, names);
    let adapter_id = service.adapter_named(request.model.as_deref());
    let mut request = request.into_generation(service.config(), defaults).map_err(|error| refused(error.into()))?;
    request.parameters.adapter_id = adapter_id;
    let generations = service.generation().start(request, &record).await;
    let generations = generations.map_err(|error| refused(error.into()))?;
    if let Some(prompt) = generations.prompts.first() {
        shape.call_ids = prompt.tool_call_ids;
        shape.prompt_token_ids = shows_token_ids.then(|| prompt.token_ids.clone());
    }
    let readers = (0..generations.len()).map(|index| ChatReader::new(index, shape.clone())).collect();
    let answer =
        OpenAiAnswer { service, record, envelope, generations, readers, stream_options, hides_generated: false };
    if streams {
        return Ok(answer.stream());
    }
    let render = |envelope, mut sums: Vec<(_, ChatSum)>, usage| {
        let prompt = sums.first_mut().map(|(_, sum)| sum.take_prompt()).unwrap_or_default();
        let choices = sums.into_iter().enumerate().map(|(index, (_, sum))| sum.into_choice(index)).collect();
        ChatCompletion {
            envelope,
            choices,
            usage,
            prompt_token_ids: prompt.token_ids,
            prompt_logprobs: prompt.logprobs,
        }
    };
    answer.plain(render).await
}
