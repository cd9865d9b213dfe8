//! Which prompts a step computes beside its decodes: those of running sequences and those of the queue, by their turn.
//!
//! The least left goes first, so that a short prompt is done although a long one is under way, and several are under way
//! at once. Nobody starves: a prompt is overtaken by at most `max_overtaking` tokens of later ones for each of its own
//! (`Sequence::turn`), and of two under way the one in turn always gets at least a block in a step.
//!
//! Prompts under way hold blocks, and wait for each other in any order. That is no deadlock: nobody is started unless the
//! pool can hold the prompts of all who run to their ends, and where decodes have since taken what was left for them, the
//! first in line is preempted by nobody, the others are preempted for it, and nobody is given the block it needs. Nor is it
//! a livelock: turns decide who computes, only precedence who keeps blocks.

use std::time::Duration;

use crate::admission::Admission;
use crate::order::Turn;
use crate::plan::SequenceId;
use crate::scheduler::Scheduler;
use crate::step::Draft;

/// From how far behind the first in the queue a shorter prompt is taken. Bounds the time that planning takes.
const MAX_PASSED: usize = 8;

/// A running sequence that computes its prompt.
struct Candidate {
    turn: Turn,
    id: SequenceId,
    num_overtaken_tokens: u64,
}

impl Scheduler {
    /// Gives the prompts what the step, its time and the pool have for them.
    pub(crate) fn advance_prefills(&mut self, draft: &mut Draft, prefills: Vec<SequenceId>, now: Duration) {
        let mut admission = Admission::new(self.spare_blocks(&prefills));
        // The first in line has been promised its block (`make_room`).
        let first = self.running.first();
        let mut promised = first.filter(|first| prefills.contains(first));
        let mut candidates: Vec<_> = prefills
            .into_iter()
            .map(|id| Candidate { turn: self.sequence(id).turn(now, &self.limits), id, num_overtaken_tokens: 0 })
            .collect();
        candidates.sort_unstable_by_key(|candidate| candidate.turn);
        let mut waiting = &mut candidates[..];
        let mut served: Vec<(Turn, u32)> = Vec::new();
        while draft.has_room(&self.limits) {
            let queued = self.next_in_queue(&admission, now);
            let before = draft.tokens_left;
            let turn = match (waiting.first(), queued) {
                (running, Some((turn, id))) if running.is_none_or(|running| turn < running.turn) => {
                    self.admit(draft, &mut admission, id, now);
                    turn
                }
                (Some(_), _) => {
                    let (first, rest) = waiting.split_first_mut().expect("just seen");
                    promised = promised.filter(|id| *id != first.id);
                    self.advance_prefill(draft, first.id, promised);
                    waiting = rest;
                    first.turn
                }
                (None, _) => break,
            };
            let num_tokens = before - draft.tokens_left;
            if num_tokens > 0 {
                served.push((turn, num_tokens));
                let passed = waiting.iter_mut().filter(|other| other.turn.precedence < turn.precedence);
                passed.for_each(|other| other.num_overtaken_tokens += u64::from(num_tokens));
            }
        }
        for candidate in candidates.iter().filter(|candidate| candidate.num_overtaken_tokens > 0) {
            self.sequence_mut(candidate.id).overtake(candidate.num_overtaken_tokens);
        }
        self.overtake_queued(&served);
    }

    /// Leaves in the pool what has been `promised` to another one.
    fn advance_prefill(&mut self, draft: &mut Draft, id: SequenceId, promised: Option<SequenceId>) {
        let block_tokens = self.limits.block_tokens;
        let num_promised = promised.map_or(0, |id| self.sequence(id).num_missing_blocks(1, block_tokens));
        let num_free = self.cache.pool.num_available().saturating_sub(num_promised);
        let possible = self.sequence(id).max_advance_tokens(num_free, block_tokens);
        let num_tokens = self.chunk_tokens(draft, self.sequence(id).num_computed_tokens(), possible);
        self.advance(draft, id, num_tokens, Vec::new());
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
        if self.isolated.is_some() || limits.max_overtaking == 0 {
            return Some(with_turn(first));
        }
        let left_over = admission.available(self).saturating_sub(self.num_blocks_of(first));
        let fits_too = |id: &SequenceId| *id == first || self.num_blocks_of(*id) <= left_over;
        self.queue.iter().take(MAX_PASSED).filter(fits_too).map(with_turn).min()
    }

    /// Only those near the front can have been overtaken.
    fn overtake_queued(&mut self, served: &[(Turn, u32)]) {
        if served.is_empty() || self.limits.max_overtaking == 0 {
            return;
        }
        let ids: Vec<_> = self.queue.iter().take(MAX_PASSED).collect();
        for id in ids {
            let precedence = self.sequence(id).precedence();
            let behind = served.iter().filter(|(turn, _)| precedence < turn.precedence);
            let num_tokens = behind.map(|(_, num_tokens)| u64::from(*num_tokens)).sum();
            self.sequence_mut(id).overtake(num_tokens);
        }
    }
}
