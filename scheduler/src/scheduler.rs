//! The scheduler's state: who waits, who runs, what is in flight. Planning is in `step.rs`, results in `apply.rs`.
//!
//! INVARIANT: every known sequence is in exactly one state:
//! - queued: the worker does not know it, it has no blocks;
//! - waiting: like queued, but another one is computing what it needs, and it is not in line until that is done;
//! - running: the worker knows it, it has blocks and is advanced further;
//! - planned out: the worker knows it, its last token is in flight; it keeps its blocks until that is back.

use std::collections::{BTreeSet, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use crate::cache::Cache;
use crate::cost::CostModel;
use crate::error::SubmitError;
use crate::flight::Flight;
use crate::layout::BlockLayout;
use crate::number::NumberMap;
use crate::order::{Line, Precedence};
use crate::plan::{BlockHash, Limits, SequenceId, Submission, TokenId};
use crate::prefix::{NodeId, Root};
use crate::sequence::Sequence;

pub struct Scheduler {
    pub(crate) limits: Limits,
    pub(crate) cache: Cache,
    pub(crate) sequences: NumberMap<SequenceId, Sequence>,
    pub(crate) queue: Line,
    pub(crate) running: Line,
    /// By what they wait for.
    pub(crate) waiting: NumberMap<NodeId, BTreeSet<SequenceId>>,
    pub(crate) num_waiting: usize,
    /// Oldest first.
    pub(crate) flights: VecDeque<Flight>,
    /// Known to the worker, and to be forgotten with the next plan.
    pub(crate) freed: Vec<SequenceId>,
    /// The only one that advances.
    pub(crate) quarantined: Option<SequenceId>,
    pub(crate) num_stays: u64,
    pub(crate) num_steps: u64,
    pub(crate) max_running_tokens: u64,
    pub(crate) num_queried_tokens: u64,
    pub(crate) num_hit_tokens: u64,
    pub(crate) cost: CostModel,
    num_submissions: u64,
}

/// How full the scheduler is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that wait to be started, preempted ones included.
    pub num_queued: usize,
    /// Sequences that the worker knows and that have not ended.
    pub num_running: usize,
    pub num_blocks: usize,
    /// Blocks that can be handed out now, cached ones included.
    pub num_allocatable_blocks: usize,
    /// Blocks that can be handed out when the steps in flight are over.
    pub num_retiring_blocks: usize,
    /// Blocks that can be shared, in use or not.
    pub num_cached_blocks: usize,
    /// Tokens that were looked for in the prefix cache, in all starts so far.
    pub num_queried_tokens: u64,
    /// Those of them that were found.
    pub num_hit_tokens: u64,
    pub num_steps_in_flight: usize,
    /// Tokens, prompt and generated, that the running sequences can grow to.
    pub max_running_tokens: u64,
}

impl Scheduler {
    /// A limit that must be at least 1 counts as 1 when it is 0. With no blocks every submission is refused.
    pub fn new(limits: Limits) -> Self {
        Self::with_hash(limits, hash_link)
    }

    /// With another hash for the prefix cache.
    pub fn with_hash(limits: Limits, hash: BlockHash) -> Self {
        let limits = Limits {
            max_step_tokens: limits.max_step_tokens.max(1),
            max_step_sequences: limits.max_step_sequences.max(1),
            block_tokens: limits.block_tokens.max(1),
            max_steps_in_flight: limits.max_steps_in_flight.max(1),
            window_tokens: limits.window_tokens.map(|window| window.max(1)),
            ..limits
        };
        Self {
            limits,
            cache: Cache::new(limits.num_blocks, BlockLayout::new(&limits), hash),
            sequences: NumberMap::default(),
            queue: Line::default(),
            running: Line::default(),
            waiting: NumberMap::default(),
            num_waiting: 0,
            flights: VecDeque::new(),
            freed: Vec::new(),
            quarantined: None,
            num_stays: 0,
            num_steps: 0,
            max_running_tokens: 0,
            num_queried_tokens: 0,
            num_hit_tokens: 0,
            cost: CostModel::default(),
            num_submissions: 0,
        }
    }

    /// Puts a sequence into the queue. It will end in exactly one terminal event, unless it is aborted.
    ///
    /// `arrived_at`, on any clock that only moves forward, and the priority give its place in line.
    pub fn submit(&mut self, submission: Submission, arrived_at: Duration) -> Result<(), SubmitError> {
        self.check(&submission)?;
        let ageing = self.limits.priority_ageing;
        let precedence = Precedence::new(submission.priority, ageing, arrived_at, self.num_submissions);
        self.num_submissions += 1;
        let root = self.root(&submission);
        self.queue.insert(precedence, submission.id);
        let layout = self.layout(&submission);
        self.sequences.insert(submission.id, Sequence::new(submission, precedence, root, layout, arrived_at));
        Ok(())
    }

    /// A source is seen to the end.
    fn layout(&self, submission: &Submission) -> BlockLayout {
        let layout = BlockLayout::new(&self.limits);
        BlockLayout { window_tokens: layout.window_tokens.filter(|_| submission.num_source_tokens == 0), ..layout }
    }

    fn root(&self, submission: &Submission) -> Option<Root> {
        if submission.num_source_tokens > 0 {
            // Its blocks hold other things than what the ids before them say.
            None
        } else if self.limits.prefix_caching {
            Some(Root::Cache)
        } else {
            submission.group.map(Root::Group)
        }
    }

    fn check(&self, submission: &Submission) -> Result<(), SubmitError> {
        let num_prompt_tokens = submission.prompt_token_ids.len();
        let max_new_tokens = submission.max_new_tokens;
        if num_prompt_tokens == 0 {
            return Err(SubmitError::EmptyPrompt);
        }
        if max_new_tokens == 0 {
            return Err(SubmitError::NoNewTokens);
        }
        let max_sequence_tokens = self.limits.max_sequence_tokens;
        let max_tokens = u32::try_from(num_prompt_tokens).ok().and_then(|n| n.checked_add(max_new_tokens));
        let Some(max_tokens) = max_tokens.filter(|n| *n <= max_sequence_tokens) else {
            return Err(SubmitError::TooLong { num_prompt_tokens, max_new_tokens, max_sequence_tokens });
        };
        // The last token is never computed.
        let num_required_blocks = self.layout(submission).num_required_blocks(max_tokens - 1) as u32;
        let num_blocks = self.cache.pool.num_blocks();
        if num_required_blocks > num_blocks {
            return Err(SubmitError::TooManyBlocks { num_required_blocks, num_blocks });
        }
        let num_source_tokens = submission.num_source_tokens;
        let max_source_tokens = self.limits.max_step_tokens.min(num_prompt_tokens as u32);
        if num_source_tokens > max_source_tokens {
            return Err(SubmitError::SourceTooLong { num_source_tokens, max_source_tokens });
        }
        if self.sequences.contains_key(&submission.id) {
            return Err(SubmitError::AlreadyKnown { id: submission.id });
        }
        Ok(())
    }

    /// Ends a sequence without an event. False when it is not known: it never was, or has ended.
    pub fn abort(&mut self, id: SequenceId) -> bool {
        self.end(id)
    }

    pub fn stats(&self) -> Stats {
        Stats {
            num_queued: self.num_queued(),
            num_running: self.sequences.len() - self.num_queued(),
            num_blocks: self.cache.pool.num_blocks() as usize,
            num_allocatable_blocks: self.cache.pool.num_available(),
            num_retiring_blocks: self.cache.pool.num_retiring(),
            num_cached_blocks: self.cache.pool.num_cached(),
            num_queried_tokens: self.num_queried_tokens,
            num_hit_tokens: self.num_hit_tokens,
            num_steps_in_flight: self.flights.len(),
            max_running_tokens: self.max_running_tokens,
        }
    }

    /// Forgets a sequence in whatever state. False when it is not known.
    pub(crate) fn end(&mut self, id: SequenceId) -> bool {
        let Some(mut sequence) = self.sequences.remove(&id) else {
            return false;
        };
        self.quarantined = self.quarantined.filter(|quarantined| *quarantined != id);
        if sequence.stay().is_some() {
            self.evict(&mut sequence);
        } else if let Some(node) = sequence.awaits() {
            self.stop_waiting(node, id);
        } else {
            self.queue.remove(sequence.precedence());
        }
        true
    }

    /// Puts a sequence from the worker back to its place in the queue; it will compute again all that is known by then.
    pub(crate) fn preempt(&mut self, id: SequenceId) {
        if let Some(mut sequence) = self.sequences.remove(&id) {
            self.evict(&mut sequence);
            self.queue.insert(sequence.precedence(), id);
            self.sequences.insert(id, sequence);
        }
    }

    /// Takes a running or planned out sequence from the worker.
    fn evict(&mut self, sequence: &mut Sequence) {
        let is_planned_out = sequence.is_planned_out();
        let table = sequence.leave();
        self.end_promises(sequence.id(), &table);
        // Also who waits until another one has computed it: here it is.
        for node in self.cache.release(&table, is_planned_out) {
            self.wake(node);
        }
        self.running.remove(sequence.precedence());
        self.freed.push(sequence.id());
        self.max_running_tokens -= u64::from(sequence.max_tokens());
    }

    fn num_queued(&self) -> usize {
        self.queue.len() + self.num_waiting
    }
}

fn hash_link(parent: u64, token_ids: &[TokenId]) -> u64 {
    let mut hasher = DefaultHasher::new();
    parent.hash(&mut hasher);
    token_ids.hash(&mut hasher);
    hasher.finish()
}
