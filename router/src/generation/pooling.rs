//! Requests that are answered with a vector for each input: embeddings and scores.
//!
//! To the engine, an input is a sequence whose prompt is computed and whose one result is a vector, so that admission,
//! the queue and recovery are those of generations.

use std::time::Instant;

use futures::StreamExt;
use futures::future::try_join_all;

use super::admission::QueueReservation;
use super::deadline::{Deadlines, reached};
use super::error::GenerationError;
use super::parameter::Parameters;
use super::service::GenerationService;
use super::validation::ValidationError;
use crate::generator::SequenceStream;
use crate::sequence::{DraftCount, End, Pooling, SequenceEvent, SequenceRequest, Task, Timeline, greedy};
use crate::telemetry::{RequestParameters, RequestRecord, RequestSummary, metrics};
use crate::text::{EncodedInput, Input, Truncation};

/// Inputs to pool, one sequence each.
pub(crate) struct PoolingRequest {
    pub(crate) task: Task,
    pub(crate) inputs: Vec<PoolingInput>,
    /// What to do with an input that is too long; `None`: refuse it.
    pub(crate) truncation: Option<Truncation>,
}

/// One input.
pub(crate) enum PoolingInput {
    /// Encoded with the tokens that the tokenizer adds.
    Text(Input),
    /// As it is.
    TokenIds(Vec<u32>),
}

/// The vectors of all inputs, in their order.
pub(crate) struct Pooled {
    pub(crate) vectors: Vec<Vec<f32>>,
    pub(crate) summary: RequestSummary,
}

/// An input in the engine. Dropping it aborts its sequence.
struct PoolingSequence {
    events: SequenceStream,
    reservation: QueueReservation,
    deadlines: Deadlines,
    num_tokens: usize,
    /// `None`: the request is not traced.
    timeline: Option<Timeline>,
    submitted: Instant,
}

impl PoolingRequest {
    /// What the request asks for, for its trace.
    fn described(&self) -> RequestParameters {
        Parameters::default().described(self.task.into(), false)
    }

    /// Characters of all inputs that are text.
    pub(crate) fn num_characters(&self) -> usize {
        let count = |input: &PoolingInput| match input {
            PoolingInput::Text(text) => text.num_characters(),
            PoolingInput::TokenIds(_) => 0,
        };
        self.inputs.iter().map(count).sum()
    }
}

impl GenerationService {
    /// The pooling of the served model, if that is for `task`.
    pub(crate) fn pooling(&self, task: Task) -> Result<&Pooling, ValidationError> {
        let served = self.context().config.pooling.as_ref();
        let is_for = served.map_or(Task::Generate, |pooling| pooling.task);
        served.filter(|_| is_for == task).ok_or(ValidationError::Task { served: is_for })
    }

    /// The vectors of a request. The first failure aborts the other inputs.
    pub(crate) async fn pool(
        &self,
        request: PoolingRequest,
        record: &RequestRecord,
    ) -> Result<Pooled, GenerationError> {
        if let Some(trace) = record.trace() {
            trace.set_parameters(request.described());
        }
        let PoolingRequest { task, inputs, truncation } = request;
        let pooling = self.pooling(task)?;
        let _permit = self.context().admission.admit(inputs.len())?;
        let deadlines = Deadlines::new(record.received(), None, self.context().config.queue.timeout);
        let mut encoded = Vec::with_capacity(inputs.len());
        for input in inputs {
            let input = self.context().in_time(deadlines, self.encode_input(pooling, input, truncation)).await?;
            let reservations = self.context().admission.reserve(1, input.token_ids.len() as u64)?;
            encoded.extend(reservations.into_iter().map(|reservation| (input.clone(), reservation)));
        }
        let running = encoded.into_iter().map(|(input, reservation)| {
            let num_tokens = input.token_ids.len();
            metrics::prompt_accepted(num_tokens, 0);
            let timeline = record.trace().map(|trace| trace.add_sequence(num_tokens, None));
            let request = SequenceRequest { timeline: timeline.clone(), ..sequence(pooling, input) };
            let events = self.context().generator.submit(request);
            let submitted = Instant::now();
            self.vector(PoolingSequence { events, reservation, deadlines, num_tokens, timeline, submitted })
        });
        let mut summary = RequestSummary::default();
        let vectors = try_join_all(running).await?.into_iter().map(|(vector, cost)| {
            summary.add(&cost);
            vector
        });
        Ok(Pooled { vectors: vectors.collect(), summary })
    }

    async fn encode_input(
        &self,
        pooling: &Pooling,
        input: PoolingInput,
        truncation: Option<Truncation>,
    ) -> Result<EncodedInput, GenerationError> {
        let (max, vocabulary) = (self.context().config.limits.max_input_tokens, self.text().vocabulary_size());
        let encoded = match input {
            PoolingInput::Text(text) => {
                let truncation = truncation.map(|truncation| (max, truncation));
                let encoded = self.text().encode_input(text, truncation, pooling.has_token_types).await?;
                self.context().check_tokens_of_text(&encoded.token_ids)?;
                encoded
            }
            PoolingInput::TokenIds(mut ids) => {
                if let Some(&given) = ids.iter().find(|&&id| id >= vocabulary) {
                    return Err(ValidationError::TokenId { field: "input", vocabulary, given }.into());
                }
                match truncation {
                    Some(Truncation::Right) => ids.truncate(max),
                    Some(Truncation::Left) => drop(ids.drain(..ids.len().saturating_sub(max))),
                    None => {}
                }
                EncodedInput { token_ids: ids, num_second_text_tokens: 0 }
            }
        };
        match encoded.token_ids.len() {
            0 => Err(ValidationError::EmptyInput.into()),
            given if given > max => Err(ValidationError::InputTokens { max, given }.into()),
            _ => Ok(encoded),
        }
    }

    async fn vector(&self, mut sequence: PoolingSequence) -> Result<(Vec<f32>, RequestSummary), GenerationError> {
        let mut started = None;
        let mut num_cached_tokens = 0;
        loop {
            let is_queued = sequence.reservation.is_queued();
            let event = tokio::select! {
                biased;
                event = sequence.events.next() => event.ok_or(GenerationError::Incomplete)?,
                () = self.context().abandoned.cancelled() => return Err(GenerationError::ShuttingDown),
                () = reached(sequence.deadlines.first_step), if is_queued => {
                    return Err(sequence.reservation.queue_timeout());
                }
            };
            match event {
                SequenceEvent::Failed(failure) => return Err(failure.into()),
                SequenceEvent::Vector(vector) => {
                    if let Some(timeline) = &sequence.timeline {
                        let at = Instant::now();
                        timeline.end(End { at, finish_reason: None, num_generated_tokens: 0, num_cached_tokens });
                    }
                    let started = started.unwrap_or(sequence.submitted);
                    let summary = RequestSummary {
                        num_prompt_tokens: sequence.num_tokens,
                        num_generated_tokens: 0,
                        num_cached_tokens,
                        drafts: DraftCount::default(),
                        validation: sequence.submitted - sequence.deadlines.received,
                        queue: started - sequence.submitted,
                        inference: started.elapsed(),
                    };
                    return Ok((vector, summary));
                }
                SequenceEvent::Started { num_cached_tokens: num } => {
                    started = Some(Instant::now());
                    num_cached_tokens = num;
                    sequence.reservation.leave_queue();
                }
                SequenceEvent::PromptTokens(_)
                | SequenceEvent::Drafts(_)
                | SequenceEvent::Token(_)
                | SequenceEvent::Finished(_) => {
                    return Err(GenerationError::Incomplete);
                }
            }
        }
    }
}

fn sequence(pooling: &Pooling, input: EncodedInput) -> SequenceRequest {
    SequenceRequest {
        num_source_tokens: if pooling.is_encoder { input.token_ids.len() as u32 } else { 0 },
        prompt_token_ids: input.token_ids,
        generated_token_ids: Vec::new(),
        images: [].into(),
        num_second_text_tokens: input.num_second_text_tokens,
        // Its vector, which takes the place of a token.
        max_new_tokens: 1,
        sampling: greedy(),
        grammar: None,
        needs_prompt_outputs: pooling.reads_all_outputs,
        priority: 0,
        group: None,
        cache_salt: None,
        content_salts: [].into(),
        adapter: None,
        adapter_hash: None,
        timeline: None,
    }
}
