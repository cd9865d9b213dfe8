//! A sequence that has not ended, as its client sees it.

use penstock_scheduler::{Limits, Submission, TokenId};

use crate::model::End;
use crate::worker::Nature;

/// The smaller is served first. Worked out anew, in ticks.
pub type Order = (i128, u64, usize);

/// What the next token of a sequence reads. Worked out anew, position by position.
#[derive(Clone, Copy, Debug)]
pub struct Sight {
    block_tokens: u32,
    window_tokens: Option<u32>,
}

impl Sight {
    /// Who has a source sees all.
    pub fn new(limits: &Limits, num_source_tokens: u32) -> Self {
        let window_tokens = limits.window_tokens.filter(|_| num_source_tokens == 0);
        Self { block_tokens: limits.block_tokens, window_tokens }
    }

    /// The first position that is read by the token at `position`.
    pub fn first(&self, position: u32) -> u32 {
        self.window_tokens.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The first block that is read by the token at `position`.
    pub fn first_block(&self, position: u32) -> usize {
        (self.first(position) / self.block_tokens) as usize
    }

    /// Blocks that the token at `position` reads or is written to.
    pub fn num_blocks(&self, position: u32) -> usize {
        (position / self.block_tokens) as usize + 1 - self.first_block(position)
    }

    /// The most that any token from `first` to before `end` does.
    pub fn max_blocks(&self, first: u32, end: u32) -> usize {
        (first..end).map(|position| self.num_blocks(position)).max().unwrap_or(0)
    }
}

/// Sequences share blocks within a circle only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Circle {
    All,
    Group(u64),
    Alone(usize),
}

#[derive(Clone)]
pub struct Submitted {
    /// Counts up.
    pub submission: usize,
    pub order: Order,
    pub circle: Circle,
    pub prompt: Vec<TokenId>,
    pub max_new_tokens: u32,
    pub needs_prompt_logprobs: bool,
    pub num_source_tokens: u32,
    pub sight: Sight,
    pub received: Vec<TokenId>,
    pub expected: (Vec<TokenId>, End),
    pub abort_tick: Option<u64>,
    pub nature: Nature,
}

impl Submitted {
    pub fn known(&self) -> Vec<TokenId> {
        self.prompt.iter().chain(&self.received).copied().collect()
    }

    pub fn may_look_up(&self) -> bool {
        let needs_all = self.needs_prompt_logprobs && self.received.is_empty();
        !needs_all && !matches!(self.circle, Circle::Alone(_))
    }
}

pub fn order(limits: &Limits, priority: i32, tick: u64, submission: usize) -> Order {
    let rank = i128::from(tick) - i128::from(priority) * limits.priority_ageing.as_millis() as i128;
    (rank, tick, submission)
}

pub fn circle(limits: &Limits, submission: &Submission, number: usize) -> Circle {
    match submission.group {
        _ if submission.num_source_tokens > 0 => Circle::Alone(number),
        _ if limits.prefix_caching => Circle::All,
        Some(group) => Circle::Group(group),
        None => Circle::Alone(number),
    }
}

/// What a cancel finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    Queued,
    Prefilling,
    Decoding,
    PlannedOut,
}

impl State {
    pub fn as_cancelled(self) -> &'static str {
        match self {
            State::Queued => "cancelled in the queue",
            State::Prefilling => "cancelled while prefilling",
            State::Decoding => "cancelled while decoding",
            State::PlannedOut => "cancelled with the last token in flight",
        }
    }
}
