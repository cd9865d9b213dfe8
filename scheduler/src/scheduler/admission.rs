//! Admits a sequence from the queue to the worker: looks it up in the prefix cache, blocks it if another sequence is
//! computing its prefix, and starts it if it fits.

use super::Scheduler;
use super::plan_builder::PlanBuilder;
use super::prefill::MAX_CANDIDATES;
use crate::cache::{BlockTable, PrefixHit};
use crate::plan::{BlockId, SequenceId};
use crate::prefix::{NodeId, PendingPrefix};
use crate::sequence::MIN_BRANCH_BLOCKS;

/// Blocks that are looked up for one step, apart from the last lookup. Bounds the time that planning takes when many
/// queued sequences wait for each other's prefixes.
const MAX_LOOKED_UP_BLOCKS: usize = 1024;

/// What is left for new sequences in one step.
pub(super) struct Admission {
    /// Allocatable blocks that no running prompt needs; negative if the running prompts need more than there are.
    num_unreserved_blocks: isize,
    num_looked_up_blocks: usize,
    /// Offloaded blocks that the step may bring back.
    num_restorable_blocks: usize,
    pub(super) is_closed: bool,
}

impl Admission {
    pub(super) fn new(num_unreserved_blocks: isize, num_restorable_blocks: usize) -> Self {
        Self { num_unreserved_blocks, num_looked_up_blocks: 0, num_restorable_blocks, is_closed: false }
    }

    /// Accounts for an advance that takes more blocks than the rest of its prompt misses at a time: with a window, some
    /// of them are released after the step.
    pub(super) fn reserve_excess(&mut self, num_new: usize, num_missing: usize) {
        self.num_unreserved_blocks -= num_new.saturating_sub(num_missing) as isize;
    }

    /// Blocks that a new sequence may allocate. One block for each running sequence stays allocatable: otherwise the
    /// new sequence would soon be preempted, and a sequence just preempted would come back in the same step.
    pub(super) fn num_available_blocks(&self, scheduler: &Scheduler) -> usize {
        usize::try_from(self.num_unreserved_blocks - scheduler.residents.running().len() as isize).unwrap_or(0)
    }
}

impl Scheduler {
    /// Allocatable blocks minus those that the running `prefills` still need for their prompts.
    pub(super) fn num_unreserved_blocks(&self, prefills: &[SequenceId]) -> isize {
        let num_missing: usize = prefills.iter().map(|id| self.sequence(*id).num_missing_blocks()).sum();
        self.cache.pool().num_allocatable() as isize - num_missing as isize
    }

    /// Starts a ready sequence if the pool can hold all its known tokens and the step has time for some of them. If
    /// not, closes the admission, so that no sequence behind it is started either.
    pub(super) fn admit(&mut self, builder: &mut PlanBuilder, admission: &mut Admission, id: SequenceId) {
        if self.awaits_image_room(id) {
            self.queue.await_image_room(self.sequence(id).precedence(), id);
            admission.is_closed = self.quarantined.is_some();
            return;
        }
        let num_available = admission.num_available_blocks(self);
        // PERF: no new lookup before the blocks for its last one are there. Fewer blocks could only suffice after other
        // sequences have computed its prefix, and then it would have waited for those.
        if self.sequence(id).num_blocks_to_admit() > num_available {
            admission.is_closed = true;
            return;
        }
        let hit = self.look_up(id);
        admission.num_looked_up_blocks += 1 + hit.num_visited_nodes;
        admission.is_closed = admission.num_looked_up_blocks >= MAX_LOOKED_UP_BLOCKS;
        if let Some(node) = hit.pending_node {
            return self.await_prefix(builder, id, node, &hit);
        }
        let (sequence, num_hit_blocks) = (self.sequence(id), hit.block_ids.len());
        let num_known_tokens = sequence.num_pending_tokens();
        let layout = sequence.layout();
        let num_missing = layout.num_missing_blocks(num_known_tokens, num_hit_blocks, hit.num_held());
        let num_of_hit = hit.num_evictable_blocks + hit.num_offloaded_blocks;
        let num_to_admit = num_missing + num_of_hit;
        if num_to_admit > num_available {
            self.sequence_mut(id).set_num_blocks_to_admit(num_to_admit);
            admission.is_closed = true;
            return;
        }
        if hit.num_offloaded_blocks > admission.num_restorable_blocks {
            // The next steps bring back the rest.
            self.cache.restore(hit, std::mem::take(&mut admission.num_restorable_blocks), builder.plan.step);
            admission.is_closed = true;
            return;
        }
        let num_hit_tokens = num_hit_blocks as u32 * layout.block_tokens;
        let num_places = (num_available - num_of_hit) as u64 * u64::from(layout.block_tokens);
        let max_tokens = num_places.min(u64::from(num_known_tokens - num_hit_tokens)) as u32;
        let wanted = self.wanted_snapshots(id, &hit);
        let reach_tokens = self.limits.snapshot_reach_tokens;
        let max_tokens =
            sequence.saved_advance_tokens(wanted.iter().copied(), num_hit_tokens, max_tokens, reach_tokens);
        let num_tokens = self.chunk_tokens(builder, id, num_hit_tokens, max_tokens);
        if num_tokens == 0 {
            // A source that does not fit into the rest of the step. Running prompts may use the rest, unless they have
            // already overtaken the source often enough.
            admission.is_closed = true;
            builder.is_closed |= sequence.prefill_order(builder.now, &self.limits).overtaking_budget == 0;
            return;
        }
        admission.num_unreserved_blocks -= num_to_admit as isize;
        admission.num_restorable_blocks -= hit.num_offloaded_blocks;
        admission.reserve_excess(layout.num_blocks(num_hit_tokens + num_tokens) - num_hit_blocks, num_missing);
        let unwritten_blocks = self.start(builder, id, hit, wanted);
        self.advance_prompt(builder, id, num_tokens, unwritten_blocks);
        if let (Some(advance), Some(start)) = (builder.in_flight.last_mut(), builder.plan.new_sequences.last()) {
            advance.snapshot = start.snapshot;
        }
    }

    /// Whether there is no room for its images, or a sequence of higher precedence waits for such room: otherwise sequences
    /// with small images could starve one with large ones. Room is released when a resident with images ends.
    fn awaits_image_room(&self, id: SequenceId) -> bool {
        let sequence = self.sequence(id);
        let is_behind = || {
            let first = self.queue.awaiting_image_room().keys().next();
            self.quarantined.is_none() && first.is_some_and(|first| *first < sequence.precedence())
        };
        !sequence.images().is_empty() && (is_behind() || !self.image_room.fits(sequence.images()))
    }

    fn look_up(&self, id: SequenceId) -> PrefixHit {
        let sequence = self.sequence(id);
        match sequence.lookup_key() {
            Some(content) => self.cache.look_up(content, sequence.precedence()),
            None => PrefixHit::default(),
        }
    }

    /// Blocks a sequence until another one has computed its prefix. The producer inherits the waiter's urgency until
    /// then; otherwise a short prompt would wait behind a long one after all.
    ///
    /// Sequences cannot wait in a circle: the producer is running, so it waits for none, and it has the higher
    /// precedence.
    fn await_prefix(&mut self, builder: &PlanBuilder, id: SequenceId, node: NodeId, hit: &PrefixHit) {
        self.sequence_mut(id).set_num_blocks_to_admit(0);
        let sequence = self.sequence(id);
        let overtaking_budget = sequence.prefill_order(builder.now, &self.limits).overtaking_budget;
        self.queue.block(sequence.precedence(), id, node);
        self.wake_for_images();
        if let Some(pending) = self.cache.pending(node) {
            let until_tokens = hit.num_pending_blocks as u32 * self.limits.block_tokens;
            self.sequence_mut(pending.producer).borrow_budget(overtaking_budget, until_tokens);
            self.want_snapshot(pending, hit);
        }
    }

    /// The snapshots that a sequence is to save when it starts with `hit`.
    fn wanted_snapshots(&self, id: SequenceId, hit: &PrefixHit) -> Vec<usize> {
        if self.limits.num_snapshots == 0 {
            return Vec::new();
        }
        let others = self.queue.ready().take(MAX_CANDIDATES).filter(|other| *other != id);
        self.sequence(id).wanted_snapshots(hit, others.map(|other| self.sequence(other)))
    }

    /// Asks the running sequences for the snapshots that new ones could continue at. Call it before prompts advance.
    pub(super) fn note_arrivals(&mut self) {
        for id in std::mem::take(&mut self.arrivals) {
            if self.sequences.get(&id).is_some_and(|sequence| sequence.residency().is_none()) {
                let hit = self.look_up(id);
                if let Some(pending) = hit.pending_node.and_then(|node| self.cache.pending(node)) {
                    self.want_snapshot(pending, &hit);
                }
            }
        }
    }

    /// Asks a producer for the snapshot that a sequence with `hit` waits for, if it can still save it, and saves enough.
    fn want_snapshot(&mut self, pending: PendingPrefix, hit: &PrefixHit) {
        let num_blocks = hit.num_pending_blocks;
        let end = num_blocks as u32 * self.limits.block_tokens;
        let sequence = self.sequences.get_mut(&pending.producer).expect("invariant: a producer is resident");
        let is_worthwhile = num_blocks >= hit.block_ids.len() + MIN_BRANCH_BLOCKS;
        if self.limits.num_snapshots > 0 && is_worthwhile && sequence.can_save(num_blocks) {
            let (table, _, num_written_tokens) = sequence.states();
            if num_written_tokens <= end + self.limits.snapshot_reach_tokens {
                self.cache.want_snapshot(table, num_blocks, pending);
            }
        }
    }

    /// Moves a ready sequence to the worker. Returns the shared blocks that steps in flight have yet to write.
    fn start(&mut self, builder: &mut PlanBuilder, id: SequenceId, hit: PrefixHit, wanted: Vec<usize>) -> Vec<BlockId> {
        let sequence = self.sequences.get_mut(&id).expect("invariant: a queued sequence is known");
        if let Some(content) = sequence.lookup_key() {
            self.cache.record_lookup(content.token_ids.len(), &hit);
        }
        let mut table = match sequence.content() {
            Some(content) => self.cache.open(content, hit, sequence.pending_prefix(), builder.plan.step),
            None => BlockTable::default(),
        };
        for num_blocks in wanted {
            self.cache.want_snapshot(&mut table, num_blocks, sequence.pending_prefix());
        }
        let is_unwritten = |block_id: &BlockId| !self.cache.pool().is_written(*block_id);
        let unwritten_blocks = table.held().iter().copied().filter(is_unwritten).collect();
        let precedence = sequence.precedence();
        self.queue.remove(precedence, id);
        self.image_room.take(sequence.images());
        let residency = self.residents.start(precedence, id, sequence.max_tokens());
        builder.plan.new_sequences.push(sequence.start(residency, table));
        self.wake_for_images();
        unwritten_blocks
    }
}
