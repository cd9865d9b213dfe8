//! From the queue to the worker: what is found in the prefix cache, who waits for whom, who fits.

use std::time::Duration;

use crate::cache::{Lookup, Table};
use crate::flight::Stay;
use crate::plan::{BlockId, SequenceId};
use crate::scheduler::Scheduler;
use crate::step::Draft;

/// Blocks that may be looked up for one step, bar the last sequence's; it bounds the time that a step's planning takes,
/// however many in the queue wait for each other.
const MAX_LOOKED_UP_BLOCKS: usize = 1024;

/// What is left for newcomers in one step.
pub(crate) struct Admission {
    /// Blocks that no running sequence needs for what is known of it; less than none when they need more than there are.
    spare_blocks: isize,
    num_looked_up_blocks: usize,
    pub is_closed: bool,
}

impl Admission {
    pub fn new(spare_blocks: isize) -> Self {
        Self { spare_blocks, num_looked_up_blocks: 0, is_closed: false }
    }

    /// One step takes more blocks of a prompt than the whole of it needs at a time: windows pass them when it is over.
    pub fn borrow(&mut self, num_taken: usize, num_lacking: usize) {
        self.spare_blocks -= num_taken.saturating_sub(num_lacking) as isize;
    }

    /// Blocks that a newcomer may take. One for each sequence that runs stays free, or the newcomer would soon be
    /// preempted; and so one that was just preempted does not come back in the same step.
    pub fn available(&self, scheduler: &Scheduler) -> usize {
        usize::try_from(self.spare_blocks - scheduler.running.len() as isize).unwrap_or(0)
    }
}

impl Scheduler {
    /// Blocks that are available and that none of those who compute their prompts still need for them.
    pub(crate) fn spare_blocks(&self, prefills: &[SequenceId]) -> isize {
        let needed: usize = prefills.iter().map(|id| self.num_blocks_of(*id)).sum();
        self.cache.pool.num_available() as isize - needed as isize
    }

    /// Starts a sequence from the queue if the pool can hold all that is known of it and the step has time for a part. When
    /// it has to wait for the pool or the time, so has everybody behind it.
    pub(crate) fn admit(&mut self, draft: &mut Draft, admission: &mut Admission, id: SequenceId, now: Duration) {
        let num_available = admission.available(self);
        // PERF: who does not fit is not looked up again before it may. What it wants can only have become less by what
        // others computed; but then it would have waited for those.
        if self.sequence(id).num_wanted_blocks() > num_available {
            admission.is_closed = true;
            return;
        }
        let lookup = self.look_up(id);
        admission.num_looked_up_blocks += 1 + lookup.num_visited;
        admission.is_closed = admission.num_looked_up_blocks >= MAX_LOOKED_UP_BLOCKS;
        if let Some(node) = lookup.awaited {
            let effort = self.sequence(id).turn(now, &self.limits).effort;
            self.wait(id, node);
            self.lend(node, effort, lookup.num_awaited_blocks as u32 * self.limits.block_tokens);
            return;
        }
        let (sequence, num_hit_blocks) = (self.sequence(id), lookup.block_ids.len());
        let num_known_tokens = sequence.num_pending_tokens();
        let layout = sequence.layout();
        let num_lacking = layout.num_lacking_blocks(num_known_tokens, num_hit_blocks, lookup.held().len());
        let num_wanted = num_lacking + lookup.num_available;
        if num_wanted > num_available {
            self.sequence_mut(id).set_num_wanted_blocks(num_wanted);
            admission.is_closed = true;
            return;
        }
        let num_hit_tokens = num_hit_blocks as u32 * layout.block_tokens;
        let slots = (num_available - lookup.num_available) as u64 * u64::from(layout.block_tokens);
        let possible = slots.min(u64::from(num_known_tokens - num_hit_tokens)) as u32;
        let num_tokens = self.chunk_tokens(draft, id, num_hit_tokens, possible);
        if num_tokens == 0 {
            // A source that does not fit into what is left of the step. Others may use that, until it was overtaken enough.
            admission.is_closed = true;
            draft.is_full |= self.sequence(id).turn(now, &self.limits).effort == 0;
            return;
        }
        admission.spare_blocks -= num_wanted as isize;
        admission.borrow(layout.num_blocks(num_hit_tokens + num_tokens) - num_hit_blocks, num_lacking);
        let relied_on = self.start(draft, id, lookup);
        self.advance_prompt(draft, id, num_tokens, relied_on);
    }

    fn look_up(&self, id: SequenceId) -> Lookup {
        let sequence = self.sequence(id);
        match sequence.cacheable() {
            Some((root, token_ids)) => self.cache.look_up(root, token_ids, sequence.precedence()),
            None => Lookup::default(),
        }
    }

    /// Blocks that a sequence lacks to hold all that is known of it.
    pub(crate) fn num_blocks_of(&self, id: SequenceId) -> usize {
        self.sequence(id).num_lacking_blocks()
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
        let relied_on = lookup.held().iter().copied().filter(unwritten).collect();
        let mut table = Table::default();
        if let Some(root) = sequence.root() {
            table = self.cache.hold(root, sequence.token_ids(), lookup);
            self.cache.promise(&table, sequence.promise());
        }
        let (precedence, max_tokens) = (sequence.precedence(), sequence.max_tokens());
        draft.plan.new_sequences.push(sequence.start(stay, table));
        self.queue.remove(precedence);
        self.running.insert(precedence, id);
        self.max_running_tokens += u64::from(max_tokens);
        relied_on
    }
}
