//! Steps for a pipeline of stages: while one stage computes a step, the others compute the steps before and after it.
//!
//! Only the last stage samples, so a sequence whose next token is in flight waits for it. Each step therefore decodes a
//! share of the sequences, and the steps in flight decode disjoint ones. Chunks of one prompt follow each other without
//! waiting, because they sample nothing.
//!
//! No decode starves. More steps than stages can be in flight, and their shares together exceed the number of decodes. So
//! when a decode is left out because the limit on steps in flight is reached, one of these steps has less than its share,
//! and the step after its result takes more decodes than came back.

use super::Scheduler;
use crate::cost::Work;
use crate::plan::SequenceId;

impl Scheduler {
    /// Whether a running sequence can advance before another result is back.
    pub(super) fn can_advance(&self, id: SequenceId) -> bool {
        let sequence = self.sequence(id);
        let awaits_token = self.limits.num_stages > 1 && sequence.awaits_token();
        !awaits_token && !sequence.is_at_limit()
    }

    /// The most decodes of one step: with several stages, an equal share of them all.
    pub(super) fn max_step_decodes(&self) -> usize {
        match self.limits.num_stages as usize {
            1 => usize::MAX,
            num_stages => self.num_decodes().div_ceil(num_stages),
        }
    }

    /// Steps from one token of a sequence to its next: with several stages, the step after a result is planned behind
    /// all other steps in flight.
    pub(super) fn num_steps_per_token(&self) -> usize {
        if self.limits.num_stages > 1 { self.max_steps_in_flight() } else { 1 }
    }

    /// One decode of each running sequence that decodes, also of those that cannot advance before another result is
    /// back: a step in front of their next token delays it, although the step does not contain them.
    pub(super) fn running_decodes(&self) -> Work {
        let mut decodes = Work::default();
        for sequence in self.residents.running().map(|id| self.sequence(id)).filter(|sequence| sequence.is_decoding()) {
            decodes.add_decode(sequence.num_computed_tokens());
        }
        decodes
    }

    fn num_decodes(&self) -> usize {
        let is_decode = |id: &SequenceId| !self.sequence(*id).is_at_limit() && self.sequence(*id).is_decoding();
        self.residents.running().filter(is_decode).count()
    }
}
