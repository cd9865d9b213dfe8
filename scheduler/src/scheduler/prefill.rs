//! Chooses the prompts that a step computes besides its decodes: those of running and of queued sequences, by
//! `PrefillOrder`.
//!
//! The prompt with the fewest tokens left goes first, so a short prompt is not delayed by a long one, and several
//! prompts can be running at once. No prompt starves: each of its tokens is overtaken by at most `max_overtaking`
//! tokens of prompts of lower precedence, and the first running prompt advances by at least a block in every step.
//! A source is computed in one step, and so is a span of tokens that attend to each other, so it may need more tokens
//! than the decodes leave; once its overtaking budget is used up, no other prompt is started, and the running sequences
//! finish before it.
//!
//! Running prompts hold blocks and wait for more, but cannot deadlock: a sequence is admitted only if the pool can hold
//! the whole prompts of all running sequences. If decodes have since used up these blocks, the running sequence with
//! the highest precedence keeps its blocks, others are preempted for it, and the next block that it needs is reserved.
//! This is no livelock either: `PrefillOrder` decides which prompt computes, only the fixed precedence decides which
//! sequence keeps its blocks.

use std::collections::VecDeque;

use super::Scheduler;
use super::admission::Admission;
use super::plan_builder::PlanBuilder;
use crate::plan::{BlockId, SequenceId};
use crate::precedence::{Precedence, PrefillOrder};

/// Ready sequences at the front of the queue that are considered for admission. Bounds the time that planning takes.
pub(super) const MAX_CANDIDATES: usize = 8;

/// Prompt tokens planned in a step, in the order of planning.
#[derive(Default)]
struct PlannedPrompts(Vec<(Precedence, u32)>);

impl PlannedPrompts {
    /// Tokens of sequences of lower precedence.
    fn num_tokens_behind(&self, precedence: Precedence) -> u64 {
        let behind = self.0.iter().filter(|(planned, _)| precedence < *planned);
        behind.map(|(_, num_tokens)| u64::from(*num_tokens)).sum()
    }
}

impl Scheduler {
    /// Advances running prompts and admits queued ones, as far as the step and the pool have room. `prefills`: the
    /// running sequences that do not decode.
    pub(super) fn advance_prefills(&mut self, builder: &mut PlanBuilder, prefills: Vec<SequenceId>) {
        self.note_arrivals();
        let mut admission = Admission::new(self.num_unreserved_blocks(&prefills), builder.max_restored_blocks);
        // `make_room` has made sure that there are blocks for the first running sequence.
        let mut reserved_for = self.residents.running().next().filter(|first| prefills.contains(first));
        let mut running = VecDeque::from(self.in_order(prefills, builder));
        let mut left_out = Vec::new();
        let mut planned = PlannedPrompts::default();
        while builder.has_room(&self.limits) {
            let (num_tokens_left, num_blocked) = (builder.num_tokens_left, self.queue.num_blocked());
            let id = match (running.front().copied(), self.next_candidate(&admission, builder)) {
                (next, Some((order, id))) if next.is_none_or(|(next, _)| order < next) => {
                    self.admit(builder, &mut admission, id);
                    id
                }
                (Some((_, id)), _) => {
                    running.pop_front();
                    reserved_for = reserved_for.filter(|first| *first != id);
                    if !self.advance_running(builder, &mut admission, id, reserved_for) {
                        left_out.push(id);
                    }
                    id
                }
                (None, _) => break,
            };
            if self.queue.num_blocked() > num_blocked {
                // A running prompt may have become more urgent.
                running = self.in_order(running.into_iter().map(|(_, id)| id).collect(), builder).into();
            } else if builder.num_tokens_left < num_tokens_left {
                let precedence = self.sequence(id).precedence();
                self.sequence_mut(id).add_overtaken_tokens(planned.num_tokens_behind(precedence));
                planned.0.push((precedence, num_tokens_left - builder.num_tokens_left));
            }
        }
        left_out.extend(running.into_iter().map(|(_, id)| id));
        self.note_overtaken(left_out, &planned);
    }

    fn in_order(&self, ids: Vec<SequenceId>, builder: &PlanBuilder) -> Vec<(PrefillOrder, SequenceId)> {
        let mut in_order: Vec<_> = ids.into_iter().map(|id| self.with_order(id, builder)).collect();
        in_order.sort_unstable();
        in_order
    }

    fn with_order(&self, id: SequenceId, builder: &PlanBuilder) -> (PrefillOrder, SequenceId) {
        (self.sequence(id).prefill_order(builder.now, &self.limits), id)
    }

    /// Advances a running prompt, but leaves the blocks that `reserved_for` needs. Returns false if nothing was left
    /// for it.
    fn advance_running(
        &mut self,
        builder: &mut PlanBuilder,
        admission: &mut Admission,
        id: SequenceId,
        reserved_for: Option<SequenceId>,
    ) -> bool {
        let num_reserved = reserved_for.map_or(0, |id| self.sequence(id).num_next_blocks());
        let num_allocatable = self.cache.pool().num_allocatable().saturating_sub(num_reserved);
        let sequence = self.sequence(id);
        let num_computed_tokens = sequence.num_computed_tokens();
        let wanted = sequence.table().wanted().iter().copied();
        let max_tokens = sequence.max_advance_tokens(num_allocatable);
        let reach_tokens = self.limits.snapshot_reach_tokens;
        let max_tokens = sequence.saved_advance_tokens(wanted, num_computed_tokens, max_tokens, reach_tokens);
        let num_tokens = self.chunk_tokens(builder, id, num_computed_tokens, max_tokens);
        admission.reserve_excess(sequence.num_new_blocks(num_tokens), sequence.num_missing_blocks());
        if num_tokens == 0 && sequence.min_advance_tokens(sequence.num_computed_tokens()) > builder.num_tokens_left {
            // A span that does not fit into the rest of the step, as a source in `admit`.
            builder.is_closed |= sequence.prefill_order(builder.now, &self.limits).overtaking_budget == 0;
        }
        self.advance_prompt(builder, id, num_tokens, Vec::new());
        num_tokens > 0
    }

    pub(super) fn advance_prompt(
        &mut self,
        builder: &mut PlanBuilder,
        id: SequenceId,
        num_tokens: u32,
        unwritten_blocks: Vec<BlockId>,
    ) {
        builder.estimate.work.add_prefill(self.sequence(id).num_computed_tokens(), num_tokens);
        self.advance(builder, id, num_tokens, 0, unwritten_blocks);
    }

    /// The ready sequence to admit next.
    ///
    /// It can overtake the first one in the queue only if the pool has room for both: the first one may wait longer,
    /// but must not lose the blocks that it waits for. Nor may the first one with images lose the room for them.
    fn next_candidate(&self, admission: &Admission, builder: &PlanBuilder) -> Option<(PrefillOrder, SequenceId)> {
        let limits = &self.limits;
        // Each running sequence needs a token in every step once it decodes.
        let max_running = limits.max_step_sequences.min(limits.max_step_tokens) as usize;
        let has_state_slot = limits.num_state_slots == 0 || self.residents.len() < limits.num_state_slots as usize;
        if admission.is_closed || self.residents.running().len() >= max_running || !has_state_slot {
            return None;
        }
        let first = self.first_in_queue()?;
        if self.quarantined.is_some() || limits.max_overtaking == 0 {
            return Some(self.with_order(first, builder));
        }
        let num_missing_blocks = |id| self.sequence(id).num_missing_blocks();
        let num_left_over = admission.num_available_blocks(self).saturating_sub(num_missing_blocks(first));
        let fits_too = |id: &SequenceId| *id == first || num_missing_blocks(*id) <= num_left_over;
        let images = |id: SequenceId| self.sequence(id).images();
        let first_with_images = self.queue.ready().take(MAX_CANDIDATES).find(|id| !images(*id).is_empty());
        let images_fit_too = |id: &SequenceId| {
            let takes_room_of = |first| *id != first && !self.image_room.fits_both(images(first), images(*id));
            images(*id).is_empty() || !first_with_images.is_some_and(takes_room_of)
        };
        let candidates = self.queue.ready().take(MAX_CANDIDATES).filter(fits_too).filter(images_fit_too);
        candidates.map(|id| self.with_order(id, builder)).min()
    }

    /// Counts the tokens that overtook a prompt which did not advance. In the queue, only the candidates for admission
    /// can have been overtaken.
    fn note_overtaken(&mut self, mut left_out: Vec<SequenceId>, planned: &PlannedPrompts) {
        if planned.0.is_empty() || self.limits.max_overtaking == 0 {
            return;
        }
        left_out.extend(self.queue.ready().take(MAX_CANDIDATES));
        left_out.extend(self.queue.awaiting_image_room().values().take(MAX_CANDIDATES));
        for id in left_out {
            let sequence = self.sequence_mut(id);
            sequence.add_overtaken_tokens(planned.num_tokens_behind(sequence.precedence()));
        }
    }
}
