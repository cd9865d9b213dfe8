//! The worker could not go on with a sequence: what it did not write, nobody may read.
//!
//! Its blocks may be shared as soon as the step that fills them is planned, so others may have been planned to read them by
//! the time that the step is known to have failed. None of those has a result yet, for they started in a later step and
//! results come in order. So they lose nothing but time: they go back to the queue and start anew.

use std::collections::HashSet;

use crate::flight::Stay;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// `failed`: stays that failed in the oldest step in flight, over or not.
    pub(crate) fn void_what_relied_on(&mut self, failed: impl IntoIterator<Item = Stay>) {
        let mut void_stays: HashSet<_> = failed.into_iter().collect();
        if void_stays.is_empty() {
            return;
        }
        let mut void_blocks = HashSet::new();
        let mut readers = Vec::new();
        // One pass is enough: who reads a block was planned after the one that fills it.
        for in_flight in self.flights.iter().flat_map(|flight| &flight.advances) {
            if in_flight.relied_on.iter().any(|block_id| void_blocks.contains(block_id)) {
                void_stays.insert(in_flight.stay);
                readers.push((in_flight.id, in_flight.stay));
            }
            if void_stays.contains(&in_flight.stay) {
                void_blocks.extend(in_flight.filled.iter().copied());
            }
        }
        for block_id in void_blocks {
            self.cache.forget(block_id);
        }
        for (id, stay) in readers {
            if self.sequences.get(&id).is_some_and(|sequence| sequence.stay() == Some(stay)) {
                self.preempt(id);
            }
        }
    }
}
