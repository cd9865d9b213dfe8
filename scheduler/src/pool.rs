//! The KV blocks. The pool owns a block unless a running sequence does; it moves out by `take` and back by `release`.
//!
//! INVARIANT: a block is free only when every step that may write it has retired.

use std::collections::BTreeMap;

use crate::plan::BlockId;

#[derive(Debug)]
pub(crate) struct BlockPool {
    num_blocks: u32,
    /// The last one is taken next: the one given back most recently.
    free: Vec<BlockId>,
    /// Given back, but still written by the step that is the key. At most one entry for each step in flight.
    retiring: BTreeMap<u64, Vec<BlockId>>,
    num_retiring: usize,
    /// Every step up to this one has retired.
    retired_step: u64,
}

impl BlockPool {
    pub fn new(num_blocks: u32) -> Self {
        Self {
            num_blocks,
            free: (0..num_blocks).rev().collect(),
            retiring: BTreeMap::new(),
            num_retiring: 0,
            retired_step: 0,
        }
    }

    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    /// Blocks that can be taken now.
    pub fn num_free(&self) -> usize {
        self.free.len()
    }

    /// Blocks that will be free when the steps in flight have retired.
    pub fn num_retiring(&self) -> usize {
        self.num_retiring
    }

    /// `num_blocks` free blocks, or `None` when there are not so many.
    pub fn take(&mut self, num_blocks: usize) -> Option<Vec<BlockId>> {
        let kept = self.free.len().checked_sub(num_blocks)?;
        let mut taken = self.free.split_off(kept);
        taken.reverse();
        Some(taken)
    }

    /// Takes back blocks that `last_step` is the last one to write.
    pub fn release(&mut self, block_ids: Vec<BlockId>, last_step: u64) {
        if last_step <= self.retired_step {
            self.free.extend(block_ids);
        } else if !block_ids.is_empty() {
            self.num_retiring += block_ids.len();
            self.retiring.entry(last_step).or_default().extend(block_ids);
        }
    }

    /// `step` and every one before it is over.
    pub fn retire(&mut self, step: u64) {
        self.retired_step = step;
        while let Some(entry) = self.retiring.first_entry()
            && *entry.key() <= step
        {
            let block_ids = entry.remove();
            self.num_retiring -= block_ids.len();
            self.free.extend(block_ids);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_handed_out_once() {
        let mut pool = BlockPool::new(4);
        let mut taken = pool.take(3).unwrap();
        taken.extend(pool.take(1).unwrap());
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2, 3]);
    }

    #[test]
    fn taking_more_than_is_free_takes_nothing() {
        let mut pool = BlockPool::new(2);
        assert_eq!(pool.take(3), None);
        assert_eq!(pool.num_free(), 2);
    }

    #[test]
    fn a_released_block_is_free_only_when_its_last_step_has_retired() {
        let mut pool = BlockPool::new(2);
        let taken = pool.take(2).unwrap();
        pool.release(taken, 3);
        pool.retire(2);
        assert_eq!((pool.num_free(), pool.num_retiring()), (0, 2));
        pool.retire(3);
        assert_eq!((pool.num_free(), pool.num_retiring()), (2, 0));
    }

    #[test]
    fn a_block_whose_last_step_has_retired_is_free_at_once() {
        let mut pool = BlockPool::new(2);
        let taken = pool.take(2).unwrap();
        pool.retire(3);
        pool.release(taken, 3);
        assert_eq!(pool.num_free(), 2);
    }
}
