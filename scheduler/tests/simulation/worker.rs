//! A simulated worker: executes plans strictly in order, keeps the KV content of every slot, and samples from what it
//! reads there. It trusts nothing: what the plan calls computed must really stand in the sequence's blocks, before the step,
//! and be the chain of the sequence's own ids.
//!
//! Where a sequence fails it writes nothing. Who reads that is poisoned, and so is what that one writes and samples: it may
//! happen, but nobody may ever get it.

use std::collections::{HashMap, HashSet};

use penstock_scheduler::{Advance, BlockId, NewSequence, Plan, SequenceId, SequenceOutput, StepResult, TokenId};

use crate::model;
use crate::submitted::Sight;

pub struct Worker {
    block_tokens: usize,
    kv: Vec<Slot>,
    sequences: HashMap<SequenceId, Known>,
    /// Whether a sequence that failed is reported again in the steps that were already planned.
    reports_dead: bool,
    /// Who read what a failed one did not write, by the step of its start.
    pub poisoned: HashSet<(SequenceId, u64)>,
    pub last_step: u64,
}

/// What the worker is told of a sequence beside its plan.
#[derive(Clone, Copy, Debug)]
pub struct Nature {
    /// Computing this position fails.
    pub fail_position: Option<u32>,
    pub sight: Sight,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Slot {
    Empty,
    /// Of the prefix that was last computed into it.
    Digest(u64),
    Poison,
}

struct Known {
    start_step: u64,
    nature: Nature,
    token_ids: Vec<TokenId>,
    num_source_tokens: usize,
    num_computed_tokens: usize,
    block_ids: Vec<BlockId>,
    dead: bool,
    poisoned: bool,
}

impl Known {
    fn slot(&self, position: usize, block_tokens: usize) -> usize {
        self.block_ids[position / block_tokens] as usize * block_tokens + position % block_tokens
    }
}

impl Worker {
    pub fn new(num_blocks: u32, block_tokens: u32, reports_dead: bool) -> Self {
        Self {
            block_tokens: block_tokens as usize,
            kv: vec![Slot::Empty; (num_blocks * block_tokens) as usize],
            sequences: HashMap::new(),
            reports_dead,
            poisoned: HashSet::new(),
            last_step: 0,
        }
    }

    /// `natures` has one entry for each started sequence. Also says whose outputs are poisoned.
    pub fn execute(&mut self, plan: &Plan, natures: &[Nature]) -> (StepResult, HashSet<SequenceId>) {
        self.last_step = plan.step;
        for id in &plan.freed_sequence_ids {
            self.sequences.remove(id).expect("only a known sequence is freed");
        }
        for (start, nature) in plan.new_sequences.iter().zip(natures) {
            self.start(plan.step, start, *nature);
        }
        // As one batch: nobody reads what another one writes in the same step, nor writes what another one reads.
        for advance in &plan.advances {
            self.read(advance.id, self.sequences[&advance.id].num_computed_tokens);
        }
        let outputs: Vec<_> = plan.advances.iter().filter_map(|advance| self.write(advance)).collect();
        for advance in &plan.advances {
            let num_computed_tokens = self.sequences[&advance.id].num_computed_tokens;
            self.read(advance.id, num_computed_tokens - advance.num_tokens as usize);
        }
        let poisoned = outputs.iter().map(|output| output.id).filter(|id| self.sequences[id].poisoned).collect();
        (StepResult { step: plan.step, outputs }, poisoned)
    }

    fn start(&mut self, step: u64, start: &NewSequence, nature: Nature) {
        let num_source_tokens = start.num_source_tokens;
        assert!(
            num_source_tokens == 0 || start.num_computed_tokens == 0,
            "{:?} starts with some of its source",
            start.id
        );
        let known = Known {
            start_step: step,
            nature,
            token_ids: start.token_ids.clone(),
            num_source_tokens: num_source_tokens as usize,
            num_computed_tokens: start.num_computed_tokens as usize,
            block_ids: start.block_ids.clone(),
            dead: false,
            poisoned: false,
        };
        assert!(self.sequences.insert(start.id, known).is_none(), "{:?} is started while known", start.id);
    }

    /// Reads what the token behind so many computed ones sees.
    fn read(&mut self, id: SequenceId, num_computed_tokens: usize) {
        let sequence = self.sequences.get_mut(&id).expect("only a known sequence is advanced");
        let first = sequence.nature.sight.first(num_computed_tokens as u32) as usize;
        let mut digest = model::ROOT;
        for position in 0..num_computed_tokens {
            if sequence.dead || sequence.poisoned {
                break;
            }
            digest = model::extend(digest, sequence.token_ids[position]);
            if position < first {
                continue;
            }
            match self.kv[sequence.slot(position, self.block_tokens)] {
                Slot::Poison => sequence.poisoned = true,
                slot => assert_eq!(slot, Slot::Digest(digest), "{id:?}: position {position} is not its own"),
            }
        }
        if sequence.poisoned {
            self.poisoned.insert((id, sequence.start_step));
        }
    }

    fn write(&mut self, advance: &Advance) -> Option<SequenceOutput> {
        let sequence = self.sequences.get_mut(&advance.id).expect("only a known sequence is advanced");
        sequence.block_ids.extend_from_slice(&advance.new_block_ids);
        let from = sequence.num_computed_tokens;
        let to = from + advance.num_tokens as usize;
        assert!(from > 0 || to >= sequence.num_source_tokens, "{:?}: its source is cut at {to}", advance.id);
        sequence.num_computed_tokens = to;
        let fails = sequence.nature.fail_position.is_some_and(|position| (position as usize) < to);
        if sequence.dead || fails {
            let is_reported = !sequence.dead || self.reports_dead;
            sequence.dead = true;
            for position in from..to {
                self.kv[sequence.slot(position, self.block_tokens)] = Slot::Poison;
            }
            return is_reported.then_some(SequenceOutput { id: advance.id, token_ids: None });
        }
        let mut digest = model::ROOT;
        for position in 0..to {
            digest = model::extend(digest, sequence.token_ids[position]);
            if position >= from {
                let slot = if sequence.poisoned { Slot::Poison } else { Slot::Digest(digest) };
                self.kv[sequence.slot(position, self.block_tokens)] = slot;
            }
        }
        if !advance.sample {
            // Like prompt logprobs: an output that carries no token.
            return advance
                .num_tokens
                .is_multiple_of(2)
                .then_some(SequenceOutput { id: advance.id, token_ids: Some(vec![]) });
        }
        assert_eq!(to, sequence.token_ids.len(), "{:?} samples before its last known token", advance.id);
        let token_id = model::sample(digest) + TokenId::from(sequence.poisoned);
        sequence.token_ids.push(token_id);
        Some(SequenceOutput { id: advance.id, token_ids: Some(vec![token_id]) })
    }
}
