//! The sequences that the worker knows, from the plan that starts them to the plan that frees them.
//!
//! INVARIANT: a resident sequence is either running (it will be advanced further), or finishing (its last step is
//! planned and it awaits that step's result).

use std::collections::btree_map::Values;
use std::iter::Copied;

use crate::plan::SequenceId;
use crate::precedence::{Precedence, SequenceSet};

/// One period in which the worker knows a sequence. Never reused.
///
/// INVARIANT: outputs of an earlier residency are discarded. A preempted sequence loses the tokens in flight and
/// samples them again: the token at a position depends only on the sequence, its seed and the position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Residency(u64);

#[derive(Debug, Default)]
pub(crate) struct Residents {
    running: SequenceSet,
    /// Evicted since the last plan: the next one tells the worker to forget them.
    freed: Vec<SequenceId>,
    num_residencies: u64,
    /// Running and finishing sequences.
    num_residents: usize,
    /// Tokens that all residents can grow to together.
    max_tokens: u64,
}

impl Residents {
    /// Adds a running sequence.
    pub(crate) fn start(&mut self, precedence: Precedence, id: SequenceId, max_tokens: u32) -> Residency {
        self.running.insert(precedence, id);
        self.max_tokens += u64::from(max_tokens);
        self.num_residents += 1;
        self.num_residencies += 1;
        Residency(self.num_residencies)
    }

    /// Notes that the last step of a running sequence is planned: it is finishing.
    pub(crate) fn finish(&mut self, precedence: Precedence) {
        self.running.remove(&precedence);
    }

    /// Removes a running or finishing sequence.
    pub(crate) fn evict(&mut self, precedence: Precedence, id: SequenceId, max_tokens: u32) {
        self.running.remove(&precedence);
        self.max_tokens -= u64::from(max_tokens);
        self.num_residents -= 1;
        self.freed.push(id);
    }

    /// Forgets all residents without freeing them: the worker is gone.
    pub(crate) fn clear(&mut self) {
        *self = Self { num_residencies: self.num_residencies, ..Self::default() };
    }

    /// The running sequences, highest precedence first.
    pub(crate) fn running(&self) -> Copied<Values<'_, Precedence, SequenceId>> {
        self.running.values().copied()
    }

    /// Running and finishing sequences.
    pub(crate) fn len(&self) -> usize {
        self.num_residents
    }

    pub(crate) fn max_tokens(&self) -> u64 {
        self.max_tokens
    }

    pub(crate) fn has_freed(&self) -> bool {
        !self.freed.is_empty()
    }

    /// The sequences that the next plan has to free.
    pub(crate) fn take_freed(&mut self) -> Vec<SequenceId> {
        std::mem::take(&mut self.freed)
    }

    /// Panics unless exactly `running` are running, and all residents can grow to `max_tokens`.
    pub(crate) fn audit(&self, mut running: impl Iterator<Item = Precedence>, num_running: usize, max_tokens: u64) {
        assert!(running.all(|precedence| self.running.contains_key(&precedence)), "a sequence is not running");
        assert_eq!((self.running.len(), self.max_tokens), (num_running, max_tokens));
    }
}
