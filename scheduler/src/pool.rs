//! The KV blocks: who holds each, and which are given away next.
//!
//! A block is held by any number of sequences on the worker. Without a holder it is in exactly one of three places:
//! - retiring: a step in flight may still write it;
//! - idle: it is a node of the prefix tree and kept for whoever comes with that prefix, until it is evicted;
//! - free: its content means nothing.
//!
//! INVARIANT: a block is given away only when every step that writes it has retired. Steps in flight that only read it
//! need no such care: the worker executes plans strictly in order, so a write that is planned now happens after every read
//! that was planned before, whoever planned it.

use std::collections::BTreeSet;

use crate::plan::BlockId;
use crate::prefix::NodeId;

#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    /// The last one is taken next: the one given back most recently.
    free: Vec<BlockId>,
    /// By last use: the first one is evicted next.
    idle: BTreeSet<(u64, BlockId)>,
    /// By the step that has to retire.
    retiring: BTreeSet<(u64, BlockId)>,
    /// Held, but by nobody who will be advanced again.
    num_leaving: usize,
    num_cached: usize,
    num_uses: u64,
    /// Every step up to this one has retired.
    retired_step: u64,
}

#[derive(Clone, Debug, Default)]
struct Block {
    num_holders: u32,
    /// Those of the holders whose last step has been planned.
    num_leaving_holders: u32,
    last_write_step: u64,
    last_use: u64,
    /// Where its content stands in the prefix tree.
    node: Option<NodeId>,
}

impl Block {
    fn is_leaving(&self) -> bool {
        self.num_holders > 0 && self.num_holders == self.num_leaving_holders
    }
}

impl BlockPool {
    pub fn new(num_blocks: u32) -> Self {
        Self {
            blocks: vec![Block::default(); num_blocks as usize],
            free: (0..num_blocks).rev().collect(),
            idle: BTreeSet::new(),
            retiring: BTreeSet::new(),
            num_leaving: 0,
            num_cached: 0,
            num_uses: 0,
            retired_step: 0,
        }
    }

    pub fn num_blocks(&self) -> u32 {
        self.blocks.len() as u32
    }

    /// Blocks that can be taken now.
    pub fn num_available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    /// Blocks that will be available when the steps in flight have retired.
    pub fn num_retiring(&self) -> usize {
        self.retiring.len() + self.num_leaving
    }

    /// Blocks that stand in the prefix tree, held or not.
    pub fn num_cached(&self) -> usize {
        self.num_cached
    }

    pub fn is_held(&self, block_id: BlockId) -> bool {
        self.block(block_id).num_holders > 0
    }

    /// Whether nobody holds it and it can be taken now: holding it makes it unavailable.
    pub fn is_available(&self, block_id: BlockId) -> bool {
        !self.is_held(block_id) && self.is_written(block_id)
    }

    /// Whether every step that writes it has retired.
    pub fn is_written(&self, block_id: BlockId) -> bool {
        self.block(block_id).last_write_step <= self.retired_step
    }

    pub fn node(&self, block_id: BlockId) -> Option<NodeId> {
        self.block(block_id).node
    }

    /// A block for one holder; an idle one only when none is free, and then with the node that loses it.
    pub fn take(&mut self) -> Option<(BlockId, Option<NodeId>)> {
        let block_id = match self.free.pop() {
            Some(block_id) => block_id,
            None => self.idle.pop_first()?.1,
        };
        let block = self.block_mut(block_id);
        block.num_holders = 1;
        let evicted = block.node.take();
        self.num_cached -= usize::from(evicted.is_some());
        Some((block_id, evicted))
    }

    /// One more holder of a block in the prefix tree.
    pub fn hold(&mut self, block_id: BlockId) {
        self.displace(block_id);
        self.change(block_id, |block| block.num_holders += 1);
    }

    /// Notes that `step` writes it. Its holders do so one step after the other.
    pub fn write(&mut self, block_id: BlockId, step: u64) {
        self.block_mut(block_id).last_write_step = step;
    }

    /// One of its holders has had its last step planned.
    pub fn leave(&mut self, block_id: BlockId) {
        self.change(block_id, |block| block.num_leaving_holders += 1);
    }

    /// One holder less; `left` if that one had left before. The later a block is released, the later it is evicted.
    pub fn release(&mut self, block_id: BlockId, left: bool) {
        self.num_uses += 1;
        let last_use = self.num_uses;
        self.change(block_id, |block| {
            block.num_holders -= 1;
            block.num_leaving_holders -= u32::from(left);
            block.last_use = last_use;
        });
        self.place(block_id);
    }

    /// Counts as a use of a block in the prefix tree.
    pub fn touch(&mut self, block_id: BlockId) {
        self.displace(block_id);
        self.num_uses += 1;
        self.block_mut(block_id).last_use = self.num_uses;
        self.place(block_id);
    }

    /// Its content is that of `node`; or, with `None`, of no node any more.
    pub fn set_node(&mut self, block_id: BlockId, node: Option<NodeId>) {
        self.displace(block_id);
        let block = self.block_mut(block_id);
        let before = std::mem::replace(&mut block.node, node);
        self.num_cached += usize::from(node.is_some());
        self.num_cached -= usize::from(before.is_some());
        self.place(block_id);
    }

    /// `step` and every one before it is over.
    pub fn retire(&mut self, step: u64) {
        self.retired_step = step;
        while let Some((last_write_step, block_id)) = self.retiring.first().copied()
            && last_write_step <= step
        {
            self.retiring.pop_first();
            self.place(block_id);
        }
    }

    /// Takes an unheld block out of its place. A free one has none to lose: nothing leads to it.
    fn displace(&mut self, block_id: BlockId) {
        let block = self.block(block_id);
        if block.num_holders == 0 {
            let (by_step, by_use) = ((block.last_write_step, block_id), (block.last_use, block_id));
            let found = self.retiring.remove(&by_step) || self.idle.remove(&by_use);
            debug_assert!(found, "an unheld block in the prefix tree is retiring or idle");
        }
    }

    fn place(&mut self, block_id: BlockId) {
        let block = self.block(block_id);
        if block.num_holders > 0 {
            return;
        }
        if block.last_write_step > self.retired_step {
            self.retiring.insert((block.last_write_step, block_id));
        } else if block.node.is_some() {
            self.idle.insert((block.last_use, block_id));
        } else {
            self.free.push(block_id);
        }
    }

    /// Changes who holds it, and keeps count.
    fn change(&mut self, block_id: BlockId, change: impl FnOnce(&mut Block)) {
        let block = self.block_mut(block_id);
        let was_leaving = block.is_leaving();
        change(block);
        let is_leaving = block.is_leaving();
        self.num_leaving += usize::from(is_leaving);
        self.num_leaving -= usize::from(was_leaving);
    }

    fn block(&self, block_id: BlockId) -> &Block {
        &self.blocks[block_id as usize]
    }

    fn block_mut(&mut self, block_id: BlockId) -> &mut Block {
        &mut self.blocks[block_id as usize]
    }

    /// Recounts everything. `holders`: by block, all its holders and those that have left.
    pub fn audit(&self, holders: &[(u32, u32)]) {
        let mut num_unheld = 0;
        for (block, (index, (num_holders, num_leaving))) in self.blocks.iter().zip(holders.iter().enumerate()) {
            let block_id = index as BlockId;
            assert_eq!((block.num_holders, block.num_leaving_holders), (*num_holders, *num_leaving), "block {index}");
            if *num_holders == 0 {
                num_unheld += 1;
                let retiring = self.retiring.contains(&(block.last_write_step, block_id));
                let idle = self.idle.contains(&(block.last_use, block_id));
                let written = block.last_write_step <= self.retired_step;
                assert_eq!((retiring, idle), (!written, written && block.node.is_some()), "place of block {index}");
            }
        }
        assert_eq!(self.free.len() + self.idle.len() + self.retiring.len(), num_unheld, "a block is in two places");
        assert_eq!(self.num_leaving, self.blocks.iter().filter(|block| block.is_leaving()).count());
        assert_eq!(self.num_cached, self.blocks.iter().filter(|block| block.node.is_some()).count());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool_with_all_taken(num_blocks: u32) -> BlockPool {
        let mut pool = BlockPool::new(num_blocks);
        for _ in 0..num_blocks {
            pool.take().unwrap();
        }
        pool
    }

    #[test]
    fn a_block_is_handed_out_once() {
        let mut pool = BlockPool::new(3);
        let mut taken: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        taken.sort_unstable();
        assert_eq!(taken, [(0, None), (1, None), (2, None)]);
    }

    #[test]
    fn a_released_block_is_available_only_when_its_last_write_has_retired() {
        let mut pool = pool_with_all_taken(2);
        pool.write(0, 3);
        pool.release(0, false);
        pool.retire(2);
        assert_eq!((pool.num_available(), pool.num_retiring()), (0, 1));
        pool.retire(3);
        assert_eq!((pool.num_available(), pool.num_retiring()), (1, 0));
        pool.write(1, 3);
        pool.release(1, false);
        assert_eq!(pool.num_available(), 2, "its last write had retired before");
    }

    #[test]
    fn a_block_with_two_holders_outlives_one() {
        let mut pool = pool_with_all_taken(1);
        pool.set_node(0, Some(NodeId(5)));
        pool.hold(0);
        pool.release(0, false);
        assert_eq!(pool.take(), None);
        pool.release(0, false);
        assert_eq!(pool.take(), Some((0, Some(NodeId(5)))));
    }

    #[test]
    fn free_blocks_go_first_and_then_the_least_recently_used() {
        let mut pool = pool_with_all_taken(4);
        for block_id in 0..3 {
            pool.set_node(block_id, Some(NodeId(block_id)));
        }
        for block_id in [2, 0, 1, 3] {
            pool.release(block_id, false);
        }
        pool.touch(2);
        let order: Vec<_> = std::iter::from_fn(|| pool.take()).map(|(block_id, _)| block_id).collect();
        assert_eq!(order, [3, 0, 1, 2]);
    }

    #[test]
    fn a_block_counts_as_retiring_when_all_its_holders_leave() {
        let mut pool = pool_with_all_taken(1);
        pool.set_node(0, Some(NodeId(0)));
        pool.hold(0);
        pool.leave(0);
        assert_eq!(pool.num_retiring(), 0);
        pool.leave(0);
        assert_eq!(pool.num_retiring(), 1);
        pool.hold(0);
        assert_eq!(pool.num_retiring(), 0);
    }
}
