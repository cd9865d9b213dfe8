//! The KV blocks: how many sequences hold each, and which are allocated next.
//!
//! Any number of sequences on the worker can hold a block. A block with a reference count of 0 is in exactly one of
//! three places:
//! - retiring: a step in flight can still write it;
//! - evictable: it is in the prefix cache, and stays there until it is evicted;
//! - free: its content is meaningless.
//!
//! INVARIANT: a block is allocated only when every step that writes it has retired. Steps in flight that only read it
//! do not matter: the worker executes plans strictly in order, so a write that is planned now happens after all reads
//! that were planned before.

use std::collections::BTreeSet;

use crate::plan::BlockId;
use crate::prefix::NodeId;

#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    /// A stack: the block that was freed last is allocated next.
    free: Vec<BlockId>,
    /// By last use: the first one is evicted next.
    evictable: BTreeSet<(u64, BlockId)>,
    /// By the step that has to retire.
    retiring: BTreeSet<(u64, BlockId)>,
    /// Blocks whose holders are all finishing.
    num_finishing: usize,
    num_cached: usize,
    num_uses: u64,
    /// The newest retired step; all steps before it have retired too.
    retired_step: u64,
}

#[derive(Clone, Debug, Default)]
struct Block {
    ref_count: u32,
    /// Holders whose last step is planned; part of `ref_count`.
    num_finishing_refs: u32,
    last_write_step: u64,
    last_use: u64,
    /// The prefix-cache node that has this block's content.
    node: Option<NodeId>,
}

impl Block {
    fn is_finishing(&self) -> bool {
        self.ref_count > 0 && self.ref_count == self.num_finishing_refs
    }
}

impl BlockPool {
    pub(crate) fn new(num_blocks: u32) -> Self {
        Self {
            blocks: vec![Block::default(); num_blocks as usize],
            free: (0..num_blocks).rev().collect(),
            evictable: BTreeSet::new(),
            retiring: BTreeSet::new(),
            num_finishing: 0,
            num_cached: 0,
            num_uses: 0,
            retired_step: 0,
        }
    }

    pub(crate) fn num_blocks(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Blocks that can be allocated now.
    pub(crate) fn num_allocatable(&self) -> usize {
        self.free.len() + self.evictable.len()
    }

    /// Blocks that become allocatable when the steps in flight have retired.
    pub(crate) fn num_retiring(&self) -> usize {
        self.retiring.len() + self.num_finishing
    }

    /// Blocks in the prefix cache, held or not.
    pub(crate) fn num_cached(&self) -> usize {
        self.num_cached
    }

    pub(crate) fn is_held(&self, block_id: BlockId) -> bool {
        self.block(block_id).ref_count > 0
    }

    /// Whether every step that writes the block has retired.
    pub(crate) fn is_written(&self, block_id: BlockId) -> bool {
        self.block(block_id).last_write_step <= self.retired_step
    }

    pub(crate) fn node(&self, block_id: BlockId) -> Option<NodeId> {
        self.block(block_id).node
    }

    /// A block with one holder. Evicts only when no block is free, and then also returns the node that lost its block.
    pub(crate) fn allocate(&mut self) -> Option<(BlockId, Option<NodeId>)> {
        let block_id = match self.free.pop() {
            Some(block_id) => block_id,
            None => self.evictable.pop_first()?.1,
        };
        let block = self.block_mut(block_id);
        block.ref_count = 1;
        let evicted = block.node.take();
        self.num_cached -= usize::from(evicted.is_some());
        Some((block_id, evicted))
    }

    /// Adds a holder to a block in the prefix cache.
    pub(crate) fn hold(&mut self, block_id: BlockId) {
        self.unlist(block_id);
        self.update_refs(block_id, |block| block.ref_count += 1);
    }

    /// Notes that `step` writes the block.
    pub(crate) fn record_write(&mut self, block_id: BlockId, step: u64) {
        self.block_mut(block_id).last_write_step = step;
    }

    /// Notes that the last step of one of the holders is planned.
    pub(crate) fn mark_finishing(&mut self, block_id: BlockId) {
        self.update_refs(block_id, |block| block.num_finishing_refs += 1);
    }

    /// Removes a holder; `is_finishing` if `mark_finishing` was called for it. Blocks are evicted in the order of their
    /// release.
    pub(crate) fn release(&mut self, block_id: BlockId, is_finishing: bool) {
        self.num_uses += 1;
        let last_use = self.num_uses;
        self.update_refs(block_id, |block| {
            block.ref_count -= 1;
            block.num_finishing_refs -= u32::from(is_finishing);
            block.last_use = last_use;
        });
        self.list(block_id);
    }

    /// Counts as a use of a block in the prefix cache: it is evicted later.
    pub(crate) fn touch(&mut self, block_id: BlockId) {
        self.unlist(block_id);
        self.num_uses += 1;
        self.block_mut(block_id).last_use = self.num_uses;
        self.list(block_id);
    }

    /// Sets the prefix-cache node that has the block's content.
    pub(crate) fn set_node(&mut self, block_id: BlockId, node: Option<NodeId>) {
        self.unlist(block_id);
        let block = self.block_mut(block_id);
        let before = std::mem::replace(&mut block.node, node);
        self.num_cached += usize::from(node.is_some());
        self.num_cached -= usize::from(before.is_some());
        self.list(block_id);
    }

    /// Notes that `step` and all steps before it are over.
    pub(crate) fn retire(&mut self, step: u64) {
        self.retired_step = step;
        while let Some((last_write_step, block_id)) = self.retiring.first().copied()
            && last_write_step <= step
        {
            self.retiring.pop_first();
            self.list(block_id);
        }
    }

    /// Takes a block without holders out of its place. It is never a free one: nothing refers to those.
    fn unlist(&mut self, block_id: BlockId) {
        let block = self.block(block_id);
        if block.ref_count == 0 {
            let (by_step, by_use) = ((block.last_write_step, block_id), (block.last_use, block_id));
            let found = self.retiring.remove(&by_step) || self.evictable.remove(&by_use);
            debug_assert!(found, "a cached block without holders is retiring or evictable");
        }
    }

    /// Puts a block without holders into its place.
    fn list(&mut self, block_id: BlockId) {
        let block = self.block(block_id);
        if block.ref_count > 0 {
            return;
        }
        if block.last_write_step > self.retired_step {
            self.retiring.insert((block.last_write_step, block_id));
        } else if block.node.is_some() {
            self.evictable.insert((block.last_use, block_id));
        } else {
            self.free.push(block_id);
        }
    }

    /// Changes a block's reference counts and updates `num_finishing`.
    fn update_refs(&mut self, block_id: BlockId, update: impl FnOnce(&mut Block)) {
        let block = self.block_mut(block_id);
        let was_finishing = block.is_finishing();
        update(block);
        let is_finishing = block.is_finishing();
        self.num_finishing += usize::from(is_finishing);
        self.num_finishing -= usize::from(was_finishing);
    }

    fn block(&self, block_id: BlockId) -> &Block {
        &self.blocks[block_id as usize]
    }

    fn block_mut(&mut self, block_id: BlockId) -> &mut Block {
        &mut self.blocks[block_id as usize]
    }

    /// Panics unless all counts and places are right. `refs`: for each block, its holders and its finishing holders.
    pub(crate) fn audit(&self, refs: &[(u32, u32)]) {
        let mut num_unheld = 0;
        for (block, (index, refs)) in self.blocks.iter().zip(refs.iter().enumerate()) {
            let block_id = index as BlockId;
            assert_eq!((block.ref_count, block.num_finishing_refs), *refs, "block {index}");
            if block.ref_count == 0 {
                num_unheld += 1;
                let is_retiring = self.retiring.contains(&(block.last_write_step, block_id));
                let is_evictable = self.evictable.contains(&(block.last_use, block_id));
                let is_written = self.is_written(block_id);
                let expected = (!is_written, is_written && block.node.is_some());
                assert_eq!((is_retiring, is_evictable), expected, "place of block {index}");
            }
        }
        let num_listed = self.free.len() + self.evictable.len() + self.retiring.len();
        assert_eq!(num_listed, num_unheld, "a block is in two places");
        assert_eq!(self.num_finishing, self.blocks.iter().filter(|block| block.is_finishing()).count());
        assert_eq!(self.num_cached, self.blocks.iter().filter(|block| block.node.is_some()).count());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool_with_all_allocated(num_blocks: u32) -> BlockPool {
        let mut pool = BlockPool::new(num_blocks);
        for _ in 0..num_blocks {
            pool.allocate().unwrap();
        }
        pool
    }

    #[test]
    fn each_block_is_allocated_once() {
        let mut pool = BlockPool::new(3);
        let mut allocated: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
        allocated.sort_unstable();
        assert_eq!(allocated, [(0, None), (1, None), (2, None)]);
    }

    #[test]
    fn a_released_block_is_allocatable_only_after_its_last_write_has_retired() {
        let mut pool = pool_with_all_allocated(2);
        pool.record_write(0, 3);
        pool.release(0, false);
        pool.retire(2);
        assert_eq!((pool.num_allocatable(), pool.num_retiring()), (0, 1));
        pool.retire(3);
        assert_eq!((pool.num_allocatable(), pool.num_retiring()), (1, 0));
        pool.record_write(1, 3);
        pool.release(1, false);
        assert_eq!(pool.num_allocatable(), 2, "its last write has already retired");
    }

    #[test]
    fn a_block_with_two_holders_survives_the_release_of_one() {
        let mut pool = pool_with_all_allocated(1);
        pool.set_node(0, Some(NodeId(5)));
        pool.hold(0);
        pool.release(0, false);
        assert_eq!(pool.allocate(), None);
        pool.release(0, false);
        assert_eq!(pool.allocate(), Some((0, Some(NodeId(5)))));
    }

    #[test]
    fn free_blocks_are_allocated_first_and_then_the_least_recently_used() {
        let mut pool = pool_with_all_allocated(4);
        for block_id in 0..3 {
            pool.set_node(block_id, Some(NodeId(block_id)));
        }
        for block_id in [2, 0, 1, 3] {
            pool.release(block_id, false);
        }
        pool.touch(2);
        let order: Vec<_> = std::iter::from_fn(|| pool.allocate()).map(|(block_id, _)| block_id).collect();
        assert_eq!(order, [3, 0, 1, 2]);
    }

    #[test]
    fn a_block_counts_as_retiring_when_all_its_holders_are_finishing() {
        let mut pool = pool_with_all_allocated(1);
        pool.set_node(0, Some(NodeId(0)));
        pool.hold(0);
        pool.mark_finishing(0);
        assert_eq!(pool.num_retiring(), 0);
        pool.mark_finishing(0);
        assert_eq!(pool.num_retiring(), 1);
        pool.hold(0);
        assert_eq!(pool.num_retiring(), 0);
    }
}
