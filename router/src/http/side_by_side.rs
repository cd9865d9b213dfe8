//! The generations of one request, side by side: their steps as they come, and what they cost together.

use futures::stream;
use futures::{Stream, StreamExt};

use super::running::Running;
use crate::api::error::ApiError;
use crate::api::openai::Usage;
use crate::telemetry::RequestSummary;
use crate::text::{PromptToken, Step};

/// A step of one of them.
pub(super) struct IndexedStep {
    pub(super) index: usize,
    pub(super) step: Step,
    /// With the first step, if they were asked for.
    pub(super) prompt_tokens: Vec<PromptToken>,
    /// With the last step.
    pub(super) summary: Option<RequestSummary>,
}

/// Ends when all have ended. After an error it is not to be read on.
pub(super) fn steps(running: Vec<Running>) -> impl Stream<Item = Result<IndexedStep, ApiError>> + Send {
    stream::select_all(running.into_iter().enumerate().map(|(index, running)| steps_of(index, running).boxed()))
}

fn steps_of(index: usize, running: Running) -> impl Stream<Item = Result<IndexedStep, ApiError>> + Send {
    stream::unfold(Some(running), move |running| async move {
        let mut running = running?;
        let step = match running.next().await {
            Ok(step) => step,
            Err(error) => return Some((Err(error), None)),
        };
        let prompt_tokens = running.take_prompt_tokens();
        let summary = step.finish.map(|finish| running.summary(&finish));
        let rest = summary.is_none().then_some(running);
        Some((Ok(IndexedStep { index, step, prompt_tokens, summary }), rest))
    })
}

/// Adds up generations, of which each few have the same prompt: it was given once, and it is counted once.
pub(super) struct Cost {
    num_per_prompt: usize,
    /// By generation.
    summaries: Vec<(usize, RequestSummary)>,
}

impl Cost {
    pub(super) fn new(num_per_prompt: usize) -> Self {
        Self { num_per_prompt: num_per_prompt.max(1), summaries: Vec::new() }
    }

    pub(super) fn add(&mut self, index: usize, summary: RequestSummary) {
        self.summaries.push((index, summary));
    }

    pub(super) fn total(&self) -> RequestSummary {
        let mut summaries = self.summaries.clone();
        summaries.sort_by_key(|(index, _)| *index);
        let same_prompt =
            |one: &(usize, _), other: &(usize, _)| one.0 / self.num_per_prompt == other.0 / self.num_per_prompt;
        let mut total = RequestSummary::default();
        for of_prompt in summaries.chunk_by(same_prompt) {
            let mut sum = RequestSummary::default();
            of_prompt.iter().for_each(|(_, summary)| sum.add(summary));
            let summaries = of_prompt.iter().map(|(_, summary)| summary);
            sum.num_prompt_tokens = summaries.clone().map(|summary| summary.num_prompt_tokens).max().unwrap_or(0);
            // What the others found was put there by the first.
            sum.num_cached_tokens = summaries.map(|summary| summary.num_cached_tokens).min().unwrap_or(0);
            total.add(&sum);
        }
        total
    }
}

impl From<&RequestSummary> for Usage {
    fn from(summary: &RequestSummary) -> Self {
        Self::new(summary.num_prompt_tokens, summary.num_cached_tokens, summary.num_generated_tokens)
    }
}
