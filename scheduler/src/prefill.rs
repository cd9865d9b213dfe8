//! Which prompts a step computes beside its decodes: those of running sequences and those of the queue, by their turn.
//!
//! The least left goes first, so that a short prompt is done although a long one is under way, and several are under way
//! at once. Nobody starves: a prompt is overtaken by at most `max_overtaking` tokens of later ones for each of its own
//! (`Sequence::turn`), and of two under way the one in turn always gets at least a block in a step. A source, which cannot be
//! cut, may need more than the decodes leave of a step: overtaken enough, it has those who run go on to their ends first.
//!
//! Prompts under way hold blocks, and wait for each other in any order. That is no deadlock: nobody is started unless the
//! pool can hold the prompts of all who run to their ends, and where decodes have since taken what was left for them, the
//! first in line is preempted by nobody, the others are preempted for it, and nobody is given the block it needs. Nor is it
//! a livelock: turns decide who computes, only precedence who keeps blocks.

use std::collections::VecDeque;
use std::time::Duration;

use crate::admission::Admission;
use crate::order::{Precedence, Turn};
use crate::plan::{BlockId, SequenceId};
use crate::scheduler::Scheduler;
use crate::step::Draft;

/// From how far behind the first in the queue a shorter prompt is taken. Bounds the time that planning takes.
const MAX_PASSED: usize = 8;

/// Tokens of prompts that a step computes, in the order in which they were given their part.
#[derive(Default)]
struct Served(Vec<(Precedence, u32)>);

impl Served {
    /// Those of sequences that are behind one in line.
    fn behind(&self, precedence: Precedence) -> u64 {
        let behind = self.0.iter().filter(|(served, _)| precedence < *served);
        behind.map(|(_, num_tokens)| u64::from(*num_tokens)).sum()
    }
}

impl Scheduler {
    /// Gives the prompts what the step, its time and the pool have for them.
    pub(crate) fn advance_prefills(&mut self, draft: &mut Draft, prefills: Vec<SequenceId>, now: Duration) {
        let mut admission = Admission::new(self.spare_blocks(&prefills));
        // The first in line has been promised its block (`make_room`).
        let first = self.running.first();
        let mut promised = first.filter(|first| prefills.contains(first));
        let mut waiting = VecDeque::from(self.in_turn(prefills, now));
        let mut passed_over = Vec::new();
        let mut served = Served::default();
        while draft.has_room(&self.limits) {
            let (num_left, num_waiting) = (draft.tokens_left, self.num_waiting);
            let id = match (waiting.front().copied(), self.next_in_queue(&admission, now)) {
                (running, Some((turn, id))) if running.is_none_or(|(running, _)| turn < running) => {
                    self.admit(draft, &mut admission, id, now);
                    id
                }
                (Some((_, id)), _) => {
                    waiting.pop_front();
                    promised = promised.filter(|promised| *promised != id);
                    if !self.advance_prefill(draft, &mut admission, id, promised) {
                        passed_over.push(id);
                    }
                    id
                }
                (None, _) => break,
            };
            if self.num_waiting > num_waiting {
                // One of those under way may have become more urgent.
                waiting = self.in_turn(waiting.into_iter().map(|(_, id)| id).collect(), now).into();
            } else if draft.tokens_left < num_left {
                let precedence = self.sequence(id).precedence();
                self.sequence_mut(id).overtake(served.behind(precedence));
                served.0.push((precedence, num_left - draft.tokens_left));
            }
        }
        passed_over.extend(waiting.into_iter().map(|(_, id)| id));
        self.note_overtaken(passed_over, &served);
    }

    fn in_turn(&self, ids: Vec<SequenceId>, now: Duration) -> Vec<(Turn, SequenceId)> {
        let with_turn = |id| (self.sequence(id).turn(now, &self.limits), id);
        let mut in_turn: Vec<_> = ids.into_iter().map(with_turn).collect();
        in_turn.sort_unstable();
        in_turn
    }

    /// Leaves in the pool what has been `promised` to another one. False when there is nothing for it.
    fn advance_prefill(
        &mut self,
        draft: &mut Draft,
        admission: &mut Admission,
        id: SequenceId,
        promised: Option<SequenceId>,
    ) -> bool {
        let num_promised = promised.map_or(0, |id| self.sequence(id).num_missing_blocks(1));
        let num_free = self.cache.pool.num_available().saturating_sub(num_promised);
        let sequence = self.sequence(id);
        let possible = sequence.max_advance_tokens(num_free);
        let num_tokens = self.chunk_tokens(draft, id, sequence.num_computed_tokens(), possible);
        admission.borrow(sequence.num_missing_blocks(num_tokens), sequence.num_lacking_blocks());
        self.advance_prompt(draft, id, num_tokens, Vec::new());
        num_tokens > 0
    }

    pub(crate) fn advance_prompt(
        &mut self,
        draft: &mut Draft,
        id: SequenceId,
        num_tokens: u32,
        relied_on: Vec<BlockId>,
    ) {
        draft.estimate.work.add_prefill(self.sequence(id).num_computed_tokens(), num_tokens);
        self.advance(draft, id, num_tokens, relied_on);
    }

    /// Who would leave the queue next.
    ///
    /// Who is not the first in line may go before it as long as the pool holds both: it can be overtaken, but nobody
    /// takes away what it waits for.
    fn next_in_queue(&self, admission: &Admission, now: Duration) -> Option<(Turn, SequenceId)> {
        let limits = &self.limits;
        // Whoever runs needs a token and a place in every step once it decodes.
        if admission.is_closed || self.running.len() >= limits.max_step_sequences.min(limits.max_step_tokens) as usize {
            return None;
        }
        let first = self.first_in_line()?;
        let with_turn = |id| (self.sequence(id).turn(now, limits), id);
        if self.quarantined.is_some() || limits.max_overtaking == 0 {
            return Some(with_turn(first));
        }
        let left_over = admission.available(self).saturating_sub(self.num_blocks_of(first));
        let fits_too = |id: &SequenceId| *id == first || self.num_blocks_of(*id) <= left_over;
        self.queue.iter().take(MAX_PASSED).filter(fits_too).map(with_turn).min()
    }

    /// Those who were not served; in the queue only those near its front can have been overtaken.
    fn note_overtaken(&mut self, mut unserved: Vec<SequenceId>, served: &Served) {
        if served.0.is_empty() || self.limits.max_overtaking == 0 {
            return;
        }
        unserved.extend(self.queue.iter().take(MAX_PASSED));
        for id in unserved {
            let precedence = self.sequence(id).precedence();
            self.sequence_mut(id).overtake(served.behind(precedence));
        }
    }
}
