//! The prefixes that each engine has computed, as far as is remembered.

use std::array;
use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::mem;

use super::engine_set::{Bits, EngineSet, NUM_WORDS, bits};
use crate::generator::MAX_ENGINES;
use crate::sequence::ContentSalt;

/// Remembers prefixes by the hashes of their blocks, each of which includes the block before it. Two prefixes with one hash only make
/// a choice worse.
///
/// INVARIANT: two generations, each of which counts the engines of its blocks and is full at `max_blocks`: as many as all caches hold. A
/// block that is inserted again moves to the new one, so the index forgets unused blocks first.
/// INVARIANT: an engine is in the set of a block that it computed before it lost its cache until the set is checked. PERF: so a loss costs
/// nothing, while millions of sets may know the engine.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    block_tokens: usize,
    max_blocks: usize,
    new: HashMap<u64, EngineSet>,
    /// Over the blocks of `new`, how many engines have each of them.
    num_new: usize,
    old: HashMap<u64, EngineSet>,
    /// When each engine last lost its cache, by number, in losses of all engines.
    lost_at: [u32; MAX_ENGINES],
    /// Losses so far.
    now: u32,
}

impl PrefixIndex {
    /// An index that remembers nothing until `set_max_blocks`.
    pub(super) fn new(block_tokens: usize) -> Self {
        Self {
            block_tokens,
            max_blocks: 0,
            new: HashMap::new(),
            num_new: 0,
            old: HashMap::new(),
            lost_at: [0; MAX_ENGINES],
            now: 0,
        }
    }

    pub(super) fn set_max_blocks(&mut self, max_blocks: usize) {
        self.max_blocks = max_blocks;
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
    pub(super) fn num_tokens(&self, blocks: &[u64]) -> [u64; MAX_ENGINES] {
        let mut found = [0; MAX_ENGINES];
        let mut note = |engines: Bits, num_blocks: usize| {
            bits(&engines).for_each(|engine| found[engine] = (num_blocks * self.block_tokens) as u64);
        };
        let mut present = [u64::MAX; NUM_WORDS];
        let mut num_present = 0;
        for block in blocks {
            let Some(engines) = self.new.get(block).or_else(|| self.old.get(block)) else { break };
            let engines = self.current(engines);
            let still = array::from_fn(|word| present[word] & engines[word]);
            note(array::from_fn(|word| present[word] & !still[word]), num_present);
            (present, num_present) = (still, num_present + 1);
            if present == [0; NUM_WORDS] {
                break;
            }
        }
        note(present, num_present);
        found
    }

    /// The engine computes the prompt with these blocks.
    pub(super) fn insert(&mut self, blocks: &[u64], engine: usize) {
        for block in blocks {
            if self.num_new >= self.max_blocks {
                (self.old, self.num_new) = (mem::take(&mut self.new), 0);
            }
            let (old, num_new, lost_at, now) = (&mut self.old, &mut self.num_new, &self.lost_at, self.now);
            let engines = self.new.entry(*block).or_insert_with(|| {
                let known = old.remove(block).unwrap_or_else(|| EngineSet::new(now));
                *num_new += known.len();
                known
            });
            let checked_at = engines.checked_at();
            if checked_at < now {
                *num_new -= engines.check(now, |engine| lost_at[engine] <= checked_at);
            }
            *num_new += usize::from(engines.insert(engine));
        }
    }

    #[cfg(test)]
    pub(super) fn num_blocks(&self) -> usize {
        self.new.len() + self.old.len()
    }

    /// The engine has lost its cache.
    pub(super) fn forget(&mut self, engine: usize) {
        self.now += 1;
        self.lost_at[engine] = self.now;
    }

    /// The engines of a set that have not lost their cache since it was checked.
    fn current(&self, engines: &EngineSet) -> Bits {
        let mut current = engines.bits();
        if engines.checked_at() < self.now {
            for engine in bits(&engines.bits()).filter(|engine| self.lost_at[*engine] > engines.checked_at()) {
                current[engine / 64] &= !(1 << (engine % 64));
            }
        }
        current
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(block_tokens: usize, max_blocks: usize) -> PrefixIndex {
        let mut index = PrefixIndex::new(block_tokens);
        index.set_max_blocks(max_blocks);
        index
    }

    /// Tokens found in the first two engines.
    fn found(index: &PrefixIndex, blocks: &[u64]) -> [u64; 2] {
        let [first, second, others @ ..] = index.num_tokens(blocks);
        assert!(others.iter().all(|num_tokens| *num_tokens == 0));
        [first, second]
    }

    fn tokens(index: &PrefixIndex, prompt: &[u32]) -> [u64; 2] {
        found(index, &index.blocks(prompt, None, &[]))
    }

    #[test]
    fn an_engine_has_the_full_blocks_of_what_it_computed() {
        let mut index = index(4, 100);
        let prompt: Vec<u32> = (0..15).collect();
        index.insert(&index.blocks(&prompt, None, &[]), 0);
        index.insert(&index.blocks(&prompt[..5], None, &[]), 1);
        assert_eq!(tokens(&index, &prompt), [12, 4]);
        assert_eq!(tokens(&index, &[&prompt[..8], &[99; 8]].concat()), [8, 4]);
        assert_eq!(tokens(&index, &[99; 16]), [0, 0]);
        assert_eq!(found(&index, &index.blocks(&prompt, Some(1), &[])), [0, 0], "another salt");
        let with_image = |offset| index.blocks(&prompt, None, &[ContentSalt { offset, salt: 1 }]);
        assert_eq!(found(&index, &with_image(9)), [8, 4], "an image in the third block");
        assert_eq!(found(&index, &with_image(3)), [0, 0], "an image in the first block");
        index.forget(0);
        assert_eq!(tokens(&index, &prompt), [0, 4]);
    }

    #[test]
    fn what_an_engine_computed_before_it_lost_its_cache_does_not_come_back() {
        let mut index = index(1, 100);
        let blocks = index.blocks(&[1, 2, 3], None, &[]);
        for engine in [0, 1, 13, 14, 15, 16] {
            index.insert(&blocks, engine);
        }
        index.forget(0);
        index.forget(13);
        assert_eq!((index.num_tokens(&blocks)[0], index.num_tokens(&blocks)[1]), (0, 3));
        index.insert(&blocks[..2], 0);
        assert_eq!([0, 1, 13, 14].map(|engine| index.num_tokens(&blocks)[engine]), [2, 3, 0, 3]);
        index.forget(1);
        assert_eq!([0, 1, 13, 14].map(|engine| index.num_tokens(&blocks)[engine]), [2, 0, 0, 3]);
    }

    #[test]
    fn the_same_block_after_another_prefix_is_another_one() {
        let mut index = index(2, 100);
        index.insert(&index.blocks(&[1, 2, 3, 4], None, &[]), 0);
        assert_eq!(tokens(&index, &[3, 4]), [0, 0]);
    }

    #[test]
    fn the_memory_is_bounded_by_what_all_caches_hold_however_many_engines_have_a_block() {
        let mut index = index(1, 40);
        for round in 0..1000_u32 {
            let engine = (round * 7 % 20) as usize;
            index.insert(&index.blocks(&[round % 3, round], None, &[]), engine);
            let count = |generation: &HashMap<u64, EngineSet>| generation.values().map(EngineSet::len).sum::<usize>();
            assert_eq!(index.num_new, count(&index.new));
            assert!(count(&index.new) <= 40 + 20 && count(&index.old) <= 40 + 20, "a block brings its engines along");
        }
        assert_eq!(index.num_tokens(&index.blocks(&[0, 999], None, &[]))[13], 2);
        index.forget(13);
        assert_eq!(index.num_new, index.new.values().map(EngineSet::len).sum::<usize>());
    }

    #[test]
    fn what_is_used_is_remembered_and_the_memory_is_bounded() {
        let mut index = index(1, 8);
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
