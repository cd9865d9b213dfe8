//! The steps that were planned and whose results are not back.

use std::collections::VecDeque;

use crate::cost::Estimate;
use crate::plan::{BlockId, SequenceId, SnapshotId};
use crate::resident::Residency;
use crate::speculation::Drafting;

/// A planned step without its result.
#[derive(Debug)]
pub(crate) struct InFlightStep {
    pub(crate) step: u64,
    /// In the order of the plan's advances.
    pub(crate) advances: Vec<InFlightAdvance>,
    pub(crate) estimate: Estimate,
    pub(crate) drafting: Drafting,
    /// Whether the worker also moves blocks to or from slots in this step, or states to or from snapshots.
    pub(crate) has_transfers: bool,
    /// Snapshots that are saved before the advances, each with the residency whose states they are.
    pub(crate) saved: Vec<(Residency, SnapshotId)>,
}

#[derive(Clone, Debug)]
pub(crate) struct InFlightAdvance {
    pub(crate) id: SequenceId,
    pub(crate) residency: Residency,
    pub(crate) sample: bool,
    /// Draft tokens that the worker may verify.
    pub(crate) num_draft_tokens: u32,
    /// Blocks that this advance fills, and that other sequences can therefore share.
    pub(crate) filled_blocks: Vec<BlockId>,
    /// Shared blocks that the sequence started with although the step that fills them was still in flight.
    pub(crate) unwritten_blocks: Vec<BlockId>,
    /// The snapshot that the sequence starts with in this step.
    pub(crate) snapshot: Option<SnapshotId>,
}

/// The steps in flight.
///
/// INVARIANT: their numbers are consecutive, and the newest has the number of the last planned step. Results come in
/// this order.
#[derive(Debug, Default)]
pub(crate) struct InFlightSteps {
    /// Oldest first.
    steps: VecDeque<InFlightStep>,
    last_step: u64,
}

impl InFlightSteps {
    /// Number of the next step to plan; 1 after a restart.
    pub(crate) fn next_step(&self) -> u64 {
        self.last_step + 1
    }

    /// Adds the step `next_step`.
    pub(crate) fn push(
        &mut self,
        advances: Vec<InFlightAdvance>,
        estimate: Estimate,
        drafting: Drafting,
        has_transfers: bool,
        saved: Vec<(Residency, SnapshotId)>,
    ) {
        self.last_step += 1;
        self.steps.push_back(InFlightStep { step: self.last_step, advances, estimate, drafting, has_transfers, saved });
    }

    pub(crate) fn oldest(&self) -> Option<&InFlightStep> {
        self.steps.front()
    }

    pub(crate) fn pop_oldest(&mut self) {
        self.steps.pop_front();
    }

    pub(crate) fn get(&self, step: u64) -> Option<&InFlightStep> {
        self.steps.iter().find(|in_flight| in_flight.step == step)
    }

    /// All steps, oldest first.
    pub(crate) fn steps(&self) -> impl Iterator<Item = &InFlightStep> {
        self.steps.iter()
    }

    /// Advances of all steps, oldest step first.
    pub(crate) fn advances(&self) -> impl Iterator<Item = &InFlightAdvance> {
        self.steps.iter().flat_map(|step| &step.advances)
    }

    pub(crate) fn has_probe(&self) -> bool {
        self.steps.iter().any(|step| step.drafting == Drafting::Probe)
    }

    pub(crate) fn len(&self) -> usize {
        self.steps.len()
    }

    /// Panics unless the invariant holds.
    pub(crate) fn audit(&self) {
        let first_step = self.next_step() - self.steps.len() as u64;
        assert!(self.steps.iter().map(|step| step.step).eq(first_step..self.next_step()));
    }
}
