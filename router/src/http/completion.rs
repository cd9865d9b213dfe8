//! `/v1/completions`: one generation for each prompt, side by side.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::stream::{self, FuturesUnordered};
use futures::{Stream, StreamExt, TryStreamExt};

use super::admission::Permit;
use super::dialect::{OpenAiError, OpenAiJson};
use super::envelope;
use super::header;
use super::running::{Prepared, Prompt, Running};
use super::service::Service;
use super::sse::{self, Frame};
use crate::api::error::ApiError;
use crate::api::openai::{self, Completion, CompletionChoice, CompletionChunk, CompletionRequest, Envelope, Usage};
use crate::telemetry::{RequestRecord, RequestSummary};
use crate::text::{GenerationError, Step, StopText};

pub(super) async fn completions(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    OpenAiJson(request): OpenAiJson<CompletionRequest>,
) -> Result<Response, OpenAiError> {
    record.generates();
    let envelope = envelope::new("text_completion", "cmpl", service.config().model_id.clone());
    let (streams, with_usage) = (request.stream, request.stream_options.include_usage);
    let Started { running, permit, num_characters } = start(&service, &record, request).await?;
    if streams {
        let headers = header::of_stream(&service, num_characters);
        let frames = frames(running, envelope, with_usage, record.clone());
        return Ok(sse::response(headers, permit, record, sse::openai_error, frames));
    }

    let answers = running.into_iter().enumerate().map(async |(index, running)| {
        let finished = running.finish().await?;
        let finish_reason = Some(finished.finish.ending.into());
        let summary = finished.summary();
        Ok::<_, ApiError>((CompletionChoice { index, text: finished.text, logprobs: None, finish_reason }, summary))
    });
    let answers: Vec<_> = answers.collect::<FuturesUnordered<_>>().try_collect().await?;
    let (mut choices, summaries): (Vec<_>, Vec<_>) = answers.into_iter().unzip();
    choices.sort_by_key(|choice| choice.index);
    let summary = sum(&summaries);
    record.answered(summary);
    let usage = Usage::new(summary.num_prompt_tokens, summary.num_generated_tokens);
    let headers = header::of_answer(&service, num_characters, &summary);
    Ok((headers, Json(Completion { envelope, choices, usage })).into_response())
}

struct Started {
    /// In the order of the prompts.
    running: Vec<Running>,
    permit: Permit,
    num_characters: usize,
}

/// Whatever can be refused is refused here, before a stream starts.
async fn start(service: &Service, record: &RequestRecord, mut request: CompletionRequest) -> Result<Started, ApiError> {
    if request.has_suffix() {
        return Err(ApiError::Suffix);
    }
    let prompts = request.prompts()?;
    let max = service.config().limits.max_client_batch_size;
    if prompts.len() > max {
        return Err(ApiError::BatchSize { given: prompts.len(), max });
    }
    let permit = service.admission().admit(prompts.len())?;
    let checked = request.parameters()?.check(&service.config().limits)?;
    let num_characters = prompts.iter().map(num_characters_of).sum();
    let mut running = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let prompt = match prompt {
            openai::Prompt::Text(text) => Prompt::Text(text.into()),
            openai::Prompt::TokenIds(ids) => Prompt::TokenIds(ids),
        };
        let prepared = Prepared::new(service, prompt, checked.clone(), StopText::Cut).await?;
        running.push(prepared.start(service, record, 0));
    }
    Ok(Started { running, permit, num_characters })
}

fn num_characters_of(prompt: &openai::Prompt) -> usize {
    match prompt {
        openai::Prompt::Text(text) => text.chars().count(),
        openai::Prompt::TokenIds(_) => 0,
    }
}

fn sum(summaries: &[RequestSummary]) -> RequestSummary {
    let mut all = RequestSummary::default();
    summaries.iter().for_each(|summary| all.add(summary));
    all
}

/// One chunk for each token of each prompt, as they come.
fn frames(
    running: Vec<Running>,
    envelope: Envelope,
    with_usage: bool,
    record: RequestRecord,
) -> impl Stream<Item = Frame> + Send {
    async_stream::stream! {
        let mut summaries = Vec::with_capacity(running.len());
        let all = running.into_iter().enumerate().map(|(index, running)| steps(index, running).boxed());
        let mut steps = stream::select_all(all);
        while let Some((index, step)) = steps.next().await {
            let (step, summary) = match step {
                Ok(step) => step,
                Err(error) => {
                    yield Frame::Error(error.into());
                    return;
                }
            };
            let finish_reason = step.finish.map(|finish| finish.ending.into());
            let choices = vec![CompletionChoice { index, text: step.text, logprobs: None, finish_reason }];
            let usage = summary.map(|summary| Usage::new(summary.num_prompt_tokens, summary.num_generated_tokens));
            summaries.extend(summary);
            yield Frame::json(&CompletionChunk { envelope: &envelope, choices, usage });
        }
        let summary = sum(&summaries);
        record.answered(summary);
        if with_usage {
            let usage = Some(Usage::new(summary.num_prompt_tokens, summary.num_generated_tokens));
            yield Frame::json(&CompletionChunk { envelope: &envelope, choices: Vec::new(), usage });
        }
        yield Frame::done();
    }
}

type IndexedStep = (usize, Result<(Step, Option<RequestSummary>), GenerationError>);

/// The last step comes with the summary.
fn steps(index: usize, running: Running) -> impl Stream<Item = IndexedStep> + Send {
    stream::unfold(Some(running), move |running| async move {
        let mut running = running?;
        let step = match running.next().await {
            Ok(step) => step,
            Err(error) => return Some(((index, Err(error)), None)),
        };
        let summary = step.finish.map(|finish| running.summary(&finish));
        let rest = summary.is_none().then_some(running);
        Some(((index, Ok((step, summary))), rest))
    })
}
