//! A simulated worker: executes plans strictly in order, keeps the KV content of every slot, and samples from what it
//! reads there. It trusts nothing: what the plan calls computed must really stand in the sequence's blocks.

use std::collections::HashMap;

use penstock_scheduler::{Advance, BlockId, Output, Plan, SequenceId, Start, StepResult, TokenId};

use crate::model;

pub struct Worker {
    block_tokens: usize,
    /// By slot: the digest of the prefix that was last computed into it.
    kv: Vec<u64>,
    sequences: HashMap<SequenceId, Known>,
    /// Whether a sequence that failed is reported again in the steps that were already planned.
    reports_dead: bool,
}

struct Known {
    token_ids: Vec<TokenId>,
    num_computed_tokens: usize,
    block_ids: Vec<BlockId>,
    fail_position: Option<u32>,
    dead: bool,
}

impl Worker {
    pub fn new(num_blocks: u32, block_tokens: u32, reports_dead: bool) -> Self {
        let kv = vec![0; (num_blocks * block_tokens) as usize];
        Self { block_tokens: block_tokens as usize, kv, sequences: HashMap::new(), reports_dead }
    }

    /// `fail_positions` has one entry for each started sequence.
    pub fn execute(&mut self, plan: &Plan, fail_positions: &[Option<u32>]) -> StepResult {
        for id in &plan.freed {
            self.sequences.remove(id).expect("only a known sequence is freed");
        }
        for (start, fail_position) in plan.started.iter().zip(fail_positions) {
            self.start(start, *fail_position);
        }
        let outputs = plan.advances.iter().filter_map(|advance| self.advance(advance)).collect();
        StepResult { step: plan.step, outputs }
    }

    fn start(&mut self, start: &Start, fail_position: Option<u32>) {
        let known = Known {
            token_ids: start.token_ids.clone(),
            num_computed_tokens: start.num_computed_tokens as usize,
            block_ids: start.block_ids.clone(),
            fail_position,
            dead: false,
        };
        assert!(self.sequences.insert(start.id, known).is_none(), "{:?} is started while known", start.id);
    }

    fn advance(&mut self, advance: &Advance) -> Option<Output> {
        let sequence = self.sequences.get_mut(&advance.id).expect("only a known sequence is advanced");
        if sequence.dead {
            return self.reports_dead.then_some(Output { id: advance.id, token_ids: None });
        }
        sequence.block_ids.extend_from_slice(&advance.new_block_ids);
        let from = sequence.num_computed_tokens;
        let to = from + advance.num_tokens as usize;
        sequence.num_computed_tokens = to;
        if sequence.fail_position.is_some_and(|position| (position as usize) < to) {
            sequence.dead = true;
            return Some(Output { id: advance.id, token_ids: None });
        }
        let mut digest = 0;
        for position in 0..to {
            digest = model::extend(digest, sequence.token_ids[position]);
            let block_id = sequence.block_ids[position / self.block_tokens] as usize;
            let slot = &mut self.kv[block_id * self.block_tokens + position % self.block_tokens];
            if position >= from {
                *slot = digest;
            }
            assert_eq!(*slot, digest, "{:?}: slot of position {position} was overwritten", advance.id);
        }
        if !advance.sample {
            return None;
        }
        assert_eq!(to, sequence.token_ids.len(), "{:?} samples before its last known token", advance.id);
        let token_id = model::sample(digest);
        sequence.token_ids.push(token_id);
        Some(Output { id: advance.id, token_ids: Some(vec![token_id]) })
    }
}
