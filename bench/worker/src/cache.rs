//! A KV cache without a model. A slot holds a hash of all tokens up to its own one, made from what the slot before it holds. The next token
//! of a sequence is a function of its last slot. So a token that was lost or repeated changes all later ones, and so does a block that
//! another sequence has overwritten or that never held the prefix for which it was shared.

use std::collections::HashMap;

use penstock_proto as proto;

/// Tokens of a block.
pub(crate) const BLOCK_TOKENS: usize = 16;

pub(crate) struct Cache {
    /// Hashes of all blocks' slots: those of block `n` begin at `BLOCK_TOKENS * n`.
    slots: Vec<u64>,
    sequences: HashMap<u64, Sequence>,
}

struct Sequence {
    token_ids: Vec<u32>,
    num_computed: usize,
    block_ids: Vec<u32>,
}

impl Cache {
    pub(crate) fn new(num_blocks: usize) -> Self {
        Self { slots: vec![0; num_blocks * BLOCK_TOKENS], sequences: HashMap::new() }
    }

    /// Executes a plan. Returns the sampled sequences, each with a number that is a function of its tokens; `choose` makes the next token
    /// of it.
    pub(crate) fn execute(&mut self, plan: &proto::Plan, choose: impl Fn(u64) -> u32) -> Vec<(u64, u32)> {
        for id in &plan.freed_sequence_ids {
            self.sequences.remove(id);
        }
        for new in &plan.new_sequences {
            let num_computed = new.num_computed_tokens as usize;
            let sequence =
                Sequence { token_ids: new.token_ids.clone(), num_computed, block_ids: new.block_ids.clone() };
            self.sequences.insert(new.sequence_id, sequence);
        }
        let Some(advances) = &plan.advances else { return Vec::new() };
        let mut new_block_ids = numbers(&advances.new_block_ids, u32::from_le_bytes);
        let columns = numbers(&advances.sequence_ids, u64::from_le_bytes)
            .zip(numbers(&advances.num_tokens, u32::from_le_bytes))
            .zip(numbers(&advances.num_new_blocks, u32::from_le_bytes))
            .zip(&advances.sample);
        let mut advances = Vec::new();
        for (((id, num_tokens), num_new_blocks), sample) in columns {
            let sequence = self.sequences.get_mut(&id).expect("invariant: a plan advances sequences that it added");
            sequence.block_ids.extend(new_block_ids.by_ref().take(num_new_blocks as usize));
            advances.push((sequence.num_computed, id, num_tokens, *sample > 0));
        }
        // A sequence may share blocks that another one fills in this step. That one begins at an earlier position.
        advances.sort_unstable();
        let mut sampled = Vec::new();
        for (_, id, num_tokens, sample) in advances {
            let sequence = self.sequences.get_mut(&id).expect("invariant: it was found above");
            let last = (0..num_tokens).fold(0, |_, _| sequence.advance(&mut self.slots));
            if sample {
                let token_id = choose(last);
                sequence.token_ids.push(token_id);
                sampled.push((id, token_id));
            }
        }
        sampled
    }
}

impl Sequence {
    /// Computes the next token. Returns what its slot holds.
    fn advance(&mut self, slots: &mut [u64]) -> u64 {
        let slot =
            |position: usize| self.block_ids[position / BLOCK_TOKENS] as usize * BLOCK_TOKENS + position % BLOCK_TOKENS;
        let before = self.num_computed.checked_sub(1).map_or(0, |position| slots[slot(position)]);
        let held = mix(before ^ u64::from(self.token_ids[self.num_computed]));
        slots[slot(self.num_computed)] = held;
        self.num_computed += 1;
        held
    }
}

/// SplitMix64.
fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

/// The numbers of a column.
pub(crate) fn numbers<T, const WIDTH: usize>(bytes: &[u8], number: fn([u8; WIDTH]) -> T) -> impl Iterator<Item = T> {
    bytes.as_chunks::<WIDTH>().0.iter().map(move |bytes| number(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A plan that adds a sequence, which has the blocks, and advances it by all tokens that are not computed.
    fn plan(id: u64, token_ids: &[u32], num_computed_tokens: u32, block_ids: &[u32]) -> proto::Plan {
        let new = proto::NewSequence {
            sequence_id: id,
            token_ids: token_ids.to_vec(),
            num_computed_tokens,
            block_ids: block_ids.to_vec(),
            ..Default::default()
        };
        let advances = proto::Advances {
            sequence_ids: id.to_le_bytes().to_vec(),
            num_tokens: (token_ids.len() as u32 - num_computed_tokens).to_le_bytes().to_vec(),
            num_new_blocks: 0_u32.to_le_bytes().to_vec(),
            sample: vec![1],
            ..Default::default()
        };
        proto::Plan { new_sequences: vec![new], advances: Some(advances), ..Default::default() }
    }

    fn token(cache: &mut Cache, plan: &proto::Plan) -> u32 {
        cache.execute(plan, |number| number as u32)[0].1
    }

    fn prompt(length: u32) -> Vec<u32> {
        (0..length).collect()
    }

    #[test]
    fn a_token_depends_on_the_tokens_before_it_and_on_nothing_else() {
        let mut cache = Cache::new(8);
        let first = token(&mut cache, &plan(1, &prompt(20), 0, &[0, 1]));
        assert_eq!(token(&mut cache, &plan(2, &prompt(20), 16, &[0, 5])), first, "with a shared block");
        assert_eq!(token(&mut cache, &plan(3, &prompt(20), 0, &[6, 7])), first, "in other blocks");
        assert_ne!(token(&mut cache, &plan(4, &prompt(21), 0, &[6, 7])), first);
        let again = [&prompt(20)[..], &[first]].concat();
        let second = token(&mut cache, &plan(5, &again, 0, &[2, 3]));
        let decode = proto::Advances {
            sequence_ids: 1_u64.to_le_bytes().to_vec(),
            num_tokens: 1_u32.to_le_bytes().to_vec(),
            num_new_blocks: 0_u32.to_le_bytes().to_vec(),
            sample: vec![1],
            ..Default::default()
        };
        let decode = proto::Plan { advances: Some(decode), ..Default::default() };
        assert_eq!(token(&mut cache, &decode), second, "a moved sequence goes on with the same token");
    }

    #[test]
    fn a_block_without_the_shared_prefix_changes_the_token() {
        let mut cache = Cache::new(8);
        let right = token(&mut cache, &plan(1, &prompt(20), 0, &[0, 1]));
        assert_ne!(token(&mut cache, &plan(2, &prompt(20), 16, &[4, 5])), right, "it never held the prefix");
        token(&mut cache, &plan(3, &[7; 16], 0, &[0]));
        assert_ne!(token(&mut cache, &plan(4, &prompt(20), 16, &[0, 5])), right, "it was overwritten");
    }

    #[test]
    fn a_block_that_is_filled_in_the_same_step_can_be_shared() {
        let mut cache = Cache::new(8);
        let right = token(&mut cache, &plan(1, &prompt(20), 0, &[6, 7]));
        let (mut both, producer) = (plan(2, &prompt(20), 16, &[0, 1]), plan(3, &prompt(20), 0, &[0, 2]));
        both.new_sequences.extend(producer.new_sequences);
        let (advances, others) = (both.advances.as_mut().unwrap(), producer.advances.unwrap());
        advances.sequence_ids.extend(others.sequence_ids);
        advances.num_tokens.extend(others.num_tokens);
        advances.num_new_blocks.extend(others.num_new_blocks);
        advances.sample.extend(others.sample);
        assert_eq!(cache.execute(&both, |number| number as u32), [(3, right), (2, right)]);
    }
}
