//! Plans one step: first all running decodes (with several stages, a share of them: `pipeline.rs`), in order of precedence; then prompts, running and queued (`prefill.rs`),
//! as far as the step's token budget and target duration allow.
//!
//! No deadlock: `submit` accepts only sequences that fit into the pool alone, and the running sequence with the
//! highest precedence is never preempted, so it always gets its blocks. No livelock: precedence is a fixed total
//! order, and a sequence loses blocks only to those of higher precedence, so of two sequences always the same one is
//! preempted.

use std::time::Duration;

use super::Scheduler;
use super::plan_builder::PlanBuilder;
use crate::cost::Estimate;
use crate::in_flight::InFlightAdvance;
use crate::plan::{Advance, BlockId, Plan, SequenceId};

impl Scheduler {
    /// The next step, or `None` if there is nothing to do before the next `submit`, `abort` or `apply`.
    ///
    /// `now` is a time on the clock of `submit`.
    pub fn plan(&mut self, now: Duration) -> Option<Plan> {
        if self.in_flight.len() >= self.max_steps_in_flight() || !self.make_room() {
            return None;
        }
        let mut builder =
            PlanBuilder::new(self.in_flight.next_step(), now, &self.limits, self.residents.running().len());
        let advancing = self.residents.running().filter(|id| self.can_advance(*id));
        let (mut decodes, prefills): (Vec<_>, Vec<_>) = advancing.partition(|id| self.sequence(*id).is_decoding());
        decodes.truncate(self.max_step_decodes());
        for id in &decodes {
            builder.estimate.work.add_decode(self.sequence(*id).num_computed_tokens());
        }
        let (drafting, num_drafts) = self.num_draft_tokens(&decodes, &prefills, &builder.estimate.work);
        for (index, id) in decodes.into_iter().enumerate() {
            let num_draft_tokens = num_drafts.get(index).copied().unwrap_or(0);
            self.advance(&mut builder, id, 1, num_draft_tokens, Vec::new());
        }
        let running_decodes = self.running_decodes();
        builder.estimate.target_seconds = self.target_seconds(&running_decodes, prefills.len());
        builder.max_restored_blocks = self.max_restored_blocks(&running_decodes);
        self.advance_prefills(&mut builder, prefills);
        if builder.plan.advances.is_empty() && !self.residents.has_freed() && !self.cache.has_transfers() {
            return None;
        }
        let saves = self.cache.take_saves();
        // Only now: within a step, no sequence may read what another one writes, or write what another one reads. What is
        // saved of this step's states, the next plan saves.
        for in_flight in &builder.in_flight {
            self.register_blocks(in_flight.id);
            self.save_reached(in_flight);
            if self.limits.window_tokens.is_some() {
                self.release_before_window(in_flight.id);
            }
        }
        builder.plan.drafts_by_lookup = self.limits.drafts_with_model && !drafting.uses_model();
        builder.plan.drafts_only_forced = self.limits.drafts_only_forced && !num_drafts.is_empty();
        builder.plan.freed_sequence_ids = self.residents.take_freed();
        builder.plan.transfers = self.cache.take_transfers();
        let estimate = Estimate { seconds: self.cost.seconds(&builder.estimate.work), ..builder.estimate };
        let restores = builder.plan.new_sequences.iter().any(|new| new.snapshot.is_some());
        let has_transfers = !builder.plan.transfers.is_empty() || !saves.is_empty() || restores;
        let saved = saves.iter().map(|pending| (pending.residency, pending.save.snapshot)).collect();
        builder.plan.saves = saves.into_iter().map(|pending| pending.save).collect();
        self.in_flight.push(builder.in_flight, estimate, drafting, has_transfers, saved);
        Some(builder.plan)
    }

    /// Preempts the running sequences of lowest precedence until the pool has the blocks of those that must
    /// advance: all decodes, and the first running sequence.
    ///
    /// Returns false if these blocks are still retiring: then no step is planned. Waiting for a step in flight is
    /// cheaper than computing a sequence again, and a step without some of the decodes would stall them.
    fn make_room(&mut self) -> bool {
        let first = self.residents.running().next();
        let running = self.residents.running();
        let mut num_required: usize = running.map(|id| self.num_blocks_to_advance(id, first)).sum();
        while num_required > self.cache.pool().num_allocatable() + self.cache.pool().num_retiring()
            && let Some(last) = self.residents.running().next_back()
        {
            if self.sequence(last).is_at_limit() {
                return false; // If its drafts in flight are right, it ends and returns its blocks.
            }
            num_required -= self.num_blocks_to_advance(last, first);
            self.preempt(last, true);
        }
        num_required <= self.cache.pool().num_allocatable()
    }

    /// Blocks that a running sequence must get for the next step; 0 if the step may leave it out.
    fn num_blocks_to_advance(&self, id: SequenceId, first: Option<SequenceId>) -> usize {
        let sequence = self.sequence(id);
        let must_advance = sequence.is_decoding() || Some(id) == first;
        if must_advance && self.can_advance(id) { sequence.num_next_blocks() } else { 0 }
    }

    /// Plans `num_tokens` of a running sequence, and if these are all that it knows, at most `num_draft_tokens` drafts
    /// after them. The step and the pool must have room for all of them.
    pub(super) fn advance(
        &mut self,
        builder: &mut PlanBuilder,
        id: SequenceId,
        num_tokens: u32,
        num_draft_tokens: u32,
        unwritten_blocks: Vec<BlockId>,
    ) {
        if num_tokens == 0 {
            return;
        }
        let sequence = self.sequences.get_mut(&id).expect("invariant: a running sequence is known");
        let allocate = || self.cache.allocate().expect("invariant: the caller made room in the pool");
        let num_rows = num_tokens + num_draft_tokens;
        let new_block_ids = std::iter::repeat_with(allocate).take(sequence.num_new_blocks(num_rows)).collect();
        let first_written = sequence.min_computed_tokens();
        let last_token_id = sequence.last_token_id().filter(|_| self.limits.num_stages > 1);
        let advance = sequence.advance(num_tokens, num_draft_tokens, new_block_ids, builder.now);
        let (written, num_full) = sequence.written_blocks(first_written);
        self.cache.record_writes(written, builder.plan.step);
        let filled_blocks = if sequence.is_shared() { written[..num_full].to_vec() } else { Vec::new() };
        let residency = sequence.residency().expect("invariant: a running sequence is resident");
        if sequence.is_finishing() {
            self.note_finishing(id);
        }
        builder.num_tokens_left -= num_rows;
        let sample = advance.sample;
        builder.in_flight.push(InFlightAdvance {
            id,
            residency,
            sample,
            num_draft_tokens,
            filled_blocks,
            unwritten_blocks,
            snapshot: None,
        });
        builder.plan.advances.push(Advance { last_token_id, ..advance });
    }

    /// Moves a running sequence whose last step is planned to the finishing ones.
    pub(super) fn note_finishing(&mut self, id: SequenceId) {
        let sequence = self.sequences.get(&id).expect("invariant: a running sequence is known");
        self.cache.mark_finishing(sequence.table().held());
        self.residents.finish(sequence.precedence());
    }

    /// Registers a sequence's planned blocks in the prefix cache, and unblocks the queued sequences that wait for them.
    pub(super) fn register_blocks(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("invariant: a resident sequence is known");
        if let Some((table, content, num_computed_tokens)) = sequence.registration() {
            for node in self.cache.register(id, table, content, num_computed_tokens) {
                self.queue.unblock(node);
            }
        }
    }

    /// Saves the states that a sequence was asked for and has reached, and unblocks the queued sequences that wait for them.
    fn save_reached(&mut self, in_flight: &InFlightAdvance) {
        let sequence = self.sequences.get_mut(&in_flight.id).expect("invariant: a resident sequence is known");
        let saver = (in_flight.id, in_flight.residency);
        let (table, num_computed_tokens, num_written_tokens) = sequence.states();
        for node in self.cache.save_reached(saver, table, num_computed_tokens, num_written_tokens) {
            self.queue.unblock(node);
        }
    }

    /// Releases the blocks of a sequence that no later step reads.
    fn release_before_window(&mut self, id: SequenceId) {
        let sequence = self.sequences.get_mut(&id).expect("invariant: a resident sequence is known");
        let (table, num_blocks) = sequence.blocks_before_window();
        self.cache.release_before_window(table, num_blocks);
    }
}
