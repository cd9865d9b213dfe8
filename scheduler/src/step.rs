//! Planning one step: running decodes first, in order of precedence; then prompts, those under way and those from the queue
//! (`prefill.rs`), as far as the step's budget and its time go.
//!
//! Nobody deadlocks: `submit` took only what fits alone, and the first in line is preempted by nobody, so it always gets
//! its blocks. Nobody livelocks: precedence is a total order that never changes, and only a sequence ahead takes blocks from
//! one behind, so of two the same one is preempted every time.

use std::time::Duration;

use crate::flight::{Flight, InFlight};
use crate::plan::{BlockId, Limits, Plan, SequenceId};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;
use crate::timing::Estimate;

/// A plan in the making.
pub(crate) struct Draft {
    pub plan: Plan,
    in_flight: Vec<InFlight>,
    now: Duration,
    /// What it computes so far, and how long that may take.
    pub estimate: Estimate,
    /// What is left of `max_step_tokens`.
    pub tokens_left: u32,
    /// Another block of a prompt would make it last too long, or take the room of one that needs a step of its own.
    pub is_full: bool,
}

impl Draft {
    pub fn has_room(&self, limits: &Limits) -> bool {
        self.tokens_left > 0 && !self.is_full && self.plan.advances.len() < limits.max_step_sequences as usize
    }
}

impl Scheduler {
    /// The next step, or `None` when there is nothing to do before the next `submit`, `abort` or `apply`.
    ///
    /// `now` is the clock of `submit`.
    pub fn plan(&mut self, now: Duration) -> Option<Plan> {
        if self.flights.len() >= self.max_steps_in_flight() {
            return None;
        }
        if !self.make_room() {
            return None;
        }
        let mut draft = Draft {
            plan: Plan { step: self.num_steps + 1, ..Plan::default() },
            in_flight: Vec::with_capacity(self.running.len()),
            now,
            estimate: Estimate::default(),
            tokens_left: self.limits.max_step_tokens,
            is_full: false,
        };
        let (decodes, prefills): (Vec<_>, Vec<_>) =
            self.running.iter().partition(|id| self.sequence(*id).is_decoding());
        for id in decodes {
            draft.estimate.work.add_decode(self.sequence(id).num_computed_tokens());
            self.advance(&mut draft, id, 1, Vec::new());
        }
        draft.estimate.bound = self.bound(&draft.estimate.work, prefills.len());
        self.advance_prefills(&mut draft, prefills, now);
        if draft.plan.advances.is_empty() && self.freed.is_empty() {
            return None;
        }
        self.num_steps = draft.plan.step;
        // Only now: nobody reads in a step what another one writes in the same, nor writes what another one reads.
        for in_flight in &draft.in_flight {
            self.share(in_flight.id);
            if self.limits.window_tokens.is_some() {
                self.pass(in_flight.id);
            }
        }
        draft.plan.freed_sequence_ids = std::mem::take(&mut self.freed);
        let estimate = Estimate { seconds: self.cost.seconds(&draft.estimate.work), ..draft.estimate };
        self.flights.push_back(Flight { step: draft.plan.step, advances: draft.in_flight, estimate });
        Some(draft.plan)
    }

    /// Preempts the last in line until the pool holds a block for everyone who must advance: the decodes, and the first
    /// in line whatever it does.
    ///
    /// Blocks about to retire count: waiting for a step in flight is cheaper than computing a sequence again. Then the
    /// answer is false and no step is planned at all, because one without a running decode would let that decode stall.
    fn make_room(&mut self) -> bool {
        let first = self.running.first();
        let mut needed: usize = self.running.iter().map(|id| self.needed_blocks(id, first)).sum();
        while needed > self.cache.pool.num_available() + self.cache.pool.num_retiring()
            && let Some(last) = self.running.last()
        {
            needed -= self.needed_blocks(last, first);
            self.preempt(last);
        }
        needed <= self.cache.pool.num_available()
    }

    fn needed_blocks(&self, id: SequenceId, first: Option<SequenceId>) -> usize {
        let sequence = self.sequence(id);
        if sequence.is_decoding() || Some(id) == first { sequence.num_missing_blocks(1) } else { 0 }
    }

    /// Plans `num_tokens` of a running sequence, for which there is room in the step and in the pool.
    pub(crate) fn advance(&mut self, draft: &mut Draft, id: SequenceId, num_tokens: u32, relied_on: Vec<BlockId>) {
        if num_tokens == 0 {
            return;
        }
        let sequence = self.sequences.get_mut(&id).expect("invariant: who is in line is known");
        sequence.serve(draft.now);
        let num_blocks = sequence.num_missing_blocks(num_tokens);
        let take = || self.cache.take().expect("invariant: the caller made room in the pool");
        let new_block_ids = std::iter::repeat_with(take).take(num_blocks).collect();
        let advance = sequence.advance(num_tokens, new_block_ids);
        let (written, num_filled) = sequence.written_blocks(num_tokens);
        for block_id in written {
            self.cache.pool.write(*block_id, draft.plan.step);
        }
        let filled = if sequence.root().is_some() { written[..num_filled].to_vec() } else { Vec::new() };
        let stay = sequence.stay().expect("invariant: a running sequence is known to the worker");
        if sequence.is_planned_out() {
            for block_id in sequence.table().held() {
                self.cache.pool.leave(*block_id);
            }
            self.running.remove(sequence.precedence());
        }
        draft.tokens_left -= num_tokens;
        draft.in_flight.push(InFlight { id, stay, sample: advance.sample, filled, relied_on });
        draft.plan.advances.push(advance);
    }

    pub(crate) fn sequence(&self, id: SequenceId) -> &Sequence {
        self.sequences.get(&id).expect("invariant: who is in line is known")
    }

    pub(crate) fn sequence_mut(&mut self, id: SequenceId) -> &mut Sequence {
        self.sequences.get_mut(&id).expect("invariant: who is in line is known")
    }
}
