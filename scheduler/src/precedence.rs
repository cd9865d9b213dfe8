//! The two orders of the scheduler: precedence, which is fixed for life, and the order of prompts, which changes every
//! step.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use crate::plan::SequenceId;

/// The sequence of higher precedence is admitted first and preempted last. `a < b` means that `a` is the higher one, so
/// that sorted collections start with it. Unique, assigned at submission, kept through preemption.
///
/// Ageing needs no updates: since all waiting sequences age alike, a priority is a fixed head start in arrival time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Precedence {
    /// Arrival minus the head start of the priority, in ns.
    effective_arrival: i128,
    arrived_at: Duration,
    submission_number: u64,
}

impl Precedence {
    /// `submission_number` must be unique.
    pub(crate) fn new(priority: i32, ageing: Duration, arrived_at: Duration, submission_number: u64) -> Self {
        // No overflow: a duration has less than 95 bits of ns, a priority 31.
        let effective_arrival = arrived_at.as_nanos() as i128 - ageing.as_nanos() as i128 * i128::from(priority);
        Self { effective_arrival, arrived_at, submission_number }
    }
}

/// The order in which prompts share a step: if `a < b`, `a` goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PrefillOrder {
    /// Priority plus the levels gained by not being in a step.
    pub(crate) aged_priority: Reverse<i128>,
    /// Tokens of prompts of lower precedence that may still be computed before this prompt. Proportional to the
    /// tokens left, so the shortest prompt goes first; at 0 the prompt cannot be overtaken any more.
    pub(crate) overtaking_budget: u64,
    pub(crate) precedence: Precedence,
}

/// Sequences, highest precedence first.
pub(crate) type SequenceSet = BTreeMap<Precedence, SequenceId>;
