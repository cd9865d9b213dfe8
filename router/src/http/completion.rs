//! `/v1/completions`: several generations of each prompt, side by side.

mod choice;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;

use super::dialect::{OpenAiError, OpenAiJson};
use super::document::OpenAiFailures;
use super::envelope;
use super::logprob::{CompletionLogprobWriter, TokenNames};
use super::openai_answer::OpenAiAnswer;
use super::service::Service;
use crate::api::openai::{Completion, CompletionChunk, CompletionRequest};
use crate::config::SamplingDefaults;
use crate::telemetry::RequestRecord;
use choice::{CompletionReader, CompletionShape, Echo};

/// Continue one or several prompts.
#[utoipa::path(
    post,
    path = "/v1/completions",
    tag = "OpenAI",
    request_body = CompletionRequest,
    responses(
        (
            status = 200,
            description = "The answer; with `stream` as a stream of chunks that ends with the event `[DONE]`.",
            content((Completion = "application/json"), (CompletionChunk = "text/event-stream"))
        ),
        OpenAiFailures
    )
)]
pub(super) async fn completions(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    OpenAiJson(request): OpenAiJson<CompletionRequest>,
) -> Result<Response, OpenAiError> {
    let defaults = service.config().sampling_defaults;
    answer(service, record, request, &defaults).await
}

/// `defaults` fill in what the request leaves out.
pub(super) async fn answer(
    service: Service,
    record: RequestRecord,
    request: CompletionRequest,
    defaults: &SamplingDefaults,
) -> Result<Response, OpenAiError> {
    record.generates();
    service.model_name(request.model.as_deref())?;
    let adapter_id = service.adapter_named(request.model.as_deref());
    let model = adapter_id.clone().unwrap_or_else(|| service.config().model_name().to_owned());
    let envelope = envelope::new("text_completion", "cmpl", model);
    let (streams, stream_options) = (request.stream, request.stream_options.unwrap_or_default());
    let (shows_token_ids, with_prompt_logprobs) =
        (request.vllm.return_token_ids, request.vllm.prompt_logprobs.is_some());
    let (echoes, with_logprobs) = (request.echo, request.logprobs.is_some());
    let shows_drafts = request.shows_drafts();
    let (hides_generated, are_ids) = (request.hides_generated(), request.vllm.return_tokens_as_token_ids);
    let names = request.names();
    let (mut request, num_choices) = request.into_generation(service.config(), defaults)?;
    request.parameters.adapter_id = adapter_id;
    let generations = service.generation().start(request, &record).await;
    let generations = generations.map_err(|error| OpenAiError::named(error, names))?;
    let num_per_prompt = generations.num_per_prompt;
    let model = service.generation().text();
    let mut readers = Vec::with_capacity(generations.len());
    for prompt in &generations.prompts {
        let echo = echoes.then(|| Echo::new(model, prompt.text.clone(), &prompt.token_ids, with_logprobs));
        for _ in 0..num_per_prompt {
            let names = || TokenNames { text_model: model.clone(), are_ids };
            let logprobs = with_logprobs.then(|| CompletionLogprobWriter::new(names()));
            let shape = CompletionShape {
                echo: echo.clone(),
                prompt_token_ids: shows_token_ids.then(|| prompt.token_ids.clone()),
                with_prompt_logprobs,
                hides_generated,
                shows_drafts,
            };
            readers.push(CompletionReader::new(readers.len(), shape, logprobs));
        }
    }
    let answer = OpenAiAnswer { service, record, envelope, generations, readers, stream_options, hides_generated };
    if streams {
        return Ok(answer.stream());
    }
    let render = |envelope, sums, usage| {
        let choices = choice::best(sums, num_per_prompt, num_choices);
        Completion { envelope, choices, usage }
    };
    answer.plain(render).await
}
