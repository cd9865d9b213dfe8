//! What a step that is out contains, to match its result with.

use crate::plan::{BlockId, SequenceId};
use crate::timing::Estimate;

/// One stay of a sequence in the worker, from `started` to `freed`. Never reused.
///
/// INVARIANT: outputs of an earlier stay are discarded. So a preempted sequence loses what was being sampled for it, and
/// samples it again: the token at a position is a function of the sequence, its seed and the position only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stay(pub u64);

/// A plan that was handed out, and whose result is not back.
#[derive(Debug)]
pub(crate) struct Flight {
    pub step: u64,
    /// In the order of the plan's advances.
    pub advances: Vec<InFlight>,
    pub estimate: Estimate,
}

#[derive(Clone, Debug)]
pub(crate) struct InFlight {
    pub id: SequenceId,
    pub stay: Stay,
    pub sample: bool,
    /// Blocks that it writes to their end, and that may so be shared.
    pub filled: Vec<BlockId>,
    /// Shared blocks that it starts with and that were not written yet.
    pub relied_on: Vec<BlockId>,
}
