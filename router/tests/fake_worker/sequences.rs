//! The fake worker's state of each sequence; panics the test when a plan breaks the protocol.

use std::collections::{HashMap, HashSet};

use penstock_proto as proto;

use super::{Script, next_token};

/// Why a scripted sequence fails.
const BROKEN: &str = "not a number";

#[derive(Default)]
pub struct Sequences {
    pub by_id: HashMap<u64, Sequence>,
}

pub struct Sequence {
    token_ids: Vec<u32>,
    num_source: usize,
    num_computed: usize,
    num_samples: usize,
    block_ids: Vec<u32>,
    broken: bool,
}

impl Sequences {
    /// Whether a sequence that begins with the token has sampled the token at the position.
    pub fn has(&self, (first_token, position): (u32, usize)) -> bool {
        let mut sequences = self.by_id.values();
        sequences.any(|sequence| sequence.token_ids[0] == first_token && sequence.token_ids.len() > position)
    }

    pub fn execute(&mut self, plan: &proto::Plan, script: &Script) -> proto::StepResult {
        for id in &plan.freed_sequence_ids {
            assert!(self.by_id.remove(id).is_some(), "sequence {id} was freed and is not known");
        }
        for new in &plan.new_sequences {
            let sequence = Sequence {
                token_ids: new.token_ids.clone(),
                num_source: new.num_source_tokens as usize,
                num_computed: new.num_computed_tokens as usize,
                num_samples: 0,
                block_ids: new.block_ids.clone(),
                broken: false,
            };
            assert!(new.sampling.is_some(), "sequence {} has no sampling", new.sequence_id);
            assert!(self.by_id.insert(new.sequence_id, sequence).is_none(), "{} is new twice", new.sequence_id);
        }
        let (mut sequence_ids, mut ids, mut logprobs) = (Vec::new(), Vec::new(), Vec::new());
        let (mut num_draft_tokens, mut errors) = (Vec::new(), Vec::new());
        for advance in unpack(plan) {
            let sequence = self.by_id.get_mut(&advance.sequence_id).expect("only what is known advances");
            match sequence.advance(&advance, script.broken_first_token) {
                Ok(sampled) if sampled.is_empty() => {}
                Ok(sampled) => {
                    let is_nan = script.nan_first_token == Some(sequence.token_ids[0]);
                    for id in sampled {
                        sequence_ids.extend(advance.sequence_id.to_le_bytes());
                        ids.extend(id.to_le_bytes());
                        logprobs.extend(if is_nan { f32::NAN } else { -0.5 }.to_le_bytes());
                    }
                    num_draft_tokens.extend(advance.num_draft_tokens.to_le_bytes());
                }
                Err(reason) => errors.push(proto::SequenceError {
                    sequence_id: advance.sequence_id,
                    reason: reason.to_owned(),
                    fault: script.broken_fault.into(),
                }),
            }
        }
        let mut owned = HashSet::new();
        for block in self.by_id.values().flat_map(|sequence| &sequence.block_ids) {
            assert!(owned.insert(*block), "block {block} belongs to two sequences");
        }
        let timing = proto::StepTiming { forward_seconds: 0.000_1, ..Default::default() };
        let sampled = Some(proto::Tokens { ids, logprobs, top: Vec::new() });
        proto::StepResult {
            step: plan.step,
            sequence_ids,
            sampled,
            errors,
            timing: Some(timing),
            num_draft_tokens,
            ..Default::default()
        }
    }
}

impl Sequence {
    /// The tokens that it samples, or why it fails. How many draft tokens are right follows from the tokens before them.
    fn advance(&mut self, advance: &Advance, broken_first_token: Option<u32>) -> Result<Vec<u32>, &'static str> {
        self.block_ids.extend(&advance.new_block_ids);
        if self.broken {
            return Err(BROKEN);
        }
        self.num_computed += advance.num_tokens as usize;
        assert!(self.num_computed >= self.num_source, "a part of a source was advanced");
        assert!(self.num_computed <= self.token_ids.len(), "advanced beyond what is known");
        let num_rows = self.num_computed + advance.num_draft_tokens as usize;
        assert!(num_rows <= self.block_ids.len() * 16, "advanced beyond the blocks");
        if !advance.sample {
            assert_eq!(advance.num_draft_tokens, 0, "drafts of an advance that does not sample");
            return Ok(Vec::new());
        }
        assert_eq!(self.num_computed, self.token_ids.len(), "sampled before everything known was computed");
        self.num_samples += 1;
        if self.num_samples >= 2 && broken_first_token == Some(self.token_ids[0]) {
            self.broken = true;
            return Err(BROKEN);
        }
        let num_right = next_token(&self.token_ids) % (1 + advance.num_draft_tokens);
        self.num_computed += num_right as usize;
        let num_known = self.token_ids.len();
        for _ in 0..=num_right {
            self.token_ids.push(next_token(&self.token_ids));
        }
        Ok(self.token_ids[num_known..].to_vec())
    }
}

/// One entry of the columns of a plan.
pub struct Advance {
    pub sequence_id: u64,
    pub num_tokens: u32,
    pub new_block_ids: Vec<u32>,
    pub sample: bool,
    pub num_draft_tokens: u32,
}

/// The advances of a plan, one by one.
pub fn unpack(plan: &proto::Plan) -> Vec<Advance> {
    let advances = plan.advances.clone().unwrap_or_default();
    let mut new_block_ids = numbers(&advances.new_block_ids, u32::from_le_bytes).into_iter();
    let columns = numbers(&advances.sequence_ids, u64::from_le_bytes)
        .into_iter()
        .zip(numbers(&advances.num_tokens, u32::from_le_bytes))
        .zip(numbers(&advances.num_new_blocks, u32::from_le_bytes))
        .zip(advances.sample);
    // Empty for none.
    let mut num_draft_tokens = numbers(&advances.num_draft_tokens, u32::from_le_bytes).into_iter();
    let advance = |(((sequence_id, num_tokens), num_new_blocks), sample)| Advance {
        sequence_id,
        num_tokens,
        new_block_ids: new_block_ids.by_ref().take(num_new_blocks as usize).collect(),
        sample: sample != 0,
        num_draft_tokens: num_draft_tokens.next().unwrap_or(0),
    };
    columns.map(advance).collect()
}

fn numbers<T, const WIDTH: usize>(bytes: &[u8], number: fn([u8; WIDTH]) -> T) -> Vec<T> {
    bytes.as_chunks::<WIDTH>().0.iter().map(|bytes| number(*bytes)).collect()
}
