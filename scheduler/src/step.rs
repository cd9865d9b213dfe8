//! Planning one step: running decodes, then unfinished prefills, then the queue; each in order of precedence.
//!
//! Nobody deadlocks: `submit` took only what fits alone, and the first in line is preempted by nobody, so it always gets
//! its blocks. Nobody livelocks: only a sequence with precedence takes blocks from another, never the reverse.

use std::time::Duration;

use crate::flight::{Flight, InFlight, Stay};
use crate::plan::{Plan, SequenceId};
use crate::scheduler::Scheduler;
use crate::sequence::Sequence;

/// A plan in the making.
struct Draft {
    plan: Plan,
    in_flight: Vec<InFlight>,
    /// What is left of `max_step_tokens`.
    tokens_left: u32,
}

impl Scheduler {
    /// The next step, or `None` when there is nothing to do before the next `submit`, `abort` or `apply`.
    ///
    /// `now` is any monotonic time; arrival order alone decides so far.
    pub fn plan(&mut self, _now: Duration) -> Option<Plan> {
        if self.flights.len() >= self.limits.max_steps_in_flight as usize {
            return None;
        }
        if !self.make_room() {
            return None;
        }
        let mut draft = Draft {
            plan: Plan { step: self.num_steps + 1, ..Plan::default() },
            in_flight: Vec::with_capacity(self.running.len()),
            tokens_left: self.limits.max_step_tokens,
        };
        self.advance_running(&mut draft);
        self.admit(&mut draft);
        if draft.plan.advances.is_empty() && self.freed.is_empty() {
            return None;
        }
        self.num_steps = draft.plan.step;
        draft.plan.freed = std::mem::take(&mut self.freed);
        self.flights.push_back(Flight { step: draft.plan.step, advances: draft.in_flight });
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
        while needed > self.pool.num_free() + self.pool.num_retiring()
            && let Some(last) = self.running.last()
        {
            needed -= self.needed_blocks(last, first);
            self.preempt(last);
        }
        needed <= self.pool.num_free()
    }

    fn needed_blocks(&self, id: SequenceId, first: Option<SequenceId>) -> usize {
        let sequence = self.sequence(id);
        if sequence.is_decoding() || Some(id) == first {
            sequence.num_missing_blocks(1, self.limits.block_tokens)
        } else {
            0
        }
    }

    /// Every running sequence gets what the step and the pool have for it. Prefills follow the decodes.
    fn advance_running(&mut self, draft: &mut Draft) {
        let (decodes, prefills): (Vec<_>, Vec<_>) =
            self.running.iter().partition(|id| self.sequence(*id).is_decoding());
        for id in decodes {
            self.advance(draft, id, 1);
        }
        for id in prefills {
            let possible = self.sequence(id).max_advance_tokens(self.pool.num_free(), self.limits.block_tokens);
            self.advance(draft, id, possible.min(draft.tokens_left));
        }
    }

    /// Starts sequences from the queue, strictly in order, while the step has room and the pool can hold all that is
    /// known of them. One more block for each sequence that runs stays free, or the newcomer would soon be preempted; and
    /// so one that was just preempted does not come back in the same step.
    ///
    /// INVARIANT: all that run fit into one step as decodes, for whoever runs has advanced in the step that starts
    /// another: a prefill that could not has left no token or no block.
    fn admit(&mut self, draft: &mut Draft) {
        while draft.tokens_left > 0
            && draft.plan.advances.len() < self.limits.max_step_sequences as usize
            && let Some(id) = self.queue.first()
        {
            let sequence = self.sequence(id);
            let num_tokens = sequence.num_pending_tokens();
            let num_blocks = sequence.num_missing_blocks(num_tokens, self.limits.block_tokens);
            if num_blocks + self.running.len() > self.pool.num_free() {
                break;
            }
            self.start(draft, id);
            self.advance(draft, id, num_tokens.min(draft.tokens_left));
        }
    }

    fn start(&mut self, draft: &mut Draft, id: SequenceId) {
        self.num_stays += 1;
        let stay = Stay(self.num_stays);
        let sequence = self.sequence_mut(id);
        let (precedence, max_tokens) = (sequence.precedence(), sequence.max_tokens());
        draft.plan.started.push(sequence.start(stay));
        self.queue.remove(precedence);
        self.running.insert(precedence, id);
        self.max_running_tokens += u64::from(max_tokens);
    }

    /// Plans `num_tokens` of a running sequence, for which there is room in the step and in the pool.
    fn advance(&mut self, draft: &mut Draft, id: SequenceId, num_tokens: u32) {
        if num_tokens == 0 {
            return;
        }
        let num_blocks = self.sequence(id).num_missing_blocks(num_tokens, self.limits.block_tokens);
        let new_block_ids = self.pool.take(num_blocks).expect("invariant: the caller made room in the pool");
        let sequence = self.sequence_mut(id);
        let advance = sequence.advance(num_tokens, new_block_ids, draft.plan.step);
        let stay = sequence.stay().expect("invariant: a running sequence is known to the worker");
        if sequence.is_planned_out() {
            let precedence = sequence.precedence();
            let (block_ids, last_step) = sequence.give_up_blocks();
            self.pool.release(block_ids, last_step);
            self.running.remove(precedence);
        }
        draft.tokens_left -= num_tokens;
        draft.in_flight.push(InFlight { id, stay, sample: advance.sample });
        draft.plan.advances.push(advance);
    }

    fn sequence(&self, id: SequenceId) -> &Sequence {
        self.sequences.get(&id).expect("invariant: who is in line is known")
    }

    fn sequence_mut(&mut self, id: SequenceId) -> &mut Sequence {
        self.sequences.get_mut(&id).expect("invariant: who is in line is known")
    }
}
