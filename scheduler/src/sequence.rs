//! One sequence as two numbers: tokens known and tokens computed. Everything is "advance computed toward known".
//!
//! Both are counted as they will stand when the steps in flight are over, so the next step can be planned before their
//! results are here; only the ids of the last known tokens may be missing.

use std::cmp::Reverse;
use std::sync::Arc;
use std::time::Duration;

use crate::cache::Table;
use crate::flight::Stay;
use crate::layout::BlockLayout;
use crate::order::{Precedence, Turn};
use crate::plan::{Advance, BlockId, FinishReason, Limits, NewSequence, SequenceId, Submission, TokenId};
use crate::prefix::{NodeId, Promise, Root};

#[derive(Debug)]
pub(crate) struct Sequence {
    id: SequenceId,
    precedence: Precedence,
    priority: i32,
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
    table: Table,
    layout: BlockLayout,
    /// `None`: shares its blocks with nobody.
    root: Option<Root>,
    needs_prompt_logprobs: bool,
    num_source_tokens: u32,
    /// Where another one is computing what it needs; it is out of the queue until then.
    awaits: Option<NodeId>,
    /// Blocks that had to be available when it was last found to have too few.
    num_wanted_blocks: usize,
    /// When it was last in a step, or came.
    served_at: Duration,
    /// Tokens of prompts behind it in line that were computed before its own.
    num_overtaken_tokens: u64,
    loan: Option<Loan>,
}

/// The urgency of one who waits for blocks of this sequence, until it has computed those.
#[derive(Clone, Copy, Debug)]
struct Loan {
    effort: u64,
    until_tokens: u32,
}

impl Sequence {
    /// `submission` has been checked: its token counts fit in `u32` together.
    pub fn new(
        submission: Submission,
        precedence: Precedence,
        root: Option<Root>,
        layout: BlockLayout,
        arrived_at: Duration,
    ) -> Self {
        let num_prompt_tokens = submission.prompt_token_ids.len() as u32;
        Self {
            id: submission.id,
            precedence,
            priority: submission.priority,
            token_ids: submission.prompt_token_ids,
            num_prompt_tokens,
            max_tokens: num_prompt_tokens + submission.max_new_tokens,
            stop_token_ids: submission.stop_token_ids,
            stay: None,
            num_unseen_tokens: 0,
            num_computed_tokens: 0,
            table: Table::default(),
            layout,
            root,
            needs_prompt_logprobs: submission.needs_prompt_logprobs,
            num_source_tokens: submission.num_source_tokens,
            awaits: None,
            num_wanted_blocks: 0,
            served_at: arrived_at,
            num_overtaken_tokens: 0,
            loan: None,
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

    pub fn num_computed_tokens(&self) -> u32 {
        self.num_computed_tokens
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

    /// When it is served among those that compute prompts.
    ///
    /// Ageing is in it twice. Whom later ones overtake gains on all later ones by every token of theirs: after
    /// `max_overtaking` times what it has left nobody does so any more. And to be left out for so long as makes up for
    /// a priority counts as one; that is how the lower ones get on.
    pub fn turn(&self, now: Duration, limits: &Limits) -> Turn {
        if limits.max_overtaking == 0 {
            return Turn { level: Reverse(0), effort: 0, precedence: self.precedence };
        }
        let priority = i128::from(self.priority);
        let waited_ns = now.saturating_sub(self.served_at).as_nanos() as i128;
        let level = match limits.priority_ageing.as_nanos() as i128 {
            0 => 0,
            ageing_ns => priority + waited_ns / ageing_ns,
        };
        Turn { level: Reverse(level), effort: self.effort(limits.max_overtaking), precedence: self.precedence }
    }

    /// Whether tokens of it have come back: somebody reads on and waits for the next.
    pub fn has_begun(&self) -> bool {
        self.token_ids.len() > self.num_prompt_tokens as usize
    }

    /// What is left to compute, less what it was overtaken by. A stream that computes again what was lost has no time
    /// to give away.
    fn effort(&self, max_overtaking: u32) -> u64 {
        if self.has_begun() {
            return 0;
        }
        let left = u64::from(self.num_pending_tokens()) * u64::from(max_overtaking);
        let effort = left.saturating_sub(self.num_overtaken_tokens);
        match self.loan {
            Some(loan) if self.num_computed_tokens < loan.until_tokens => effort.min(loan.effort),
            _ => effort,
        }
    }

    pub fn overtake(&mut self, num_tokens: u64) {
        self.num_overtaken_tokens = self.num_overtaken_tokens.saturating_add(num_tokens);
    }

    /// Somebody with this effort waits until so many tokens are computed here.
    pub fn lend(&mut self, effort: u64, until_tokens: u32) {
        let effort = self.loan.map_or(effort, |loan| loan.effort.min(effort));
        let until_tokens = self.loan.map_or(until_tokens, |loan| loan.until_tokens.max(until_tokens));
        self.loan = Some(Loan { effort, until_tokens });
    }

    pub fn serve(&mut self, now: Duration) {
        self.served_at = now;
    }

    pub fn layout(&self) -> BlockLayout {
        self.layout
    }

    /// Of the pending tokens, how many the next advance has at least: the source is never cut.
    pub fn num_indivisible_tokens(&self, num_computed_tokens: u32) -> u32 {
        if num_computed_tokens == 0 { self.num_source_tokens.max(1) } else { 1 }
    }

    /// Blocks it lacks to advance by `num_tokens`.
    pub fn num_missing_blocks(&self, num_tokens: u32) -> usize {
        let needed = self.layout.num_blocks(self.num_computed_tokens + num_tokens);
        needed.saturating_sub(self.table.block_ids.len())
    }

    /// Blocks it lacks to compute all that is known of it, in as many steps as need be.
    pub fn num_lacking_blocks(&self) -> usize {
        let table = &self.table;
        self.layout.num_lacking_blocks(self.num_known_tokens(), table.block_ids.len(), table.held().len())
    }

    /// Tokens it can advance by with `num_free` more blocks.
    pub fn max_advance_tokens(&self, num_free: usize) -> u32 {
        let slots = (self.table.block_ids.len() + num_free) as u64 * u64::from(self.layout.block_tokens);
        (slots - u64::from(self.num_computed_tokens)).min(u64::from(self.num_pending_tokens())) as u32
    }

    /// Makes it known to the worker, with what stands in the blocks of `table`.
    pub fn start(&mut self, stay: Stay, table: Table) -> NewSequence {
        self.stay = Some(stay);
        self.num_computed_tokens = table.block_ids.len() as u32 * self.layout.block_tokens;
        self.num_wanted_blocks = 0;
        self.table = table;
        NewSequence {
            id: self.id,
            token_ids: self.token_ids.clone(),
            num_prompt_tokens: self.num_prompt_tokens,
            num_source_tokens: self.num_source_tokens,
            num_computed_tokens: self.num_computed_tokens,
            block_ids: self.table.block_ids.clone(),
        }
    }

    /// Plans the next `num_tokens` pending tokens.
    pub fn advance(&mut self, num_tokens: u32, new_block_ids: Vec<BlockId>) -> Advance {
        let sample = num_tokens == self.num_pending_tokens();
        self.num_computed_tokens += num_tokens;
        self.num_unseen_tokens += u32::from(sample);
        self.table.block_ids.extend_from_slice(&new_block_ids);
        Advance { id: self.id, num_tokens, new_block_ids, sample }
    }

    /// The blocks that the last `num_tokens` computed tokens are written to; and how many of them, from the first, those fill.
    pub fn written_blocks(&self, num_tokens: u32) -> (&[BlockId], usize) {
        let block_tokens = self.layout.block_tokens;
        let first = (self.num_computed_tokens - num_tokens) / block_tokens;
        let num_full = self.num_computed_tokens / block_tokens;
        (&self.table.block_ids[first as usize..], (num_full - first) as usize)
    }

    /// Makes it unknown to the worker. What is in flight for it is void; only tokens that have come back count.
    pub fn leave(&mut self) -> Table {
        self.stay = None;
        self.num_unseen_tokens = 0;
        self.num_computed_tokens = 0;
        self.loan = None;
        std::mem::take(&mut self.table)
    }

    pub fn table(&self) -> &Table {
        &self.table
    }

    /// Its blocks; where their prefixes start, if it shares them; all ids known of it; and how many blocks are full.
    pub fn shared_parts(&mut self) -> Option<(&mut Table, Root, &[TokenId], usize)> {
        let num_full = (self.num_computed_tokens / self.layout.block_tokens) as usize;
        self.root.map(|root| (&mut self.table, root, &*self.token_ids, num_full))
    }

    /// Its blocks, and how many of the first it has passed. All of its last step's count until that is back.
    pub fn passed_blocks(&mut self) -> (&mut Table, usize) {
        let num_passed = match self.is_planned_out() {
            true => self.table.num_passed,
            false => self.layout.num_passed_blocks(self.num_computed_tokens),
        };
        (&mut self.table, num_passed)
    }

    pub fn root(&self) -> Option<Root> {
        self.root
    }

    pub fn token_ids(&self) -> &[TokenId] {
        &self.token_ids
    }

    /// The ids that may come from the cache, and their root. The last one never does: what is sampled follows from it.
    pub fn cacheable(&self) -> Option<(Root, &[TokenId])> {
        let needs_all = self.needs_prompt_logprobs && self.token_ids.len() == self.num_prompt_tokens as usize;
        let (_, token_ids) = self.token_ids.split_last()?;
        self.root.filter(|_| !needs_all).map(|root| (root, token_ids))
    }

    pub fn promise(&self) -> Promise {
        Promise { precedence: self.precedence, id: self.id }
    }

    pub fn awaits(&self) -> Option<NodeId> {
        self.awaits
    }

    pub fn set_awaits(&mut self, node: Option<NodeId>) {
        self.awaits = node;
        self.num_wanted_blocks = 0;
    }

    pub fn num_wanted_blocks(&self) -> usize {
        self.num_wanted_blocks
    }

    pub fn set_num_wanted_blocks(&mut self, num_blocks: usize) {
        self.num_wanted_blocks = num_blocks;
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
