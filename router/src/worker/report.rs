//! The result of a step in the router's own types.

use std::time::Duration;

use penstock_scheduler::SequenceId;

use crate::sequence::{DraftCount, Token};

/// The result of one step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct StepReport {
    pub(crate) step: u64,
    pub(crate) outputs: Vec<Output>,
    pub(crate) timing: WorkerTiming,
}

impl StepReport {
    /// Draft tokens that the step verified.
    pub(crate) fn num_draft_tokens(&self) -> u32 {
        self.outputs.iter().map(|output| output.num_draft_tokens).sum()
    }

    /// Draft tokens of each sequence: verified ones, and right ones, which are its tokens after the first.
    pub(crate) fn drafts(&self) -> impl Iterator<Item = DraftCount> {
        self.outputs.iter().map(|output| {
            let num_tokens = output.tokens.as_ref().map_or(0, Vec::len);
            let num_right = u32::try_from(num_tokens.saturating_sub(1)).unwrap_or(u32::MAX);
            DraftCount { num_verified: output.num_draft_tokens, num_right }
        })
    }
}

/// The output of one sequence in a step.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Output {
    pub(crate) id: SequenceId,
    /// `Err`: the worker could not continue this sequence.
    pub(crate) tokens: Result<Vec<Token>, OutputError>,
    /// Draft tokens that the step verified for it, right or not.
    pub(crate) num_draft_tokens: u32,
    /// Whether these come from a model or heads.
    pub(crate) drafted_by_model: bool,
    pub(crate) prompt_tokens: Vec<Token>,
    /// The result of a pooled sequence, instead of tokens.
    pub(crate) vector: Option<Vec<f32>>,
}

/// Why the worker could not continue a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OutputError {
    pub(crate) reason: String,
    pub(crate) fault: Fault,
}

/// What is at fault for an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Server,
    /// The request asked for something that cannot be continued.
    Request,
    /// Nothing: the grammar has ended, and the sequence has no stop token.
    None,
}

/// How rank 0 spent a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct WorkerTiming {
    /// Turning the plan into tensors.
    pub(crate) prepare: Duration,
    /// In the model.
    pub(crate) forward: Duration,
    /// Turning logits into tokens.
    pub(crate) sample: Duration,
    /// Waiting for the plan since the end of the previous step.
    pub(crate) idle: Duration,
    /// Making drafts; part of `prepare`.
    pub(crate) draft: Duration,
}
