//! A sequence on its way from one engine to another, and who finds that other engine.

use penstock_scheduler::SequenceId;

use super::open_sequence::OpenSequence;
use crate::sequence::Timeline;

/// An open sequence with everything that is needed to continue it.
pub struct MovingSequence {
    pub(super) id: SequenceId,
    /// The prompt, and the generated tokens that were sent to its stream.
    pub(super) token_ids: Vec<u32>,
    pub(super) sequence: OpenSequence,
    pub(super) timeline: Option<Timeline>,
}

impl MovingSequence {
    /// Unique among the engines that it may move between.
    pub fn id(&self) -> SequenceId {
        self.id
    }
}

/// Where the sequences of an engine go when its worker group is lost.
pub trait Handover: Send + Sync + 'static {
    /// Passes the sequences on to other engines (`Engine::adopt`). Returns those that none takes, because none takes steps.
    fn hand_over(&self, sequences: Vec<MovingSequence>) -> Vec<MovingSequence>;
}
