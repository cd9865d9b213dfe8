//! Sequences in the order in which they are served: the queue, and those that run.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::Duration;

use crate::plan::SequenceId;

/// Who is served first and preempted last: the smaller. Unique, given at submission and kept through preemption.
///
/// Ageing is in it, although it never changes: since all that wait age alike, a priority is worth the same head start for
/// ever, namely having arrived so much earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Precedence {
    /// The arrival less the head start that the priority gives, in ns.
    rank: i128,
    arrived_at: Duration,
    number: u64,
}

impl Precedence {
    /// `number` is unique.
    pub fn new(priority: i32, ageing: Duration, arrived_at: Duration, number: u64) -> Self {
        // No overflow: a duration has less than 95 bits of ns, a priority 31.
        let rank = arrived_at.as_nanos() as i128 - ageing.as_nanos() as i128 * i128::from(priority);
        Self { rank, arrived_at, number }
    }
}

/// Who computes its prompt first, among those that may: the smaller. Unlike precedence it changes from step to step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Turn {
    pub level: Reverse<i128>,
    pub effort: u64,
    pub precedence: Precedence,
}

/// A set of sequences, by precedence.
#[derive(Debug, Default)]
pub(crate) struct Line {
    ids: BTreeMap<Precedence, SequenceId>,
}

impl Line {
    pub fn insert(&mut self, precedence: Precedence, id: SequenceId) {
        self.ids.insert(precedence, id);
    }

    /// Nothing happens when it is not in here.
    pub fn remove(&mut self, precedence: Precedence) {
        self.ids.remove(&precedence);
    }

    pub fn first(&self) -> Option<SequenceId> {
        self.ids.first_key_value().map(|(_, id)| *id)
    }

    pub fn last(&self) -> Option<SequenceId> {
        self.ids.last_key_value().map(|(_, id)| *id)
    }

    pub fn len(&self) -> usize {
        self.ids.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = SequenceId> {
        self.ids.values().copied()
    }
}
