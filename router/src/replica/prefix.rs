//! Which engine computed which prefix, as far as is remembered.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem;

use crate::sequence::ContentSalt;

/// Engines as bits.
type Engines = u64;
/// The most engines that an index can tell apart.
pub(super) const MAX_ENGINES: usize = Engines::BITS as usize;

/// Remembers prefixes by the hashes of their blocks, each of which includes the block before it. Two prefixes with one hash only make
/// a choice worse.
///
/// INVARIANT: at most two generations of `max_blocks` blocks each. A block that is inserted again moves to the new one, so the index
/// forgets unused blocks first.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    block_tokens: usize,
    max_blocks: usize,
    new: HashMap<u64, Engines>,
    old: HashMap<u64, Engines>,
}

impl PrefixIndex {
    pub(super) fn new(block_tokens: usize, max_blocks: usize) -> Self {
        Self { block_tokens, max_blocks, new: HashMap::new(), old: HashMap::new() }
    }

    /// The hash of each full block of a prompt. Prompts with different salts share no block, and those with different content only
    /// blocks before it.
    pub(super) fn blocks(&self, prompt: &[u32], salt: Option<u64>, content: &[ContentSalt]) -> Vec<u64> {
        let chain = |hash: &mut u64, (index, block): (usize, &[u32])| {
            let begins_here = |content: &&ContentSalt| content.offset as usize / self.block_tokens == index;
            let mut hasher = DefaultHasher::new();
            (*hash, block).hash(&mut hasher);
            content.iter().filter(begins_here).for_each(|content| content.hash(&mut hasher));
            *hash = hasher.finish();
            Some(*hash)
        };
        let mut root = DefaultHasher::new();
        salt.hash(&mut root);
        prompt.chunks_exact(self.block_tokens).enumerate().scan(root.finish(), chain).collect()
    }

    /// How many leading tokens of the prompt with these blocks each engine has computed before.
    pub(super) fn num_tokens(&self, blocks: &[u64], num_engines: usize) -> Vec<u64> {
        let mut found = vec![0; num_engines];
        let mut present = Engines::MAX;
        for (index, block) in blocks.iter().enumerate() {
            present &= self.new.get(block).or_else(|| self.old.get(block)).copied().unwrap_or(0);
            if present == 0 {
                break;
            }
            for (engine, num_tokens) in found.iter_mut().enumerate() {
                if present & (1 << engine) != 0 {
                    *num_tokens = ((index + 1) * self.block_tokens) as u64;
                }
            }
        }
        found
    }

    /// The engine computes the prompt with these blocks.
    pub(super) fn insert(&mut self, blocks: &[u64], engine: usize) {
        for block in blocks {
            if self.new.len() >= self.max_blocks {
                self.old = mem::take(&mut self.new);
            }
            let known = self.old.remove(block).unwrap_or(0);
            *self.new.entry(*block).or_insert(0) |= known | 1 << engine;
        }
    }

    /// The engine has lost its cache.
    pub(super) fn forget(&mut self, engine: usize) {
        for engines in self.new.values_mut().chain(self.old.values_mut()) {
            *engines &= !(1 << engine);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(index: &PrefixIndex, prompt: &[u32]) -> Vec<u64> {
        index.num_tokens(&index.blocks(prompt, None, &[]), 2)
    }

    #[test]
    fn an_engine_has_the_full_blocks_of_what_it_computed() {
        let mut index = PrefixIndex::new(4, 100);
        let prompt: Vec<u32> = (0..15).collect();
        index.insert(&index.blocks(&prompt, None, &[]), 0);
        index.insert(&index.blocks(&prompt[..5], None, &[]), 1);
        assert_eq!(tokens(&index, &prompt), [12, 4]);
        assert_eq!(tokens(&index, &[&prompt[..8], &[99; 8]].concat()), [8, 4]);
        assert_eq!(tokens(&index, &[99; 16]), [0, 0]);
        assert_eq!(index.num_tokens(&index.blocks(&prompt, Some(1), &[]), 2), [0, 0], "another salt");
        let with_image = |offset| index.blocks(&prompt, None, &[ContentSalt { offset, salt: 1 }]);
        assert_eq!(index.num_tokens(&with_image(9), 2), [8, 4], "an image in the third block");
        assert_eq!(index.num_tokens(&with_image(3), 2), [0, 0], "an image in the first block");
        index.forget(0);
        assert_eq!(tokens(&index, &prompt), [0, 4]);
    }

    #[test]
    fn the_same_block_after_another_prefix_is_another_one() {
        let mut index = PrefixIndex::new(2, 100);
        index.insert(&index.blocks(&[1, 2, 3, 4], None, &[]), 0);
        assert_eq!(tokens(&index, &[3, 4]), [0, 0]);
    }

    #[test]
    fn what_is_used_is_remembered_and_the_memory_is_bounded() {
        let mut index = PrefixIndex::new(1, 8);
        index.insert(&index.blocks(&[1, 2], None, &[]), 0);
        for other in 100..200 {
            index.insert(&index.blocks(&[other], None, &[]), 1);
            index.insert(&index.blocks(&[1, 2], None, &[]), 0);
            assert!(index.new.len() <= 8 && index.old.len() <= 8);
        }
        assert_eq!(tokens(&index, &[1, 2]), [2, 0]);
        assert_eq!(tokens(&index, &[100]), [0, 0]);
    }
}
