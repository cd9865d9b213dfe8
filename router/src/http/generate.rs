//! TGI's generation routes: `/generate`, `/generate_stream`, and `/`, which is either.

use std::sync::Arc;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures::Stream;

use super::admission::Permit;
use super::dialect::TgiError;
use super::header;
use super::running::{Prepared, Prompt, Running};
use super::service::Service;
use super::sse::{self, Frame};
use crate::api::error::ApiError;
use crate::api::parameter::Parameters;
use crate::api::tgi::{Details, GenerateRequest, GenerateResponse, StreamDetails, StreamResponse};
use crate::telemetry::RequestRecord;
use crate::text::{GenerationError, StopText};

/// The hub's name for models that write on; their answers on `/` begin with the prompt.
const TEXT_GENERATION: &str = "text-generation";

pub(super) async fn generate(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    Json(request): Json<GenerateRequest>,
) -> Result<Response, TgiError> {
    record.generates();
    let (headers, answer) = answer(&service, &record, request).await?;
    Ok((headers, Json(answer)).into_response())
}

pub(super) async fn generate_stream(
    State(service): State<Service>,
    Extension(record): Extension<RequestRecord>,
    Json(request): Json<GenerateRequest>,
) -> Result<Response, TgiError> {
    record.generates();
    Ok(stream(service, record, request).await?)
}

/// COMPAT: a plain answer is a list of one.
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
    let (headers, answer) = answer(&service, &record, request).await?;
    Ok((headers, Json([answer])).into_response())
}

/// What an answer must show.
struct Shape {
    inputs: Arc<str>,
    return_full_text: bool,
    with_details: bool,
}

impl Shape {
    fn generated_text(&self, text: String) -> String {
        if self.return_full_text { format!("{}{text}", self.inputs) } else { text }
    }

    fn num_characters(&self) -> usize {
        self.inputs.chars().count()
    }
}

/// Whatever can be refused is refused here, with its status, before a stream starts.
async fn start(
    service: &Service,
    record: &RequestRecord,
    request: GenerateRequest,
    streams: bool,
) -> Result<(Running, Permit, Shape), ApiError> {
    let shape = Shape {
        inputs: request.inputs.into(),
        return_full_text: request.parameters.return_full_text.unwrap_or(false),
        with_details: request.parameters.details,
    };
    let parameters = Parameters::from(request.parameters);
    let limits = &service.config().limits;
    if streams {
        parameters.check_stream()?;
    }
    parameters.check_best_of(limits)?;
    let permit = service.admission().admit(1)?;
    let checked = parameters.check(limits)?;
    let prompt = Prompt::Text(Arc::clone(&shape.inputs));
    let prepared = Prepared::new(service, prompt, checked, StopText::Kept).await?;
    Ok((prepared.start(service, record, 0), permit, shape))
}

async fn answer(
    service: &Service,
    record: &RequestRecord,
    request: GenerateRequest,
) -> Result<(HeaderMap, GenerateResponse), ApiError> {
    let (running, _permit, shape) = start(service, record, request, false).await?;
    let finished = running.finish().await?;
    let summary = finished.summary();
    record.answered(summary);
    let headers = header::of_answer(service, shape.num_characters(), &summary);
    let details = shape.with_details.then(|| Details {
        finish_reason: finished.finish.ending.into(),
        generated_tokens: finished.finish.num_generated_tokens,
        seed: finished.seed,
        prefill: [],
        tokens: finished.tokens.into_iter().map(Into::into).collect(),
    });
    Ok((headers, GenerateResponse { generated_text: shape.generated_text(finished.text), details }))
}

async fn stream(service: Service, record: RequestRecord, request: GenerateRequest) -> Result<Response, ApiError> {
    let (running, permit, shape) = start(&service, &record, request, true).await?;
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
            let Some(finish) = step.finish else {
                let token = step.token.into();
                yield Frame::json(&StreamResponse { index, token, generated_text: None, details: None });
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
            yield Frame::json(&StreamResponse { index, token: step.token.into(), generated_text, details });
            return;
        }
    }
}

/// COMPAT: a stream that ends early has an `error_type` of its own.
fn of_stream(error: GenerationError) -> ApiError {
    match error {
        GenerationError::Incomplete => ApiError::IncompleteStream,
        failed => failed.into(),
    }
}
