//! TGI's generation routes: `/generate`, `/generate_stream`, and `/`, which is either.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::Stream;
use futures::future::try_join_all;

use super::admission::Permit;
use super::candidate::{self, Choice};
use super::dialect::TgiError;
use super::document::TgiFailures;
use super::header;
use super::running::{self, Finished, Prepared, Prompt, Running};
use super::service::Service;
use super::sse::{self, Frame};
use crate::api::error::ApiError;
use crate::api::tgi::{
    BestOfSequence, Details, GenerateRequest, GenerateResponse, StreamDetails, StreamResponse, Token,
};
use crate::telemetry::{RequestRecord, RequestSummary};
use crate::text::StopText;

/// The hub's name for models that write on; their answers on `/` begin with the prompt.
const TEXT_GENERATION: &str = "text-generation";

/// Generate tokens.
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
    Json(request): Json<GenerateRequest>,
) -> Result<Response, TgiError> {
    record.generates();
    let answer = answer(&service, &record, request).await?;
    record.answered(answer.summary);
    Ok((answer.headers(&service), Json(answer.response)).into_response())
}

/// Generate tokens, each as an event.
#[utoipa::path(
    post,
    path = "/generate_stream",
    tag = "TGI",
    request_body = GenerateRequest,
    responses(
        (
            status = 200,
            description = "An event for each token, the last with the whole text; or a last event that is an error.",
            content_type = "text/event-stream",
            body = StreamResponse
        ),
        TgiFailures
    )
)]
pub(super) async fn generate_stream(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    Json(request): Json<GenerateRequest>,
) -> Result<Response, TgiError> {
    record.generates();
    Ok(stream(service, record, request).await?)
}

/// Generate tokens, in one answer or, with `stream`, in events.
#[utoipa::path(
    post,
    path = "/",
    tag = "TGI",
    request_body = GenerateRequest,
    responses(
        (
            status = 200,
            description = "A list of one; or events, as `/generate_stream` has them.",
            content((Vec<GenerateResponse> = "application/json"), (StreamResponse = "text/event-stream"))
        ),
        TgiFailures
    )
)]
// COMPAT: a plain answer is a list of one.
pub(super) async fn compat(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    Json(mut request): Json<GenerateRequest>,
) -> Result<Response, TgiError> {
    record.generates();
    let writes_on = service.config().pipeline_tag.as_deref().is_none_or(|tag| tag == TEXT_GENERATION);
    request.parameters.return_full_text.get_or_insert(writes_on);
    if request.stream {
        return Ok(stream(service, record, request).await?);
    }
    let answer = answer(&service, &record, request).await?;
    record.answered(answer.summary);
    Ok((answer.headers(&service), Json([answer.response])).into_response())
}

/// What an answer must show.
struct Shape {
    inputs: Arc<str>,
    return_full_text: bool,
    with_details: bool,
    choice: Choice,
}

impl Shape {
    fn generated_text(&self, text: String) -> String {
        if self.return_full_text { format!("{}{text}", self.inputs) } else { text }
    }

    fn num_characters(&self) -> usize {
        self.inputs.chars().count()
    }

    /// `finished`: all generations of the request, in their order.
    fn response(&self, finished: Vec<Finished>) -> GenerateResponse {
        let is_choice = finished.len() > 1;
        let mut chosen = candidate::choose(finished, self.choice).into_iter().map(|finished| self.sequence(finished));
        let winner = chosen.next().expect("invariant: a request has at least one generation");
        let BestOfSequence { generated_text, finish_reason, generated_tokens, seed, prefill, tokens, top_tokens } =
            winner;
        let details = self.with_details.then(|| {
            let best_of_sequences = is_choice.then(|| chosen.collect());
            Details { finish_reason, generated_tokens, seed, prefill, tokens, best_of_sequences, top_tokens }
        });
        GenerateResponse { generated_text, details }
    }

    fn sequence(&self, finished: Finished) -> BestOfSequence {
        let (tokens, mut top_tokens): (Vec<_>, Vec<_>) = finished.tokens.into_iter().map(Token::with_top).unzip();
        if top_tokens.iter().all(Vec::is_empty) {
            top_tokens.clear();
        }
        BestOfSequence {
            generated_text: self.generated_text(finished.text),
            finish_reason: finished.finish.ending.into(),
            generated_tokens: finished.finish.num_generated_tokens,
            seed: finished.seed,
            prefill: finished.prompt_tokens.into_iter().map(Into::into).collect(),
            tokens,
            top_tokens,
        }
    }
}

/// Whatever can be refused is refused here, with its status, before a stream starts.
async fn start(
    service: &Service,
    record: &RequestRecord,
    request: GenerateRequest,
    streams: bool,
) -> Result<(Vec<Running>, Permit, Shape), ApiError> {
    let config = service.config();
    let return_full_text = request.parameters.return_full_text.unwrap_or(false);
    let with_details = request.parameters.details || request.parameters.decoder_input_details;
    let mut parameters = request.parameters.into_parameters(config)?;
    if streams {
        parameters.check_stream()?;
    }
    let num_generations = parameters.check_best_of(&config.limits)?;
    let permit = service.admission().admit(num_generations)?;
    // COMPAT: without the flag `prefill` is empty; it is not an error to ask.
    parameters.decoder_input_details &= config.prefill_logprobs;
    let choice = Choice::new(parameters.best_of, parameters.extension.n);
    let checked = parameters.check(&config.limits)?;
    let shape = Shape { inputs: request.inputs.into(), return_full_text, with_details, choice };
    let prompt = Prompt::Text(Arc::clone(&shape.inputs));
    let prepared = Prepared::new(service, prompt, checked, StopText::Kept, record.received()).await?;
    Ok((prepared.start_all(service), permit, shape))
}

/// A whole answer, and what it cost.
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
    let (running, _permit, shape) = start(service, record, request, false).await?;
    // The first failure drops, and so aborts, the others.
    let finished = try_join_all(running.into_iter().map(Running::finish)).await?;
    let summary = candidate::cost(&finished);
    Ok(Answer { summary, num_characters: shape.num_characters(), response: shape.response(finished) })
}

async fn stream(service: Service, record: RequestRecord, request: GenerateRequest) -> Result<Response, ApiError> {
    let (mut running, permit, shape) = start(&service, &record, request, true).await?;
    running::started(&service, &mut running).await?;
    let running = running.pop().expect("invariant: a stream has one generation");
    let headers = header::of_stream(&service, shape.num_characters());
    let frames = frames(running, shape, record.clone());
    Ok(sse::response(headers, permit, record, sse::tgi_error, frames))
}

/// One event for each token; the last one has the whole text.
fn frames(mut running: Running, shape: Shape, record: RequestRecord) -> impl Stream<Item = Frame> + Send {
    async_stream::stream! {
        let (mut text, mut index) = (String::new(), 0);
        loop {
            let step = match running.next().await {
                Ok(step) => step,
                Err(error) => {
                    yield Frame::Error(of_stream(error));
                    return;
                }
            };
            index += 1;
            text.push_str(&step.text);
            let (token, top_tokens) = Token::with_top(step.token);
            let Some(finish) = step.finish else {
                yield Frame::json(&StreamResponse { index, token, top_tokens, generated_text: None, details: None });
                continue;
            };
            record.answered(running.summary(&finish));
            let details = shape.with_details.then(|| StreamDetails {
                finish_reason: finish.ending.into(),
                generated_tokens: finish.num_generated_tokens,
                seed: running.seed,
                input_length: running.num_prompt_tokens,
            });
            let generated_text = Some(shape.generated_text(text));
            yield Frame::json(&StreamResponse { index, token, top_tokens, generated_text, details });
            return;
        }
    }
}

/// COMPAT: a stream that ends early has an `error_type` of its own.
fn of_stream(error: ApiError) -> ApiError {
    match error {
        ApiError::Incomplete => ApiError::IncompleteStream,
        error => error,
    }
}
