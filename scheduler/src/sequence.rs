//! One sequence as two counters, known tokens and computed tokens: every step advances computed towards known.
//!
//! Both counters include the steps in flight, so the next step can be planned before their results are back. Only the
//! ids of the last known tokens may be missing.
//!
//! Draft tokens in flight count as right until their result is back: the counters are upper bounds then, and
//! `num_in_flight_drafts` is how much lower they can still become. Blocks are allocated for the upper bound; only what
//! the lower bound covers is registered in the prefix cache.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::cache::{BlockTable, PrefixHit};
use crate::layout::BlockLayout;
use crate::plan::{
    Advance, BlockId, ContentSalt, FinishReason, ImageGroup, Limits, NewSequence, SequenceId, SequenceOutput,
    Submission, TokenId,
};
use crate::precedence::{Precedence, PrefillOrder};
use crate::prefix::{Content, PendingPrefix, Root};
use crate::resident::Residency;
use crate::speculation::{Acceptance, Drafting};

/// The states where sequences part are saved if that saves as many blocks from being computed: a prompt that stops there
/// needs a step more.
pub(crate) const MIN_BRANCH_BLOCKS: usize = 4;

#[derive(Debug)]
pub(crate) struct Sequence {
    id: SequenceId,
    precedence: Precedence,
    priority: i32,
    /// The prompt, and every generated token that has come back.
    token_ids: Vec<TokenId>,
    num_prompt_tokens: u32,
    /// Length that the sequence ends at, prompt included.
    max_tokens: u32,
    stop_token_ids: Arc<[TokenId]>,
    layout: BlockLayout,
    /// `None`: the sequence shares its blocks with no other.
    root: Option<Root>,
    content_salts: Arc<[ContentSalt]>,
    needs_prompt_outputs: bool,
    num_source_tokens: u32,
    whole_spans: Arc<[Range<u32>]>,
    images: Arc<[ImageGroup]>,
    has_grammar: bool,
    /// `None`: the worker does not know the sequence; the next three fields are 0 and empty.
    residency: Option<Residency>,
    /// Tokens sampled by steps in flight, at most: known by number, not yet by id.
    num_in_flight_tokens: u32,
    /// Draft tokens of steps in flight.
    num_in_flight_drafts: u32,
    num_computed_tokens: u32,
    /// The most tokens that were computed in this residency at any time, with all drafts.
    num_written_tokens: u32,
    table: BlockTable,
    /// Allocatable blocks that the last failed admission lacked some of; 0: no admission failed since the last change.
    num_blocks_to_admit: usize,
    /// The time of its last step, or of its arrival.
    served_at: Duration,
    /// Tokens of prompts of lower precedence that were computed before this one's.
    num_overtaken_tokens: u64,
    borrowed_budget: Option<BorrowedBudget>,
    /// Acceptance of drafts by lookup, and of a model's drafts.
    acceptance: [Acceptance; 2],
}

/// The overtaking budget of a sequence that waits for blocks of this one: this one is as urgent until it has computed
/// them.
#[derive(Clone, Copy, Debug)]
struct BorrowedBudget {
    overtaking_budget: u64,
    until_tokens: u32,
}

impl Sequence {
    /// `submission` must have been checked: prompt and new tokens together fit in `u32`.
    pub(crate) fn new(
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
            token_ids: [submission.prompt_token_ids, submission.generated_token_ids].concat(),
            num_prompt_tokens,
            max_tokens: num_prompt_tokens + submission.max_new_tokens,
            stop_token_ids: submission.stop_token_ids,
            layout,
            root,
            content_salts: submission.content_salts,
            needs_prompt_outputs: submission.needs_prompt_outputs,
            num_source_tokens: submission.num_source_tokens,
            whole_spans: submission.whole_spans,
            images: submission.images,
            has_grammar: submission.has_grammar,
            residency: None,
            num_in_flight_tokens: 0,
            num_in_flight_drafts: 0,
            num_computed_tokens: 0,
            num_written_tokens: 0,
            table: BlockTable::default(),
            num_blocks_to_admit: 0,
            served_at: arrived_at,
            num_overtaken_tokens: 0,
            borrowed_budget: None,
            acceptance: Default::default(),
        }
    }

    pub(crate) fn id(&self) -> SequenceId {
        self.id
    }

    pub(crate) fn precedence(&self) -> Precedence {
        self.precedence
    }

    pub(crate) fn max_tokens(&self) -> u32 {
        self.max_tokens
    }

    pub(crate) fn residency(&self) -> Option<Residency> {
        self.residency
    }

    pub(crate) fn num_computed_tokens(&self) -> u32 {
        self.num_computed_tokens
    }

    fn num_known_tokens(&self) -> u32 {
        self.token_ids.len() as u32 + self.num_in_flight_tokens
    }

    /// Whether its last step is planned, so that it awaits that step's result. The last token itself is never computed.
    pub(crate) fn is_finishing(&self) -> bool {
        self.is_at_limit() && self.num_in_flight_drafts == 0
    }

    /// Whether no further step can be planned before a result is back: the last token is in flight, for certain or if
    /// all drafts are right.
    pub(crate) fn is_at_limit(&self) -> bool {
        self.num_known_tokens() == self.max_tokens
    }

    /// Whether a step in flight samples its next token.
    pub(crate) fn awaits_token(&self) -> bool {
        self.num_in_flight_tokens > 0
    }

    /// The last token that has come back, or the prompt's last one.
    pub(crate) fn last_token_id(&self) -> Option<TokenId> {
        self.token_ids.last().copied()
    }

    /// The most draft tokens that its next step can verify: the last token is sampled after them.
    pub(crate) fn max_draft_tokens(&self, limits: &Limits) -> u32 {
        if limits.drafts_only_forced && !self.has_grammar {
            return 0;
        }
        limits.max_draft_tokens.min((self.max_tokens - self.num_known_tokens()).saturating_sub(1))
    }

    /// Learns from the drafts of a step that allowed some, of which the first `num_right` were right. `extends`: the model drafts only
    /// where lookup finds nothing, so a step with it measures both.
    pub(crate) fn learn_from_drafts(
        &mut self,
        drafting: Drafting,
        extends: bool,
        num_right: u32,
        output: &SequenceOutput,
    ) {
        let &SequenceOutput { num_draft_tokens, drafted_by_model, .. } = output;
        if !(drafting.uses_model() && extends) {
            let acceptance = self.acceptance(drafting);
            return match num_draft_tokens {
                0 if drafting.uses_model() => acceptance.miss(),
                num_drafts => acceptance.observe(num_right, num_drafts),
            };
        }
        if num_draft_tokens > 0 && !drafted_by_model {
            return self.acceptance(Drafting::Lookup).observe(num_right, num_draft_tokens);
        }
        self.acceptance(Drafting::Lookup).observe(0, 0);
        self.acceptance(Drafting::Model).observe(num_right, num_draft_tokens);
    }

    pub(crate) fn acceptance(&mut self, drafting: Drafting) -> &mut Acceptance {
        &mut self.acceptance[usize::from(drafting.uses_model())]
    }

    /// Tokens that are computed after the steps in flight even if all their drafts are wrong.
    pub(crate) fn min_computed_tokens(&self) -> u32 {
        self.num_computed_tokens - self.num_in_flight_drafts
    }

    /// Known tokens that are not computed.
    pub(crate) fn num_pending_tokens(&self) -> u32 {
        self.num_known_tokens() - self.num_computed_tokens
    }

    /// Whether it can advance by one known token only.
    pub(crate) fn is_decoding(&self) -> bool {
        self.num_pending_tokens() == 1
    }

    /// Whether generated tokens have come back, so that a client may be reading the stream.
    pub(crate) fn has_generated(&self) -> bool {
        self.token_ids.len() > self.num_prompt_tokens as usize
    }

    /// Its place among the prompts that share a step.
    ///
    /// No prompt starves, for two reasons: each token of lower precedence that is computed first reduces the
    /// overtaking budget, and each `priority_ageing` without a step raises the priority by one level.
    pub(crate) fn prefill_order(&self, now: Duration, limits: &Limits) -> PrefillOrder {
        if limits.max_overtaking == 0 {
            return PrefillOrder { aged_priority: Reverse(0), overtaking_budget: 0, precedence: self.precedence };
        }
        let waited_ns = now.saturating_sub(self.served_at).as_nanos() as i128;
        let aged_priority = match limits.priority_ageing.as_nanos() as i128 {
            0 => 0,
            ageing_ns => i128::from(self.priority) + waited_ns / ageing_ns,
        };
        let overtaking_budget = self.overtaking_budget(limits.max_overtaking);
        PrefillOrder { aged_priority: Reverse(aged_priority), overtaking_budget, precedence: self.precedence }
    }

    /// 0 for a stream that is recomputed after a preemption: it must not be delayed further.
    fn overtaking_budget(&self, max_overtaking: u32) -> u64 {
        if self.has_generated() {
            return 0;
        }
        let initial = u64::from(self.num_pending_tokens()) * u64::from(max_overtaking);
        let own = initial.saturating_sub(self.num_overtaken_tokens);
        match self.borrowed_budget {
            Some(borrowed) if self.num_computed_tokens < borrowed.until_tokens => own.min(borrowed.overtaking_budget),
            _ => own,
        }
    }

    /// Notes that `num_tokens` tokens of prompts of lower precedence were computed first.
    pub(crate) fn add_overtaken_tokens(&mut self, num_tokens: u64) {
        self.num_overtaken_tokens = self.num_overtaken_tokens.saturating_add(num_tokens);
    }

    /// Inherits the urgency of a sequence that waits until `until_tokens` tokens of this one are computed.
    pub(crate) fn borrow_budget(&mut self, overtaking_budget: u64, until_tokens: u32) {
        let borrowed = self.borrowed_budget.get_or_insert(BorrowedBudget { overtaking_budget, until_tokens });
        borrowed.overtaking_budget = borrowed.overtaking_budget.min(overtaking_budget);
        borrowed.until_tokens = borrowed.until_tokens.max(until_tokens);
    }

    pub(crate) fn images(&self) -> &[ImageGroup] {
        &self.images
    }

    pub(crate) fn layout(&self) -> BlockLayout {
        self.layout
    }

    /// The fewest pending tokens that it can advance by after `num_computed_tokens`: a source, and what is left of a span
    /// whose tokens attend to each other, are computed in one step.
    pub(crate) fn min_advance_tokens(&self, num_computed_tokens: u32) -> u32 {
        let source = if num_computed_tokens == 0 { self.num_source_tokens } else { 0 };
        let span = self.whole_span_of(num_computed_tokens).map_or(0, |span| span.end - num_computed_tokens);
        source.max(span).max(1)
    }

    /// The most tokens that it can advance by after `num_computed_tokens`, of at least `min_advance_tokens`, so that the
    /// advance does not end inside of a span.
    pub(crate) fn whole_advance_tokens(&self, num_computed_tokens: u32, num_tokens: u32) -> u32 {
        let span = self.whole_span_of(num_computed_tokens + num_tokens);
        span.filter(|span| span.start > num_computed_tokens).map_or(num_tokens, |span| span.start - num_computed_tokens)
    }

    /// Numbers of leading blocks after which a sequence that starts with `hit` is to save its states: the last one that
    /// another sequence with the same tokens could continue at, and those where others part from it: where its prompt leaves what
    /// is known, and where it leaves the `others`.
    pub(crate) fn wanted_snapshots<'a>(&self, hit: &PrefixHit, others: impl Iterator<Item = &'a Self>) -> Vec<usize> {
        let Some(content) = self.content() else { return Vec::new() };
        let block_tokens = self.layout.block_tokens;
        let last = (self.token_ids.len() - 1) / block_tokens as usize;
        let others = others.filter_map(Self::lookup_key).map(|other| content.num_common_blocks(other, block_tokens));
        let is_worthwhile = |num_blocks: &usize| *num_blocks >= hit.block_ids.len() + MIN_BRANCH_BLOCKS;
        let branches =
            others.chain([hit.num_known_blocks]).filter(is_worthwhile).map(|num_blocks| num_blocks.min(last));
        let ahead = branches.chain([last]).filter(|num_blocks| *num_blocks > hit.block_ids.len());
        ahead.filter(|num_blocks| self.can_save(*num_blocks)).collect()
    }

    /// Whether an advance may end after `num_blocks` blocks.
    pub(crate) fn can_save(&self, num_blocks: usize) -> bool {
        let end = num_blocks as u32 * self.layout.block_tokens;
        self.whole_span_of(end).is_none_or(|span| span.start == end)
    }

    /// The most tokens, of at most `max_tokens`, that it can advance by after `num_computed_tokens` without losing the states at one
    /// of the `wanted` numbers of blocks. They are there until `reach_tokens` behind them are computed.
    pub(crate) fn saved_advance_tokens(
        &self,
        wanted: impl Iterator<Item = usize>,
        num_computed_tokens: u32,
        max_tokens: u32,
        reach_tokens: u32,
    ) -> u32 {
        let ends = wanted.map(|num_blocks| num_blocks as u32 * self.layout.block_tokens);
        let lost = ends.filter(|end| num_computed_tokens + max_tokens > end + reach_tokens);
        lost.map(|end| end - num_computed_tokens).filter(|num_tokens| *num_tokens > 0).min().unwrap_or(max_tokens)
    }

    fn whole_span_of(&self, token: u32) -> Option<&Range<u32>> {
        self.whole_spans.iter().find(|span| span.contains(&token))
    }

    /// The most pending tokens that it can advance by with `num_allocatable` more blocks.
    pub(crate) fn max_advance_tokens(&self, num_allocatable: usize) -> u32 {
        let slots = (self.table.block_ids.len() + num_allocatable) as u64 * u64::from(self.layout.block_tokens);
        (slots - u64::from(self.num_computed_tokens)).min(u64::from(self.num_pending_tokens())) as u32
    }

    /// Blocks to allocate for an advance by `num_tokens`.
    pub(crate) fn num_new_blocks(&self, num_tokens: u32) -> usize {
        let num_blocks = self.layout.num_blocks(self.num_computed_tokens + num_tokens);
        num_blocks.saturating_sub(self.table.block_ids.len())
    }

    /// Blocks to allocate for its shortest advance.
    pub(crate) fn num_next_blocks(&self) -> usize {
        self.num_new_blocks(self.min_advance_tokens(self.num_computed_tokens))
    }

    /// Blocks that it lacks to compute all known tokens, in as many steps as that takes.
    pub(crate) fn num_missing_blocks(&self) -> usize {
        let table = &self.table;
        self.layout.num_missing_blocks(self.num_known_tokens(), table.block_ids.len(), table.held().len())
    }

    /// Begins a residency with the cached blocks of `table`.
    pub(crate) fn start(&mut self, residency: Residency, table: BlockTable) -> NewSequence {
        self.residency = Some(residency);
        self.num_computed_tokens = table.block_ids.len() as u32 * self.layout.block_tokens;
        self.num_blocks_to_admit = 0;
        self.table = table;
        NewSequence {
            id: self.id,
            token_ids: self.token_ids.clone(),
            num_prompt_tokens: self.num_prompt_tokens,
            num_source_tokens: self.num_source_tokens,
            num_computed_tokens: self.num_computed_tokens,
            block_ids: self.table.block_ids.clone(),
            snapshot: self.table.snapshot,
        }
    }

    /// Plans the next `num_tokens` pending tokens, and at most `num_draft_tokens` drafts after them if they are all.
    pub(crate) fn advance(
        &mut self,
        num_tokens: u32,
        num_draft_tokens: u32,
        new_block_ids: Vec<BlockId>,
        now: Duration,
    ) -> Advance {
        let sample = num_tokens == self.num_pending_tokens();
        self.served_at = now;
        self.num_computed_tokens += num_tokens + num_draft_tokens;
        self.num_written_tokens = self.num_written_tokens.max(self.num_computed_tokens);
        self.num_in_flight_tokens += u32::from(sample) + num_draft_tokens;
        self.num_in_flight_drafts += num_draft_tokens;
        self.table.block_ids.extend_from_slice(&new_block_ids);
        Advance { id: self.id, num_tokens, num_draft_tokens, new_block_ids, sample, last_token_id: None }
    }

    /// The blocks that the computed tokens from `first_token` on are written to, and how many leading ones of these
    /// are full.
    pub(crate) fn written_blocks(&self, first_token: u32) -> (&[BlockId], usize) {
        let block_tokens = self.layout.block_tokens;
        let first = first_token / block_tokens;
        let num_full = self.num_computed_tokens / block_tokens;
        let end = self.layout.num_blocks(self.num_computed_tokens);
        (&self.table.block_ids[first as usize..end], (num_full - first) as usize)
    }

    /// Ends its residency, if any, and returns the blocks to release. What is in flight is void: only tokens that have
    /// come back count.
    pub(crate) fn end_residency(&mut self) -> BlockTable {
        self.residency = None;
        self.num_in_flight_tokens = 0;
        self.num_in_flight_drafts = 0;
        self.num_computed_tokens = 0;
        self.num_written_tokens = 0;
        self.num_blocks_to_admit = 0;
        self.borrowed_budget = None;
        std::mem::take(&mut self.table)
    }

    /// The block table, for snapshots, with the fewest tokens that are computed, and the most that may be.
    pub(crate) fn states(&mut self) -> (&mut BlockTable, u32, u32) {
        let num_computed_tokens = self.min_computed_tokens();
        (&mut self.table, num_computed_tokens, self.num_written_tokens)
    }

    pub(crate) fn table(&self) -> &BlockTable {
        &self.table
    }

    /// What the prefix cache has to register: the block table, its content, and the number of computed tokens. `None` if nothing is shared, or no block has become full.
    pub(crate) fn registration(&mut self) -> Option<(&mut BlockTable, Content<'_>, usize)> {
        let num_computed_tokens = self.min_computed_tokens() as usize;
        let block_tokens = self.layout.block_tokens;
        // PERF: most steps of a decode fill no block.
        let root =
            self.root.filter(|_| self.table.has_full_block(self.token_ids.len(), num_computed_tokens, block_tokens))?;
        let content = Content { root, token_ids: &self.token_ids, salts: &self.content_salts };
        Some((&mut self.table, content, num_computed_tokens))
    }

    /// The block table, and how many of its leading blocks are not needed any more. A finishing sequence keeps its
    /// blocks until its last result is back.
    pub(crate) fn blocks_before_window(&mut self) -> (&mut BlockTable, usize) {
        let num_blocks = match self.is_finishing() {
            true => self.table.num_released,
            false => self.layout.num_blocks_before_window(self.min_computed_tokens()),
        };
        (&mut self.table, num_blocks)
    }

    /// Whether other sequences may share its blocks.
    pub(crate) fn is_shared(&self) -> bool {
        self.root.is_some()
    }

    /// What its blocks hold. `None`: the sequence shares them with no other.
    pub(crate) fn content(&self) -> Option<Content<'_>> {
        let (token_ids, salts) = (&self.token_ids, &self.content_salts);
        self.root.map(|root| Content { root, token_ids, salts })
    }

    pub(crate) fn into_token_ids(self) -> Vec<TokenId> {
        self.token_ids
    }

    /// What the prefix cache looks up: all but the last token, which must be computed to sample from it. `None`: nothing can
    /// come from the cache.
    pub(crate) fn lookup_key(&self) -> Option<Content<'_>> {
        let needs_all = self.needs_prompt_outputs && !self.has_generated();
        let (_, token_ids) = self.token_ids.split_last()?;
        self.content().filter(|_| !needs_all).map(|content| Content { token_ids, ..content })
    }

    /// Itself as the producer of a prefix.
    pub(crate) fn pending_prefix(&self) -> PendingPrefix {
        PendingPrefix { precedence: self.precedence, producer: self.id }
    }

    pub(crate) fn num_blocks_to_admit(&self) -> usize {
        self.num_blocks_to_admit
    }

    pub(crate) fn set_num_blocks_to_admit(&mut self, num_blocks: usize) {
        self.num_blocks_to_admit = num_blocks;
    }

    /// Takes what the oldest advance in flight has sampled, whose plan allowed `num_draft_tokens`. Returns the number of
    /// tokens up to the end of the sequence, and the reason if it has ended. A stop token in the last place counts as a
    /// stop token.
    pub(crate) fn accept(&mut self, token_ids: &[TokenId], num_draft_tokens: u32) -> (usize, Option<FinishReason>) {
        if token_ids.is_empty() {
            return (0, None);
        }
        self.num_in_flight_tokens -= 1 + num_draft_tokens;
        self.num_in_flight_drafts -= num_draft_tokens;
        self.num_computed_tokens -= 1 + num_draft_tokens - token_ids.len() as u32;
        for (index, token_id) in token_ids.iter().enumerate() {
            self.token_ids.push(*token_id);
            if self.stop_token_ids.contains(token_id) {
                return (index + 1, Some(FinishReason::StopToken));
            }
        }
        let has_ended = self.token_ids.len() as u32 == self.max_tokens;
        (token_ids.len(), has_ended.then_some(FinishReason::Length))
    }
}
