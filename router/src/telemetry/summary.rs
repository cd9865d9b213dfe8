//! What the generations of a request cost.

use std::time::Duration;

use crate::sequence::DraftCount;

/// The generations of an answered request: the sum of their tokens, and the longest of their durations.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RequestSummary {
    pub(crate) num_prompt_tokens: usize,
    pub(crate) num_generated_tokens: usize,
    /// Prompt tokens that were found in the prefix cache.
    pub(crate) num_cached_tokens: usize,
    pub(crate) drafts: DraftCount,
    pub(crate) validation: Duration,
    pub(crate) queue: Duration,
    pub(crate) inference: Duration,
}

impl RequestSummary {
    /// Adds another generation of the same request.
    pub(crate) fn add(&mut self, other: &Self) {
        self.num_prompt_tokens += other.num_prompt_tokens;
        self.num_generated_tokens += other.num_generated_tokens;
        self.num_cached_tokens += other.num_cached_tokens;
        self.drafts += other.drafts;
        self.validation = self.validation.max(other.validation);
        self.queue = self.queue.max(other.queue);
        self.inference = self.inference.max(other.inference);
    }

    /// From the request's arrival to its last token.
    pub(crate) fn total(&self) -> Duration {
        self.validation + self.queue + self.inference
    }

    /// Mean inference time per generated token.
    pub(crate) fn per_token(&self) -> Duration {
        self.inference / u32::try_from(self.num_generated_tokens.max(1)).unwrap_or(u32::MAX)
    }
}
