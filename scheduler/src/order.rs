//! Sequences in the order in which they are served: the queue, and those that run.

use std::collections::BTreeMap;

use crate::plan::SequenceId;

/// Who is served first and preempted last: the smaller. Unique, given at submission and kept through preemption.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Precedence(pub u64);

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
