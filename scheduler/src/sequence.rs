//! One sequence as two numbers: tokens known and tokens computed. Everything is "advance computed toward known".
//!
//! Both are counted as they will stand when the steps in flight are over, so the next step can be planned before their
//! results are here; only the ids of the last known tokens may be missing.

use std::sync::Arc;

use crate::flight::Stay;
use crate::order::Precedence;
use crate::plan::{Advance, BlockId, FinishReason, SequenceId, Start, Submission, TokenId};

#[derive(Debug)]
pub(crate) struct Sequence {
    id: SequenceId,
    precedence: Precedence,
    /// The prompt, and every generated token that has come back.
    token_ids: Vec<TokenId>,
    num_prompt_tokens: u32,
    /// Prompt and generated; known never exceeds it.
    max_tokens: u32,
    stop_token_ids: Arc<[TokenId]>,
    /// `None`: the worker does not know the sequence, and what follows is zero and empty.
    stay: Option<Stay>,
    /// Sampled in steps in flight: known by count, not by id.
    num_unseen_tokens: u32,
    num_computed_tokens: u32,
    block_ids: Vec<BlockId>,
    /// The last step that advances it.
    last_step: u64,
}

impl Sequence {
    /// `submission` has been checked: its token counts fit in `u32` together.
    pub fn new(submission: Submission, precedence: Precedence) -> Self {
        let num_prompt_tokens = submission.prompt_token_ids.len() as u32;
        Self {
            id: submission.id,
            precedence,
            token_ids: submission.prompt_token_ids,
            num_prompt_tokens,
            max_tokens: num_prompt_tokens + submission.max_new_tokens,
            stop_token_ids: submission.stop_token_ids,
            stay: None,
            num_unseen_tokens: 0,
            num_computed_tokens: 0,
            block_ids: Vec::new(),
            last_step: 0,
        }
    }

    pub fn id(&self) -> SequenceId {
        self.id
    }

    pub fn precedence(&self) -> Precedence {
        self.precedence
    }

    pub fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    pub fn stay(&self) -> Option<Stay> {
        self.stay
    }

    fn num_known_tokens(&self) -> u32 {
        self.token_ids.len() as u32 + self.num_unseen_tokens
    }

    /// Whether its last token is known, or being sampled. That one is never computed.
    pub fn is_planned_out(&self) -> bool {
        self.num_known_tokens() == self.max_tokens
    }

    /// Tokens that can be advanced now, unless it is planned out.
    pub fn num_pending_tokens(&self) -> u32 {
        self.num_known_tokens() - self.num_computed_tokens
    }

    /// Whether one more token is all it can take: it generates.
    pub fn is_decoding(&self) -> bool {
        self.num_pending_tokens() == 1
    }

    /// Blocks it lacks to advance by `num_tokens`.
    pub fn num_missing_blocks(&self, num_tokens: u32, block_tokens: u32) -> usize {
        let needed = (self.num_computed_tokens + num_tokens).div_ceil(block_tokens) as usize;
        needed.saturating_sub(self.block_ids.len())
    }

    /// Tokens it can advance by with `num_free` more blocks.
    pub fn max_advance_tokens(&self, num_free: usize, block_tokens: u32) -> u32 {
        let slots = (self.block_ids.len() + num_free) as u64 * u64::from(block_tokens);
        (slots - u64::from(self.num_computed_tokens)).min(u64::from(self.num_pending_tokens())) as u32
    }

    /// Makes it known to the worker, with everything still to compute.
    pub fn start(&mut self, stay: Stay) -> Start {
        self.stay = Some(stay);
        Start {
            id: self.id,
            token_ids: self.token_ids.clone(),
            num_prompt_tokens: self.num_prompt_tokens,
            num_computed_tokens: 0,
            block_ids: Vec::new(),
        }
    }

    /// Plans the next `num_tokens` pending tokens into `step`.
    pub fn advance(&mut self, num_tokens: u32, new_block_ids: Vec<BlockId>, step: u64) -> Advance {
        let sample = num_tokens == self.num_pending_tokens();
        self.num_computed_tokens += num_tokens;
        self.num_unseen_tokens += u32::from(sample);
        self.block_ids.extend_from_slice(&new_block_ids);
        self.last_step = step;
        Advance { id: self.id, num_tokens, new_block_ids, sample }
    }

    /// Gives its blocks away, and the last step that writes them.
    pub fn give_up_blocks(&mut self) -> (Vec<BlockId>, u64) {
        (std::mem::take(&mut self.block_ids), self.last_step)
    }

    /// Makes it unknown to the worker. What is in flight for it is void; only tokens that have come back count.
    pub fn leave(&mut self) {
        self.stay = None;
        self.num_unseen_tokens = 0;
        self.num_computed_tokens = 0;
    }

    /// Takes the oldest unseen token. A stop token counts as such also where it is the last one allowed.
    pub fn accept(&mut self, token_id: TokenId) -> Option<FinishReason> {
        self.num_unseen_tokens -= 1;
        self.token_ids.push(token_id);
        if self.stop_token_ids.contains(&token_id) {
            Some(FinishReason::StopToken)
        } else if self.token_ids.len() as u32 == self.max_tokens {
            Some(FinishReason::Length)
        } else {
            None
        }
    }
}
