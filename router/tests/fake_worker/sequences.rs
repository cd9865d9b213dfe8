//! What the fake worker keeps of each sequence; panics the test when a plan breaks the protocol.

use std::collections::{HashMap, HashSet};

use penstock_proto as proto;

use super::next_token;

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
    /// Whether one that begins with the token has sampled the one at the position.
    pub fn has(&self, (first_token, position): (u32, usize)) -> bool {
        let mut sequences = self.by_id.values();
        sequences.any(|sequence| sequence.token_ids[0] == first_token && sequence.token_ids.len() > position)
    }

    pub fn execute(
        &mut self,
        plan: &proto::Plan,
        broken_first_token: Option<u32>,
        broken_fault: proto::Fault,
    ) -> proto::StepResult {
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
        let mut outputs = Vec::new();
        for advance in &plan.advances {
            let sequence = self.by_id.get_mut(&advance.sequence_id).expect("only what is known advances");
            outputs.extend(sequence.advance(advance, broken_first_token));
        }
        for output in outputs.iter_mut().filter(|output| !output.error.is_empty()) {
            output.set_fault(broken_fault);
        }
        let mut owned = HashSet::new();
        for block in self.by_id.values().flat_map(|sequence| &sequence.block_ids) {
            assert!(owned.insert(*block), "block {block} belongs to two sequences");
        }
        let timing = proto::StepTiming { forward_seconds: 0.000_1, ..Default::default() };
        proto::StepResult { step: plan.step, outputs, timing: Some(timing) }
    }
}

impl Sequence {
    fn advance(&mut self, advance: &proto::Advance, broken_first_token: Option<u32>) -> Option<proto::SequenceOutput> {
        self.block_ids.extend(&advance.new_block_ids);
        if self.broken {
            return Some(self.error(advance));
        }
        self.num_computed += advance.num_tokens as usize;
        assert!(self.num_computed >= self.num_source, "a part of a source was advanced");
        assert!(self.num_computed <= self.token_ids.len(), "advanced beyond what is known");
        assert!(self.num_computed <= self.block_ids.len() * 16, "advanced beyond the blocks");
        if !advance.sample {
            return None;
        }
        assert_eq!(self.num_computed, self.token_ids.len(), "sampled before everything known was computed");
        self.num_samples += 1;
        if self.num_samples >= 2 && broken_first_token == Some(self.token_ids[0]) {
            self.broken = true;
            return Some(self.error(advance));
        }
        let id = next_token(&self.token_ids);
        self.token_ids.push(id);
        let token = proto::Token { id, logprob: -0.5, top: Vec::new() };
        Some(proto::SequenceOutput { sequence_id: advance.sequence_id, tokens: vec![token], ..Default::default() })
    }

    fn error(&self, advance: &proto::Advance) -> proto::SequenceOutput {
        let error = "not a number".to_owned();
        proto::SequenceOutput { sequence_id: advance.sequence_id, error, ..Default::default() }
    }
}
