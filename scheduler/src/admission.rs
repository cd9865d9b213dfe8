//! From the queue to the worker: what is found in the prefix cache, who waits for whom, who fits.

use crate::cache::{Lookup, Table};
use crate::flight::Stay;
use crate::plan::{BlockId, SequenceId};
use crate::scheduler::Scheduler;
use crate::step::Draft;

/// Blocks that may be looked up for one step, bar the last sequence's; it bounds the time that a step's planning takes,
/// however many in the queue wait for each other.
const MAX_LOOKED_UP_BLOCKS: usize = 1024;

impl Scheduler {
    /// Starts sequences from the queue, strictly in order, while the step has room and the pool can hold all that is
    /// known of them. One more block for each sequence that runs stays free, or the newcomer would soon be preempted; and
    /// so one that was just preempted does not come back in the same step.
    ///
    /// INVARIANT: all that run fit into one step as decodes, for whoever runs has advanced in the step that starts
    /// another: a prefill that could not has left no token or no block.
    pub(crate) fn admit(&mut self, draft: &mut Draft) {
        let mut num_looked_up_blocks = 0;
        while draft.has_room(&self.limits)
            && num_looked_up_blocks < MAX_LOOKED_UP_BLOCKS
            && let Some(id) = self.first_in_line()
        {
            let num_available = self.cache.pool.num_available().saturating_sub(self.running.len());
            // PERF: who is first in line and does not fit is not looked up again before it may. What it wants can only have
            // become less by what others computed; but then it would have waited for those.
            if self.sequence(id).num_wanted_blocks() > num_available {
                break;
            }
            let lookup = self.look_up(id);
            num_looked_up_blocks += 1 + lookup.num_visited;
            if let Some(node) = lookup.awaited {
                self.wait(id, node);
                continue;
            }
            let num_wanted = self.num_blocks_of(id) - lookup.block_ids.len() + lookup.num_available;
            if num_wanted > num_available {
                self.sequence_mut(id).set_num_wanted_blocks(num_wanted);
                break;
            }
            let relied_on = self.start(draft, id, lookup);
            let num_tokens = self.sequence(id).num_pending_tokens().min(draft.tokens_left);
            self.advance(draft, id, num_tokens, relied_on);
        }
    }

    fn look_up(&self, id: SequenceId) -> Lookup {
        let sequence = self.sequence(id);
        match sequence.cacheable() {
            Some((root, token_ids)) => self.cache.look_up(root, token_ids, sequence.precedence()),
            None => Lookup::default(),
        }
    }

    /// Blocks that hold all that is known of a queued sequence.
    fn num_blocks_of(&self, id: SequenceId) -> usize {
        let sequence = self.sequence(id);
        sequence.num_missing_blocks(sequence.num_pending_tokens(), self.limits.block_tokens)
    }

    /// Returns the shared blocks that are not written yet.
    fn start(&mut self, draft: &mut Draft, id: SequenceId, lookup: Lookup) -> Vec<BlockId> {
        self.num_stays += 1;
        let stay = Stay(self.num_stays);
        let block_tokens = self.limits.block_tokens;
        let sequence = self.sequences.get_mut(&id).expect("invariant: who is in line is known");
        if let Some((_, token_ids)) = sequence.cacheable() {
            self.num_queried_tokens += token_ids.len() as u64;
            self.num_hit_tokens += lookup.block_ids.len() as u64 * u64::from(block_tokens);
        }
        let unwritten = |block_id: &BlockId| !self.cache.pool.is_written(*block_id);
        let relied_on = lookup.block_ids.iter().copied().filter(unwritten).collect();
        let mut table = Table::default();
        if let Some(root) = sequence.root() {
            table = self.cache.hold(root, sequence.token_ids(), lookup);
            self.cache.promise(&table, sequence.promise());
        }
        let (precedence, max_tokens) = (sequence.precedence(), sequence.max_tokens());
        draft.plan.started.push(sequence.start(stay, table, block_tokens));
        self.queue.remove(precedence);
        self.running.insert(precedence, id);
        self.max_running_tokens += u64::from(max_tokens);
        relied_on
    }
}
