//! The prefix cache: finds the pool's blocks by the token ids in them.
//!
//! The content of a block that is evicted moves to a slot beside the pool, if there are slots, and back into a block when a sequence
//! starts with it.
//!
//! A block is registered in the tree when all its ids are known and every step that writes it has been planned. A
//! sequence that is planned later can read the block although it may not be written yet: the worker executes plans
//! strictly in order. When the step that writes the block fails, `scheduler/failure.rs` preempts its readers.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::layout::BlockLayout;
use crate::offload::Offload;
use crate::plan::{BlockHash, BlockId, Limits, Save, SequenceId, SnapshotId, Transfer};
use crate::pool::BlockPool;
use crate::precedence::Precedence;
use crate::prefix::{Content, NodeId, Parent, PendingPrefix, PrefixTree};
use crate::resident::Residency;
use crate::snapshot::{PendingSave, Snapshots};

#[derive(Debug)]
pub(crate) struct Cache {
    pool: BlockPool,
    tree: PrefixTree,
    offload: Offload,
    snapshots: Snapshots,
    /// Whether the model keeps states, so that a hit ends at a snapshot.
    has_states: bool,
    snapshot_reach_tokens: u32,
    layout: BlockLayout,
    num_queried_tokens: u64,
    num_hit_tokens: u64,
}

/// Stands in a block table for a block before the window, and in a hit also for one that is offloaded.
const UNREAD_BLOCK: BlockId = 0;

/// The cached part of a sequence's tokens.
#[derive(Debug, Default)]
pub(crate) struct PrefixHit {
    /// Blocks that the sequence can share, in order. The first `num_released` are before the window and never read.
    pub(crate) block_ids: Vec<BlockId>,
    nodes: Vec<NodeId>,
    num_released: usize,
    /// The snapshot at the end of the hit.
    snapshot: Option<SnapshotId>,
    /// Blocks that are computed. With states more than those of the hit, which ends at a snapshot.
    pub(crate) num_known_blocks: usize,
    /// Evictable blocks among those to hold: sharing them makes as many blocks unallocatable.
    pub(crate) num_evictable_blocks: usize,
    /// Blocks among those to hold whose content has to come back into a block.
    pub(crate) num_offloaded_blocks: usize,
    /// The last of the nodes after the hit that one sequence of higher precedence is computing, or where it is going to save
    /// a snapshot.
    pub(crate) pending_node: Option<NodeId>,
    /// Blocks up to and including that of `pending_node`.
    pub(crate) num_pending_blocks: usize,
    /// What the lookup cost.
    pub(crate) num_visited_nodes: usize,
}

impl PrefixHit {
    /// Blocks that a sequence starting with this hit holds.
    pub(crate) fn num_held(&self) -> usize {
        self.block_ids.len() - self.num_released
    }
}

/// What a sequence on the worker holds.
#[derive(Debug, Default)]
pub(crate) struct BlockTable {
    pub(crate) block_ids: Vec<BlockId>,
    /// Leading blocks that were released because they are before the window.
    pub(crate) num_released: usize,
    /// Nodes of the leading blocks: of all blocks whose ids are known, as far as the tree has nodes for them.
    nodes: Vec<NodeId>,
    /// Leading nodes that have been registered or were found.
    num_registered: usize,
    /// Numbers of leading blocks after which a snapshot is to be saved.
    wanted: BTreeSet<usize>,
    /// The snapshot that the sequence starts with.
    pub(crate) snapshot: Option<SnapshotId>,
}

impl BlockTable {
    /// Numbers of leading blocks after which a snapshot is to be saved.
    pub(crate) fn wanted(&self) -> &BTreeSet<usize> {
        &self.wanted
    }

    /// The blocks that the sequence holds.
    pub(crate) fn held(&self) -> &[BlockId] {
        &self.block_ids[self.num_released..]
    }

    /// Whether the tokens fill a block that has no node, or whose node is not registered.
    pub(crate) fn has_full_block(&self, num_token_ids: usize, num_computed_tokens: usize, block_tokens: u32) -> bool {
        num_token_ids >= (self.nodes.len() + 1) * block_tokens as usize
            || num_computed_tokens >= (self.num_registered + 1) * block_tokens as usize
    }

    /// Whether the sequence is going to compute the node, or to save its snapshot.
    pub(crate) fn computes_or_saves(&self, node: NodeId) -> bool {
        let mut unsaved = self.wanted.iter().map(|num_blocks| self.nodes[num_blocks - 1]);
        self.unregistered_nodes().contains(&node) || unsaved.any(|it| it == node)
    }

    /// Nodes that the sequence has yet to compute.
    pub(crate) fn unregistered_nodes(&self) -> &[NodeId] {
        &self.nodes[self.num_registered..]
    }
}

impl Cache {
    pub(crate) fn new(limits: &Limits, layout: BlockLayout, hash: BlockHash) -> Self {
        Self {
            pool: BlockPool::new(limits.num_blocks),
            tree: PrefixTree::new(hash),
            offload: Offload::new(limits.num_memory_slots, limits.num_disk_slots),
            snapshots: Snapshots::new(limits.num_snapshots),
            has_states: limits.num_state_slots > 0,
            snapshot_reach_tokens: limits.snapshot_reach_tokens,
            layout,
            num_queried_tokens: 0,
            num_hit_tokens: 0,
        }
    }

    /// Frees all blocks and forgets their contents.
    pub(crate) fn clear(&mut self) {
        self.pool = BlockPool::new(self.pool.num_blocks());
        self.tree.clear();
        self.offload.clear();
        self.snapshots.clear();
    }

    pub(crate) fn num_full_snapshots(&self) -> usize {
        self.snapshots.num_full()
    }

    /// What the next plan has to save.
    pub(crate) fn take_saves(&mut self) -> Vec<PendingSave> {
        self.snapshots.take_saves()
    }

    /// Slots with content: in memory, and on disk.
    pub(crate) fn num_full_slots(&self) -> [usize; 2] {
        self.offload.num_full()
    }

    pub(crate) fn has_transfers(&self) -> bool {
        self.offload.has_transfers()
    }

    /// What the next plan has to move.
    pub(crate) fn take_transfers(&mut self) -> Vec<Transfer> {
        self.offload.take_transfers()
    }

    pub(crate) fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Tokens looked up by all admissions so far, and how many of these were found.
    pub(crate) fn num_queried_and_hit_tokens(&self) -> (u64, u64) {
        (self.num_queried_tokens, self.num_hit_tokens)
    }

    /// The longest prefix of `content` that is computed, and what follows it as far as a sequence of higher
    /// precedence is computing it. Of the computed part, only the blocks in the window of the next token must be there,
    /// in the pool or offloaded.
    pub(crate) fn look_up(&self, content: Content<'_>, precedence: Precedence) -> PrefixHit {
        let mut hit = PrefixHit::default();
        let mut parent = Parent::Root(content.root);
        let mut producer: Option<SequenceId> = None;
        let (mut num_found, mut num_consecutive) = (0, 0);
        for block in content.blocks(self.layout.block_tokens) {
            hit.num_visited_nodes += 1;
            let Some(node) = self.tree.find(parent, block) else { break };
            parent = Parent::Node(node);
            match (producer, self.tree.block_id(node), self.tree.pending(node)) {
                (None, block_id, _) if block_id.is_some() || self.tree.slot(node).is_some() => {
                    hit.block_ids.push(block_id.unwrap_or(UNREAD_BLOCK));
                    hit.nodes.push(node);
                    num_consecutive += 1;
                    let num_blocks = hit.block_ids.len();
                    if num_blocks - self.num_blocks_before_window(num_blocks) <= num_consecutive {
                        hit.num_known_blocks = num_blocks;
                        if !self.has_states || self.tree.snapshot(node).is_some() {
                            num_found = num_blocks;
                        }
                    }
                }
                (None, None, Some(pending)) if pending.precedence < precedence => {
                    producer = Some(pending.producer);
                    hit.pending_node = Some(node);
                }
                (Some(id), None, Some(pending)) if pending.producer == id && self.tree.slot(node).is_none() => {
                    hit.pending_node = Some(node);
                }
                (None, None, _) if self.layout.window_tokens.is_some() => {
                    hit.block_ids.push(UNREAD_BLOCK);
                    hit.nodes.push(node);
                    num_consecutive = 0;
                }
                _ => break,
            }
            if producer.is_some() {
                hit.num_pending_blocks = hit.num_visited_nodes;
            }
        }
        if producer.is_none() {
            let unsaved = (num_found..hit.num_known_blocks).rev();
            let is_pending = |index: &usize| self.pending_snapshot(hit.nodes[*index], precedence);
            if let Some(index) = unsaved.filter(|_| self.has_states).find(is_pending) {
                (hit.pending_node, hit.num_pending_blocks) = (Some(hit.nodes[index]), index + 1);
            }
        }
        hit.block_ids.truncate(num_found);
        hit.nodes.truncate(num_found);
        hit.snapshot = hit.nodes.last().and_then(|node| self.tree.snapshot(*node));
        hit.num_released = self.num_blocks_before_window(num_found);
        let is_evictable = |block_id: &BlockId| !self.pool.is_held(*block_id) && self.pool.is_written(*block_id);
        hit.num_evictable_blocks = self.blocks_of(&hit).flatten().filter(is_evictable).count();
        hit.num_offloaded_blocks = self.blocks_of(&hit).filter(Option::is_none).count();
        hit
    }

    /// Whether a sequence of higher precedence is going to save a snapshot of the node.
    fn pending_snapshot(&self, node: NodeId, precedence: Precedence) -> bool {
        self.tree.pending_snapshot(node).is_some_and(|pending| pending.precedence < precedence)
    }

    /// Leading blocks that are outside the attention window of a sequence resuming at `num_blocks`.
    fn num_blocks_before_window(&self, num_blocks: usize) -> usize {
        self.layout.num_blocks_before_window(num_blocks as u32 * self.layout.block_tokens)
    }

    /// Counts an admission that looked up `num_tokens` tokens.
    pub(crate) fn record_lookup(&mut self, num_tokens: usize, hit: &PrefixHit) {
        self.num_queried_tokens += num_tokens as u64;
        self.num_hit_tokens += hit.block_ids.len() as u64 * u64::from(self.layout.block_tokens);
    }

    /// The block table of a sequence that starts with `hit` in `step`. Announces it as the producer of its other nodes.
    /// The pool must have room for the offloaded blocks, which come back before the step.
    pub(crate) fn open(
        &mut self,
        content: Content<'_>,
        mut hit: PrefixHit,
        pending: PendingPrefix,
        step: u64,
    ) -> BlockTable {
        self.hold(&mut hit, usize::MAX, step);
        let PrefixHit { block_ids, nodes, num_released, snapshot, .. } = hit;
        let num_registered = nodes.len();
        if let Some(snapshot) = snapshot {
            self.snapshots.use_again(snapshot, num_registered as u32 * self.layout.block_tokens);
        }
        let mut table = BlockTable { block_ids, num_released, num_registered, snapshot, ..BlockTable::default() };
        self.extend_nodes(&mut table.nodes, content);
        debug_assert!(table.nodes.starts_with(&nodes));
        for node in table.unregistered_nodes() {
            if self.tree.block_id(*node).is_none() {
                self.tree.set_pending(*node, pending);
            }
        }
        table
    }

    /// Brings back the first `most` offloaded blocks of a hit before `step`. They are evicted after all others. The pool must have room
    /// for all offloaded blocks of the hit.
    pub(crate) fn restore(&mut self, mut hit: PrefixHit, most: usize, step: u64) {
        self.hold(&mut hit, most, step);
        for block_id in self.blocks_of(&hit).rev().flatten().collect::<Vec<_>>() {
            self.pool.release(block_id, false);
        }
    }

    /// Holds the blocks of a hit, and brings the first `most` that are offloaded back into blocks.
    fn hold(&mut self, hit: &mut PrefixHit, most: usize, step: u64) {
        for block_id in self.blocks_of(hit).flatten().collect::<Vec<_>>() {
            self.pool.hold(block_id);
        }
        let with_slot = |index| Some((index, self.tree.slot(hit.nodes[index])?));
        let offloaded: Vec<_> = (hit.num_released..hit.nodes.len()).filter_map(with_slot).collect();
        // The blocks that are evicted for them need slots, too.
        for (_, slot) in &offloaded {
            self.offload.pin(*slot);
        }
        for (count, (index, slot)) in offloaded.into_iter().enumerate() {
            if count >= most {
                self.offload.unpin(slot);
                continue;
            }
            let block_id = self.allocate().expect("invariant: the caller made room in the pool");
            self.pool.record_write(block_id, step);
            self.pool.set_node(block_id, Some(hit.nodes[index]));
            self.tree.set_block_id(hit.nodes[index], block_id);
            self.offload.load(slot, block_id);
            hit.block_ids[index] = block_id;
        }
    }

    /// The blocks that a hit holds; `None`: offloaded.
    fn blocks_of(&self, hit: &PrefixHit) -> impl DoubleEndedIterator<Item = Option<BlockId>> {
        hit.nodes[hit.num_released..].iter().map(|node| self.tree.block_id(*node))
    }

    /// Allocates a block, evicting the least recently used one if none is free.
    pub(crate) fn allocate(&mut self) -> Option<BlockId> {
        let (block_id, evicted) = self.pool.allocate()?;
        if let Some(node) = evicted {
            self.offload.store(block_id, node, |node, slot| {
                self.tree.move_out(node, slot).into_iter().for_each(|snapshot| self.snapshots.give_up(snapshot));
            });
        }
        Some(block_id)
    }

    /// Notes that `step` writes these blocks.
    pub(crate) fn record_writes(&mut self, block_ids: &[BlockId], step: u64) {
        for block_id in block_ids {
            self.pool.record_write(*block_id, step);
        }
    }

    /// Notes that the last step of the sequence that holds these blocks is planned.
    pub(crate) fn mark_finishing(&mut self, held: &[BlockId]) {
        for block_id in held {
            self.pool.mark_finishing(*block_id);
        }
    }

    /// Notes that `step` and all steps before it are over.
    pub(crate) fn retire(&mut self, step: u64) {
        self.pool.retire(step);
    }

    /// Registers the blocks of a sequence that hold `num_computed_tokens` planned tokens, as far as they are full and
    /// their ids are known. Returns their nodes, which are not pending any more.
    pub(crate) fn register(
        &mut self,
        producer: SequenceId,
        table: &mut BlockTable,
        content: Content<'_>,
        num_computed_tokens: usize,
    ) -> Vec<NodeId> {
        self.extend_nodes(&mut table.nodes, content);
        let num_full_blocks = num_computed_tokens / self.layout.block_tokens as usize;
        let indices = table.num_registered..num_full_blocks.min(table.nodes.len()).max(table.num_registered);
        table.num_registered = indices.end;
        for index in indices.clone() {
            let node = table.nodes[index];
            // The block may have been released before its ids were known.
            if index >= table.num_released {
                self.assign(node, table.block_ids[index]);
            }
            self.tree.clear_pending(node, producer);
        }
        table.nodes[indices].to_vec()
    }

    /// Adds the nodes of all full blocks of known ids.
    fn extend_nodes(&mut self, nodes: &mut Vec<NodeId>, content: Content<'_>) {
        for block in content.blocks(self.layout.block_tokens).skip(nodes.len()) {
            let parent = nodes.last().map_or(Parent::Root(content.root), |node| Parent::Node(*node));
            let Some(node) = self.tree.acquire(parent, block) else { break };
            nodes.push(node);
        }
    }

    /// Gives `node` the block, unless it has another one with the same content: then this one is not shared.
    fn assign(&mut self, node: NodeId, block_id: BlockId) {
        if self.tree.block_id(node).is_none() {
            let slot = self.tree.set_block_id(node, block_id);
            slot.into_iter().for_each(|slot| self.offload.forget(slot));
            self.pool.set_node(block_id, Some(node));
        }
    }

    /// Removes a block from the tree, so that no sequence shares it any more.
    pub(crate) fn forget(&mut self, block_id: BlockId) {
        if let Some(node) = self.pool.node(block_id) {
            self.pool.set_node(block_id, None);
            self.tree.clear_block_id(node).into_iter().for_each(|snapshot| self.snapshots.give_up(snapshot));
        }
    }

    /// Asks the sequence of `table` for a snapshot after its first `num_blocks` blocks, which it has yet to compute.
    pub(crate) fn want_snapshot(&mut self, table: &mut BlockTable, num_blocks: usize, pending: PendingPrefix) {
        if let Some(node) = num_blocks.checked_sub(1).and_then(|index| table.nodes.get(index))
            && self.tree.snapshot(*node).is_none()
        {
            self.tree.set_pending_snapshot(*node, pending);
            table.wanted.insert(num_blocks);
        }
    }

    /// Saves the wanted snapshots that the sequence has reached: it has computed the first `num_computed_tokens`, and may have
    /// computed the first `num_written_tokens`. Returns the nodes that it is not going to save any more.
    pub(crate) fn save_reached(
        &mut self,
        saver: (SequenceId, Residency),
        table: &mut BlockTable,
        num_computed_tokens: u32,
        num_written_tokens: u32,
    ) -> Vec<NodeId> {
        let mut settled = Vec::new();
        let num_full_blocks = (num_computed_tokens / self.layout.block_tokens) as usize;
        while let Some(num_blocks) = table.wanted.first().copied().filter(|num_blocks| *num_blocks <= num_full_blocks) {
            table.wanted.pop_first();
            self.save(saver, table, num_blocks, num_written_tokens);
            let node = table.nodes[num_blocks - 1];
            self.tree.clear_pending_snapshot(node, saver.0);
            settled.push(node);
        }
        settled
    }

    /// Saves the states at the end of what the sequence has registered, if they are still there.
    pub(crate) fn save_end(&mut self, saver: (SequenceId, Residency), table: &BlockTable, num_written_tokens: u32) {
        // Only what is kept when the sequence is gone.
        if table.nodes.last().is_some_and(|node| self.tree.is_kept(*node)) {
            self.save(saver, table, table.num_registered, num_written_tokens);
        }
    }

    fn save(
        &mut self,
        (id, residency): (SequenceId, Residency),
        table: &BlockTable,
        num_blocks: usize,
        num_written_tokens: u32,
    ) {
        let num_tokens = num_blocks as u32 * self.layout.block_tokens;
        let node = num_blocks.checked_sub(1).filter(|_| num_blocks <= table.num_registered);
        let node = node.map(|index| table.nodes[index]).filter(|node| self.tree.has_content(*node));
        let Some(node) = node.filter(|_| self.has_states) else { return };
        if let Some(snapshot) = self.tree.snapshot(node) {
            self.snapshots.touch(snapshot, num_tokens);
        } else if num_written_tokens <= num_tokens + self.snapshot_reach_tokens
            && let Some((snapshot, lost)) = self.snapshots.take(node, num_tokens)
        {
            lost.into_iter().for_each(|node| self.tree.set_snapshot(node, None));
            self.tree.set_snapshot(node, Some(snapshot));
            self.demote_superseded(&table.nodes[..num_blocks - 1]);
            self.snapshots.add_save(PendingSave { residency, save: Save { id, num_tokens, snapshot } });
        }
    }

    /// Demotes the last snapshot before a new one, if all that continued there continues to the new one. `path`: the nodes before it.
    fn demote_superseded(&mut self, path: &[NodeId]) {
        let unbranched = path.iter().rev().take_while(|node| self.tree.num_children(**node) <= 1);
        if let Some(snapshot) = unbranched.into_iter().find_map(|node| self.tree.snapshot(*node)) {
            self.snapshots.demote(snapshot);
        }
    }

    /// Gives up snapshots, and those that are yet to be saved of `residencies`, so that no sequence continues at them.
    pub(crate) fn forget_snapshots(&mut self, snapshots: BTreeSet<SnapshotId>, residencies: &HashSet<Residency>) {
        let pending: Vec<_> = self.snapshots.to_be_saved(residencies).collect();
        for snapshot in snapshots.into_iter().chain(pending) {
            if let Some(node) = self.snapshots.node(snapshot) {
                self.tree.set_snapshot(node, None);
                self.snapshots.give_up(snapshot);
            }
        }
    }

    /// Releases the first `num_blocks` blocks of a table, which are before the window.
    pub(crate) fn release_before_window(&mut self, table: &mut BlockTable, num_blocks: usize) {
        for block_id in &table.block_ids[table.num_released..num_blocks] {
            self.pool.release(*block_id, false);
            self.forget_unless_kept(*block_id);
        }
        table.num_released = num_blocks;
    }

    /// Releases the table of a sequence that leaves the worker; `is_finishing` if `mark_finishing` was called for it.
    /// Returns the nodes whose waiters can proceed: nodes that this sequence will not compute, and nodes given one of
    /// its blocks.
    ///
    /// Releases the last block first, so that the end of a prefix is evicted before its beginning and every evictable
    /// block can be reached from its root. (Blocks before a window are released earlier, but no hit that starts after
    /// them needs them.)
    pub(crate) fn release(&mut self, table: &BlockTable, producer: SequenceId, is_finishing: bool) -> Vec<NodeId> {
        let mut settled = table.unregistered_nodes().to_vec();
        settled.retain(|node| self.tree.clear_pending(*node, producer));
        let unsaved = table.wanted.iter().map(|num_blocks| table.nodes[num_blocks - 1]);
        settled.extend(unsaved.filter(|node| self.tree.clear_pending_snapshot(*node, producer)));
        for index in (table.num_released..table.block_ids.len()).rev() {
            let block_id = table.block_ids[index];
            if index < table.num_registered && self.use_node(table.nodes[index], block_id) {
                settled.push(table.nodes[index]);
            }
            self.pool.release(block_id, is_finishing);
            self.forget_unless_kept(block_id);
        }
        for node in table.nodes.iter().rev() {
            self.tree.release(*node);
        }
        settled
    }

    /// Counts as a use of `node`, whose content `block_id` has. Returns whether the node lost its own block and takes
    /// this one.
    fn use_node(&mut self, node: NodeId, block_id: BlockId) -> bool {
        match self.tree.block_id(node) {
            Some(known) if known != block_id => self.pool.touch(known),
            // A block whose write can still fail must not stand in.
            None if self.pool.is_written(block_id) => {
                self.assign(node, block_id);
                return true;
            }
            _ => {}
        }
        false
    }

    fn forget_unless_kept(&mut self, block_id: BlockId) {
        if let Some(node) = self.pool.node(block_id)
            && !self.pool.is_held(block_id)
            && !self.tree.is_kept(node)
        {
            self.forget(block_id);
        }
    }

    /// The sequence that is going to compute `node`, which has no block yet, or to save its snapshot.
    pub(crate) fn pending(&self, node: NodeId) -> Option<PendingPrefix> {
        let pending = self.tree.pending(node).filter(|_| self.tree.block_id(node).is_none());
        pending.or(self.tree.pending_snapshot(node))
    }

    /// Panics unless all counts and links are right. `tables`: those of all sequences on the worker, and whether each
    /// is finishing.
    pub(crate) fn audit<'a>(&self, tables: impl Iterator<Item = (&'a BlockTable, bool)>) {
        let mut block_refs = vec![(0, 0); self.pool.num_blocks() as usize];
        let mut node_refs = HashMap::new();
        for (table, is_finishing) in tables {
            for block_id in table.held() {
                let (ref_count, num_finishing_refs) = &mut block_refs[*block_id as usize];
                *ref_count += 1;
                *num_finishing_refs += u32::from(is_finishing);
            }
            for node in &table.nodes {
                *node_refs.entry(*node).or_insert(0) += 1;
            }
        }
        self.pool.audit(&block_refs);
        self.tree.audit(&node_refs, |block_id| self.pool.node(block_id));
        self.offload.audit(self.tree.num_with_slot(), |node| self.tree.slot(node));
        self.snapshots.audit(self.tree.num_with_snapshot(), |node| self.tree.snapshot(node));
    }
}
