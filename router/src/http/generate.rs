//! TGI's generation routes: `/generate`, `/generate_stream`, and `/`, which is either.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::{Stream, StreamExt};

use super::candidate::{self, Choice};
use super::dialect::{TgiError, TgiJson};
use super::document::TgiFailures;
use super::header;
use super::service::Service;
use super::sse::{self, Event};
use crate::api::error::ApiError;
use crate::api::prediction::VerifiedDraft;
use crate::api::tgi::{
    BestOfSequence, Details, DraftTokens, GenerateRequest, GenerateResponse, StreamDetails, StreamResponse, Token,
};
use crate::generation::{Finished, GenerationError, Generations};
use crate::telemetry::{RequestRecord, RequestSummary};

/// The hub's pipeline tag of models whose answers on `/` begin with the prompt.
const TEXT_GENERATION: &str = "text-generation";

/// Generate text.
#[utoipa::path(
    post,
    path = "/generate",
    tag = "TGI",
    request_body = GenerateRequest,
    responses((status = 200, description = "The generated text.", body = GenerateResponse), TgiFailures)
)]
pub(super) async fn generate(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    TgiJson(request): TgiJson<GenerateRequest>,
) -> Result<Response, TgiError> {
    record.generates();
    let answer = answer(&service, &record, request).await?;
    record.answered(answer.summary);
    Ok((answer.headers(&service), Json(answer.response)).into_response())
}

/// Generate text as a stream of events, one for each token.
#[utoipa::path(
    post,
    path = "/generate_stream",
    tag = "TGI",
    request_body = GenerateRequest,
    responses(
        (
            status = 200,
            description = "An event for each token, the last with the full text; an error is the last event.",
            content_type = "text/event-stream",
            body = StreamResponse
        ),
        TgiFailures
    )
)]
pub(super) async fn generate_stream(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    TgiJson(request): TgiJson<GenerateRequest>,
) -> Result<Response, TgiError> {
    record.generates();
    Ok(stream(service, record, request).await?)
}

/// Generate text, in one answer or, with `stream`, as a stream of events.
#[utoipa::path(
    post,
    path = "/",
    tag = "TGI",
    request_body = GenerateRequest,
    responses(
        (
            status = 200,
            description = "A list with one answer; with `stream` the events of `/generate_stream`.",
            content((Vec<GenerateResponse> = "application/json"), (StreamResponse = "text/event-stream"))
        ),
        TgiFailures
    )
)]
// COMPAT: a plain answer is a list with one element.
pub(super) async fn compat(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    TgiJson(mut request): TgiJson<GenerateRequest>,
) -> Result<Response, TgiError> {
    record.generates();
    let continues_prompt = service.config().pipeline_tag.as_deref().is_none_or(|tag| tag == TEXT_GENERATION);
    request.parameters.return_full_text.get_or_insert(continues_prompt);
    if request.stream {
        return Ok(stream(service, record, request).await?);
    }
    let answer = answer(&service, &record, request).await?;
    record.answered(answer.summary);
    Ok((answer.headers(&service), Json([answer.response])).into_response())
}

/// What the request asked to see in its answer.
struct Shape {
    inputs: Arc<str>,
    return_full_text: bool,
    with_details: bool,
    with_drafts: bool,
    choice: Choice,
}

impl Shape {
    fn generated_text(&self, text: String) -> String {
        if self.return_full_text { format!("{}{text}", self.inputs) } else { text }
    }

    fn num_characters(&self) -> usize {
        self.inputs.chars().count()
    }

    /// `finished`: all generations of the request, in order.
    fn response(&self, finished: Vec<Finished>) -> GenerateResponse {
        let is_choice = finished.len() > 1;
        let mut chosen = candidate::choose(finished, self.choice).into_iter().map(|finished| self.sequence(finished));
        let winner = chosen.next().expect("invariant: a request has at least one generation");
        let details = self.with_details.then(|| Details {
            finish_reason: winner.finish_reason,
            generated_tokens: winner.generated_tokens,
            seed: winner.seed,
            prefill: winner.prefill,
            tokens: winner.tokens,
            best_of_sequences: is_choice.then(|| chosen.collect()),
            top_tokens: winner.top_tokens,
            draft_tokens: winner.draft_tokens,
            drafts: winner.drafts,
        });
        GenerateResponse { generated_text: winner.generated_text, details }
    }

    fn sequence(&self, finished: Finished) -> BestOfSequence {
        let (tokens, mut top_tokens): (Vec<_>, Vec<_>) = finished.tokens.into_iter().map(Token::with_top).unzip();
        if top_tokens.iter().all(Vec::is_empty) {
            top_tokens.clear();
        }
        BestOfSequence {
            generated_text: self.generated_text(finished.text),
            finish_reason: finished.finish.reason.into(),
            generated_tokens: finished.finish.num_generated_tokens,
            seed: finished.seed,
            prefill: finished.prompt_tokens.into_iter().map(Into::into).collect(),
            tokens,
            top_tokens,
            draft_tokens: DraftTokens::of(finished.finish.drafts),
            drafts: finished.drafts.into_iter().filter(|_| self.with_drafts).map(Into::into).collect(),
        }
    }
}

/// Starts the request's generations.
async fn start(
    service: &Service,
    record: &RequestRecord,
    request: GenerateRequest,
    streams: bool,
) -> Result<(Generations, Shape), ApiError> {
    let return_full_text = request.parameters.return_full_text.unwrap_or(false);
    let with_details = request.parameters.details || request.parameters.decoder_input_details;
    let with_drafts = request.parameters.extension.return_drafts;
    let request = request.into_generation(service.config(), streams)?;
    let choice = Choice::new(request.parameters.best_of, request.parameters.extension.n);
    let generations = service.generation().start(request, record).await?;
    let inputs = generations.prompts.first().and_then(|prompt| prompt.text.clone()).unwrap_or_default();
    Ok((generations, Shape { inputs, return_full_text, with_details, with_drafts, choice }))
}

/// A plain answer and its cost.
pub(super) struct Answer {
    pub(super) response: GenerateResponse,
    pub(super) summary: RequestSummary,
    num_characters: usize,
}

impl Answer {
    fn headers(&self, service: &Service) -> HeaderMap {
        header::of_answer(service, self.num_characters, &self.summary)
    }
}

pub(super) async fn answer(
    service: &Service,
    record: &RequestRecord,
    request: GenerateRequest,
) -> Result<Answer, ApiError> {
    let (generations, shape) = start(service, record, request, false).await?;
    let (finished, summary) = generations.collect().await?;
    Ok(Answer { summary, num_characters: shape.num_characters(), response: shape.response(finished) })
}

async fn stream(service: Service, record: RequestRecord, request: GenerateRequest) -> Result<Response, ApiError> {
    let (generations, shape) = start(&service, &record, request, true).await?;
    let headers = header::of_stream(&service, shape.num_characters());
    let events = events(generations, shape, record.clone());
    Ok(sse::response(headers, record, sse::comment(), sse::tgi_error, events))
}

/// One event for each token; the last has the full text.
fn events(
    generations: Generations,
    shape: Shape,
    record: RequestRecord,
) -> impl Stream<Item = Result<Event, ApiError>> + Send {
    async_stream::try_stream! {
        let (mut text, mut index, mut drafts) = (String::new(), 0, Vec::new());
        let seed = generations.seed();
        let mut deltas = std::pin::pin!(generations.deltas());
        while let Some(delta) = deltas.next().await {
            let delta = delta.map_err(of_stream)?;
            index += 1;
            text.push_str(&delta.delta.text);
            drafts.extend(delta.delta.draft.filter(|_| shape.with_drafts).map(VerifiedDraft::from));
            let (token, top_tokens) = Token::with_top(delta.delta.token);
            let mut event = StreamResponse { index, token, top_tokens, generated_text: None, details: None };
            if let (Some(finish), Some(total)) = (delta.delta.finish, delta.total) {
                record.answered(total);
                event.details = shape.with_details.then(|| StreamDetails {
                    finish_reason: finish.reason.into(),
                    generated_tokens: finish.num_generated_tokens,
                    seed,
                    input_length: total.num_prompt_tokens,
                    draft_tokens: DraftTokens::of(finish.drafts),
                    drafts: std::mem::take(&mut drafts),
                });
                event.generated_text = Some(shape.generated_text(std::mem::take(&mut text)));
            }
            yield sse::written_event(|json| event.write_json(json));
        }
    }
}

/// COMPAT: in a stream TGI gives this error a type of its own.
fn of_stream(error: GenerationError) -> ApiError {
    match error {
        GenerationError::Incomplete => ApiError::IncompleteStream,
        error => error.into(),
    }
}
