//! A simulated worker: executes plans strictly in order, keeps the KV content of every slot, and samples from what it
//! reads. It verifies that the tokens that a plan calls computed are really in the sequence's blocks before the step,
//! and that their content belongs to the sequence's own ids.
//!
//! A sequence that fails writes nothing. A sequence that reads its blocks is poisoned, and so is all that it writes and
//! samples: this can happen, but no poisoned token may reach a client.

use std::collections::{HashMap, HashSet};

use penstock_scheduler::{
    Advance, BlockId, Limits, NewSequence, Plan, Save, SequenceId, SequenceOutput, SnapshotId, StepResult, TokenId,
    Transfer,
};

use crate::model::{self, Images};
use crate::submitted::Visibility;

pub struct Worker {
    block_tokens: usize,
    kv: Vec<Slot>,
    /// The contents of the slots beside the pool.
    offloaded: Vec<Vec<Slot>>,
    sequences: HashMap<SequenceId, WorkerSequence>,
    /// The states of each snapshot: of the prefix that they are after.
    snapshots: Vec<Slot>,
    /// The most sequences at a time; 0: any number, without states.
    num_state_slots: usize,
    snapshot_reach_tokens: usize,
    max_image_bytes: u64,
    /// Whether a failed sequence also fails in the later steps that are already planned.
    repeats_failures: bool,
    /// Sequences that read a block that a failed one did not write, with the step of their start.
    pub poisoned: HashSet<(SequenceId, u64)>,
    pub last_step: u64,
}

/// What the worker knows of a sequence besides its plan.
#[derive(Clone, Copy, Debug)]
pub struct Traits {
    /// Computing this position fails.
    pub fail_position: Option<u32>,
    pub visibility: Visibility,
    pub images: Images,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Slot {
    Empty,
    /// The prefix that was last written to it.
    Digest(u64),
    Poison,
}

struct WorkerSequence {
    start_step: u64,
    traits: Traits,
    token_ids: Vec<TokenId>,
    num_source_tokens: usize,
    num_computed_tokens: usize,
    block_ids: Vec<BlockId>,
    /// The states after each number of tokens, since the snapshot that it started with.
    states: Vec<Slot>,
    /// The most tokens that were computed at any time.
    num_written_tokens: usize,
    has_failed: bool,
    poisoned: bool,
}

impl WorkerSequence {
    fn slot(&self, position: usize, block_tokens: usize) -> usize {
        self.block_ids[position / block_tokens] as usize * block_tokens + position % block_tokens
    }
}

impl Worker {
    pub fn new(limits: &Limits, repeats_failures: bool) -> Self {
        let Limits { num_blocks, num_memory_slots, num_disk_slots, block_tokens, .. } = *limits;
        let num_slots = num_memory_slots + num_disk_slots;
        Self {
            block_tokens: block_tokens as usize,
            kv: vec![Slot::Empty; (num_blocks * block_tokens) as usize],
            offloaded: vec![vec![Slot::Empty; block_tokens as usize]; num_slots as usize],
            sequences: HashMap::new(),
            snapshots: vec![Slot::Empty; limits.num_snapshots as usize],
            num_state_slots: limits.num_state_slots as usize,
            snapshot_reach_tokens: limits.snapshot_reach_tokens as usize,
            max_image_bytes: limits.max_image_bytes,
            repeats_failures,
            poisoned: HashSet::new(),
            last_step: 0,
        }
    }

    /// Returns the result, and the sequences whose outputs are poisoned. `traits` has one entry for each new sequence.
    pub fn execute(&mut self, plan: &Plan, traits: &[Traits]) -> (StepResult, HashSet<SequenceId>) {
        self.last_step = plan.step;
        for save in &plan.saves {
            self.save(*save);
        }
        for id in &plan.freed_sequence_ids {
            self.sequences.remove(id).expect("only a known sequence is freed");
        }
        for transfer in &plan.transfers {
            self.transfer(*transfer);
        }
        for (start, traits) in plan.new_sequences.iter().zip(traits) {
            self.start(plan.step, start, *traits);
        }
        assert!(self.num_state_slots == 0 || self.sequences.len() <= self.num_state_slots, "no state slot is free");
        let images = self.sequences.values().flat_map(|sequence| sequence.traits.images.groups());
        assert!(model::num_image_bytes(images) <= self.max_image_bytes, "the images do not fit");
        // Checks the reads before and after all writes: within a step, no sequence may read what another one writes.
        for advance in &plan.advances {
            self.check_reads(advance.id, self.sequences[&advance.id].num_computed_tokens);
        }
        let num_computed: Vec<_> =
            plan.advances.iter().map(|advance| self.sequences[&advance.id].num_computed_tokens).collect();
        let outputs: Vec<_> = plan.advances.iter().filter_map(|advance| self.write(advance)).collect();
        for (advance, num_computed_tokens) in plan.advances.iter().zip(num_computed) {
            self.check_reads(advance.id, num_computed_tokens);
        }
        let poisoned = outputs.iter().map(|output| output.id).filter(|id| self.sequences[id].poisoned).collect();
        (StepResult { step: plan.step, outputs }, poisoned)
    }

    fn save(&mut self, save: Save) {
        let sequence = self.sequences.get(&save.id).expect("only a known sequence is saved");
        let num_tokens = save.num_tokens as usize;
        assert!(sequence.num_written_tokens <= num_tokens + self.snapshot_reach_tokens, "the states are gone");
        let state = sequence.states[num_tokens];
        assert_ne!(state, Slot::Empty, "{:?} never had these states", save.id);
        self.snapshots[save.snapshot as usize] = if sequence.has_failed { Slot::Poison } else { state };
    }

    fn restored(&self, snapshot: Option<SnapshotId>) -> Slot {
        snapshot.map_or(Slot::Digest(model::ROOT), |snapshot| self.snapshots[snapshot as usize])
    }

    fn transfer(&mut self, transfer: Transfer) {
        let slots_of =
            |block_id: BlockId| block_id as usize * self.block_tokens..(block_id as usize + 1) * self.block_tokens;
        match transfer {
            Transfer::Store { block_id, slot } => {
                self.offloaded[slot as usize].copy_from_slice(&self.kv[slots_of(block_id)]);
            }
            Transfer::Load { slot, block_id } => {
                self.kv[slots_of(block_id)].copy_from_slice(&self.offloaded[slot as usize]);
            }
            Transfer::Demote { from, to } => self.offloaded[to as usize] = self.offloaded[from as usize].clone(),
        }
    }

    fn start(&mut self, step: u64, start: &NewSequence, traits: Traits) {
        let num_source_tokens = start.num_source_tokens;
        assert!(
            num_source_tokens == 0 || start.num_computed_tokens == 0,
            "{:?} starts after a part of its source",
            start.id
        );
        let mut states = vec![Slot::Empty; start.num_computed_tokens as usize];
        if self.num_state_slots > 0 {
            states.push(self.restored(start.snapshot));
        }
        let known = WorkerSequence {
            start_step: step,
            traits,
            token_ids: start.token_ids.clone(),
            num_source_tokens: num_source_tokens as usize,
            num_computed_tokens: start.num_computed_tokens as usize,
            block_ids: start.block_ids.clone(),
            states,
            num_written_tokens: 0,
            has_failed: false,
            poisoned: false,
        };
        assert!(self.sequences.insert(start.id, known).is_none(), "{:?} starts twice", start.id);
    }

    /// Reads what the token after `num_computed_tokens` attends to.
    fn check_reads(&mut self, id: SequenceId, num_computed_tokens: usize) {
        let sequence = self.sequences.get_mut(&id).expect("only a known sequence is advanced");
        let first = sequence.traits.visibility.first(num_computed_tokens as u32) as usize;
        let mut digest = model::ROOT;
        for position in 0..num_computed_tokens {
            if sequence.has_failed || sequence.poisoned {
                break;
            }
            digest = sequence.traits.images.extend(digest, position, sequence.token_ids[position]);
            if position < first {
                continue;
            }
            match self.kv[sequence.slot(position, self.block_tokens)] {
                Slot::Poison => sequence.poisoned = true,
                slot => {
                    assert_eq!(slot, Slot::Digest(digest), "{id:?}: position {position} does not hold its own prefix")
                }
            }
        }
        if self.num_state_slots > 0 && !sequence.has_failed && !sequence.poisoned {
            match sequence.states[num_computed_tokens] {
                Slot::Poison => sequence.poisoned = true,
                state => assert_eq!(state, Slot::Digest(digest), "{id:?} does not continue its own states"),
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
        assert!(from > 0 || to >= sequence.num_source_tokens, "{:?}: its source is split at {to}", advance.id);
        sequence.num_computed_tokens = to;
        sequence.num_written_tokens = sequence.num_written_tokens.max(to);
        if self.num_state_slots > 0 {
            sequence.states.resize(to.max(sequence.states.len() - 1) + 1, Slot::Empty);
        }
        let fails = sequence.traits.fail_position.is_some_and(|position| (position as usize) < to);
        if sequence.has_failed || fails {
            let is_reported = !sequence.has_failed || self.repeats_failures;
            sequence.has_failed = true;
            for position in from..to {
                self.kv[sequence.slot(position, self.block_tokens)] = Slot::Poison;
                sequence.states.get_mut(position + 1).into_iter().for_each(|state| *state = Slot::Poison);
            }
            return is_reported.then_some(SequenceOutput {
                id: advance.id,
                token_ids: None,
                num_draft_tokens: 0,
                drafted_by_model: false,
            });
        }
        let mut digest = model::ROOT;
        for position in 0..to {
            digest = sequence.traits.images.extend(digest, position, sequence.token_ids[position]);
            if position >= from {
                let slot = if sequence.poisoned { Slot::Poison } else { Slot::Digest(digest) };
                self.kv[sequence.slot(position, self.block_tokens)] = slot;
                sequence.states.get_mut(position + 1).into_iter().for_each(|state| *state = slot);
            }
        }
        if !advance.sample {
            // An output without tokens, as for prompt logprobs.
            return advance.num_tokens.is_multiple_of(2).then_some(SequenceOutput {
                id: advance.id,
                token_ids: Some(vec![]),
                num_draft_tokens: 0,
                drafted_by_model: false,
            });
        }
        assert_eq!(to, sequence.token_ids.len(), "{:?} samples too early", advance.id);
        let token_ids = self.verify_drafts(advance, digest);
        let num_draft_tokens = num_drafts(digest, advance);
        let drafted_by_model = digest.is_multiple_of(3);
        Some(SequenceOutput { id: advance.id, token_ids: Some(token_ids), num_draft_tokens, drafted_by_model })
    }

    /// Samples after the prefix `digest`, and after each draft token up to the first wrong one. All draft tokens are
    /// written, the wrong ones too.
    fn verify_drafts(&mut self, advance: &Advance, mut digest: u64) -> Vec<TokenId> {
        let sequence = self.sequences.get_mut(&advance.id).expect("only a known sequence is advanced");
        let offset = TokenId::from(sequence.poisoned);
        let first_position = sequence.num_computed_tokens;
        let mut written = digest;
        let mut is_right = true;
        let mut token_ids = vec![model::sample(digest) + offset];
        for index in 0..num_drafts(digest, advance) {
            let position = first_position + index as usize;
            let wrong_by = TokenId::from((written >> 13).is_multiple_of(3));
            written = model::extend(written, model::sample(written) + offset + wrong_by);
            let slot = if sequence.poisoned { Slot::Poison } else { Slot::Digest(written) };
            self.kv[sequence.slot(position, self.block_tokens)] = slot;
            sequence.num_written_tokens = sequence.num_written_tokens.max(position + 1);
            if self.num_state_slots > 0 {
                sequence.states.resize(sequence.states.len().max(position + 2), Slot::Empty);
                sequence.states[position + 1] = slot;
            }
            // The failure of a draft token's row is that of a later step.
            is_right &= wrong_by == 0 && sequence.traits.fail_position.is_none_or(|fails| position < fails as usize);
            if is_right {
                digest = written;
                token_ids.push(model::sample(digest) + offset);
            }
        }
        sequence.num_computed_tokens += token_ids.len() - 1;
        sequence.token_ids.extend_from_slice(&token_ids);
        token_ids
    }
}

/// The number of drafts of a sequence whose prefix is `digest`: any that is allowed.
fn num_drafts(digest: u64, advance: &Advance) -> u32 {
    (digest >> 17) as u32 % (advance.num_draft_tokens + 1)
}
