//! A sequence that has not ended, from its client's point of view.

use penstock_scheduler::{Limits, SequenceId, Submission, TokenId};

use crate::model::End;
use crate::worker::Traits;

/// The expected precedence, in ticks: the smaller is admitted first. Computed independently of the scheduler.
pub type Order = (i128, u64, usize);

/// The positions that each token of a sequence attends to. Computed independently of the scheduler, position by
/// position.
#[derive(Clone, Copy, Debug)]
pub struct Visibility {
    block_tokens: u32,
    window_tokens: Option<u32>,
}

impl Visibility {
    /// Tokens after a source attend to all positions.
    pub fn new(limits: &Limits, num_source_tokens: u32) -> Self {
        let window_tokens = limits.window_tokens.filter(|_| num_source_tokens == 0);
        Self { block_tokens: limits.block_tokens, window_tokens }
    }

    /// The first position that the token at `position` attends to.
    pub fn first(&self, position: u32) -> u32 {
        self.window_tokens.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The first block that the token at `position` reads.
    pub fn first_block(&self, position: u32) -> usize {
        (self.first(position) / self.block_tokens) as usize
    }

    /// Blocks that the token at `position` reads or writes.
    pub fn num_blocks(&self, position: u32) -> usize {
        (position / self.block_tokens) as usize + 1 - self.first_block(position)
    }

    /// The largest `num_blocks` of the positions `first..end`.
    pub fn max_blocks(&self, first: u32, end: u32) -> usize {
        (first..end).map(|position| self.num_blocks(position)).max().unwrap_or(0)
    }
}

/// The most steps in flight: one more for each stage after the first.
pub fn max_depth(limits: Limits) -> usize {
    (limits.max_steps_in_flight + limits.num_stages - 1) as usize
}

/// Whether a grammar may force tokens of the sequence.
pub fn has_grammar(id: SequenceId) -> bool {
    id.0.is_multiple_of(2)
}

/// Sequences share blocks only within a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    All,
    Group(u64),
    Alone(usize),
}

#[derive(Clone)]
pub struct Submitted {
    /// Number of the submission; unique.
    pub submission: usize,
    pub order: Order,
    pub scope: Scope,
    pub prompt: Vec<TokenId>,
    pub max_new_tokens: u32,
    pub needs_prompt_outputs: bool,
    pub num_source_tokens: u32,
    pub visibility: Visibility,
    pub received: Vec<TokenId>,
    pub expected: (Vec<TokenId>, End),
    pub abort_tick: Option<u64>,
    pub traits: Traits,
}

impl Submitted {
    pub fn known(&self) -> Vec<TokenId> {
        self.prompt.iter().chain(&self.received).copied().collect()
    }

    pub fn may_look_up(&self) -> bool {
        let needs_all = self.needs_prompt_outputs && self.received.is_empty();
        !needs_all && !matches!(self.scope, Scope::Alone(_))
    }
}

pub fn order(limits: &Limits, priority: i32, tick: u64, submission: usize) -> Order {
    let rank = i128::from(tick) - i128::from(priority) * limits.priority_ageing.as_millis() as i128;
    (rank, tick, submission)
}

pub fn scope(limits: &Limits, submission: &Submission, number: usize) -> Scope {
    match submission.group {
        _ if submission.num_source_tokens > 0 => Scope::Alone(number),
        _ if limits.num_state_slots > 0 && limits.num_snapshots == 0 => Scope::Alone(number),
        _ if limits.prefix_caching => Scope::All,
        Some(group) => Scope::Group(group),
        None => Scope::Alone(number),
    }
}

/// The state in which a sequence is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Queued,
    Prefilling,
    Decoding,
    Finishing,
}

impl State {
    pub fn cancelled_name(self) -> &'static str {
        match self {
            State::Queued => "cancelled in the queue",
            State::Prefilling => "cancelled while prefilling",
            State::Decoding => "cancelled while decoding",
            State::Finishing => "cancelled with the last token in flight",
        }
    }
}
