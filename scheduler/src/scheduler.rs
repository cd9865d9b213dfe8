//! The scheduler's state: who waits, who runs, what is in flight. Planning is in `step.rs`, results in `apply.rs`.
//!
//! INVARIANT: every known sequence is in exactly one state:
//! - queued: the worker does not know it, it has no blocks;
//! - running: the worker knows it, it has blocks and is advanced further;
//! - planned out: the worker knows it, its last token is in flight; its blocks are the pool's again, retiring with that step.

use std::collections::{HashMap, VecDeque};

use crate::error::SubmitError;
use crate::flight::Flight;
use crate::order::{Line, Precedence};
use crate::plan::{Limits, SequenceId, Submission};
use crate::pool::BlockPool;
use crate::sequence::Sequence;

pub struct Scheduler {
    pub(crate) limits: Limits,
    pub(crate) pool: BlockPool,
    pub(crate) sequences: HashMap<SequenceId, Sequence>,
    pub(crate) queue: Line,
    pub(crate) running: Line,
    /// Oldest first.
    pub(crate) flights: VecDeque<Flight>,
    /// Known to the worker, and to be forgotten with the next plan.
    pub(crate) freed: Vec<SequenceId>,
    pub(crate) num_stays: u64,
    pub(crate) num_steps: u64,
    pub(crate) max_running_tokens: u64,
    num_submissions: u64,
}

/// How full the scheduler is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Sequences that wait, preempted ones included.
    pub num_queued: usize,
    /// Sequences that the worker knows and that have not ended.
    pub num_running: usize,
    pub num_blocks: usize,
    /// Blocks that can be handed out now.
    pub num_free_blocks: usize,
    /// Blocks that nobody owns, but that steps in flight may still write.
    pub num_retiring_blocks: usize,
    pub num_steps_in_flight: usize,
    /// Tokens, prompt and generated, that the running sequences can grow to.
    pub max_running_tokens: u64,
}

impl Scheduler {
    /// A limit that must be at least 1 counts as 1 when it is 0. With no blocks every submission is refused.
    pub fn new(limits: Limits) -> Self {
        let limits = Limits {
            max_step_tokens: limits.max_step_tokens.max(1),
            max_step_sequences: limits.max_step_sequences.max(1),
            block_tokens: limits.block_tokens.max(1),
            max_steps_in_flight: limits.max_steps_in_flight.max(1),
            ..limits
        };
        Self {
            limits,
            pool: BlockPool::new(limits.num_blocks),
            sequences: HashMap::new(),
            queue: Line::default(),
            running: Line::default(),
            flights: VecDeque::new(),
            freed: Vec::new(),
            num_stays: 0,
            num_steps: 0,
            max_running_tokens: 0,
            num_submissions: 0,
        }
    }

    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Puts a sequence at the end of the queue. It will end in exactly one terminal event, unless it is aborted.
    pub fn submit(&mut self, submission: Submission) -> Result<(), SubmitError> {
        self.check(&submission)?;
        let precedence = Precedence(self.num_submissions);
        self.num_submissions += 1;
        self.queue.insert(precedence, submission.id);
        self.sequences.insert(submission.id, Sequence::new(submission, precedence));
        Ok(())
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
        let needed_blocks = (max_tokens - 1).div_ceil(self.limits.block_tokens);
        let num_blocks = self.pool.num_blocks();
        if needed_blocks > num_blocks {
            return Err(SubmitError::TooManyBlocks { needed_blocks, num_blocks });
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
            num_queued: self.queue.len(),
            num_running: self.sequences.len() - self.queue.len(),
            num_blocks: self.pool.num_blocks() as usize,
            num_free_blocks: self.pool.num_free(),
            num_retiring_blocks: self.pool.num_retiring(),
            num_steps_in_flight: self.flights.len(),
            max_running_tokens: self.max_running_tokens,
        }
    }

    /// Forgets a sequence in whatever state. False when it is not known.
    pub(crate) fn end(&mut self, id: SequenceId) -> bool {
        let Some(mut sequence) = self.sequences.remove(&id) else {
            return false;
        };
        if sequence.stay().is_some() {
            self.evict(&mut sequence);
        } else {
            self.queue.remove(sequence.precedence());
        }
        true
    }

    /// Puts a running sequence back to the front of the queue; it will compute again all that is known by then.
    pub(crate) fn preempt(&mut self, id: SequenceId) {
        if let Some(mut sequence) = self.sequences.remove(&id) {
            self.evict(&mut sequence);
            self.queue.insert(sequence.precedence(), id);
            self.sequences.insert(id, sequence);
        }
    }

    /// Takes a running or planned out sequence from the worker.
    fn evict(&mut self, sequence: &mut Sequence) {
        let (block_ids, last_step) = sequence.give_up_blocks();
        self.pool.release(block_ids, last_step);
        self.running.remove(sequence.precedence());
        self.freed.push(sequence.id());
        self.max_running_tokens -= u64::from(sequence.max_tokens());
        sequence.leave();
    }
}
