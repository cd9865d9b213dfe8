//! What the generations of one request cost together.

use super::delta::Finish;
use crate::telemetry::RequestSummary;

pub(super) fn of_generation(num_prompt_tokens: usize, finish: &Finish) -> RequestSummary {
    RequestSummary {
        num_prompt_tokens,
        num_generated_tokens: finish.num_generated_tokens as usize,
        num_cached_tokens: finish.num_cached_tokens,
        drafts: finish.drafts,
        validation: finish.timings.validation,
        queue: finish.timings.queue,
        inference: finish.timings.inference,
    }
}

/// Adds up the generations of a request. Generations of the same prompt count its tokens once.
#[derive(Debug)]
pub(super) struct RequestTotal {
    num_per_prompt: usize,
    /// By generation; `None` while it runs.
    summaries: Vec<Option<RequestSummary>>,
}

impl RequestTotal {
    pub(super) fn new(num_generations: usize, num_per_prompt: usize) -> Self {
        Self { num_per_prompt, summaries: vec![None; num_generations] }
    }

    /// Generation `index` has ended. Returns the total once all have.
    pub(super) fn add(&mut self, index: usize, summary: RequestSummary) -> Option<RequestSummary> {
        self.summaries[index] = Some(summary);
        let summaries: Vec<_> = self.summaries.iter().copied().collect::<Option<_>>()?;
        let mut total = RequestSummary::default();
        for of_prompt in summaries.chunks(self.num_per_prompt) {
            let mut sum = RequestSummary::default();
            of_prompt.iter().for_each(|summary| sum.add(summary));
            sum.num_prompt_tokens = of_prompt.iter().map(|summary| summary.num_prompt_tokens).max().unwrap_or(0);
            // The first generation put into the cache what the others found there.
            sum.num_cached_tokens = of_prompt.iter().map(|summary| summary.num_cached_tokens).min().unwrap_or(0);
            total.add(&sum);
        }
        Some(total)
    }
}
