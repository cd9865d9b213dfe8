//! The worker could not continue a sequence: no other sequence may read the blocks that it did not write.
//!
//! A block is shared as soon as the step that fills it is planned, so other sequences may have been planned to read it
//! by the time that step is known to have failed. None of these readers has a result yet: they started in a later step,
//! and results come in order. They are preempted and start again, which costs them only time.

use std::collections::{BTreeSet, HashSet};

use super::Scheduler;
use crate::resident::Residency;

impl Scheduler {
    /// Forgets the blocks that `failed` residencies were planned to fill and the snapshots of their states, and preempts all sequences that read them,
    /// directly or through another reader. The oldest step in flight must be the one that failed.
    pub(super) fn preempt_readers(&mut self, failed: HashSet<Residency>) {
        if failed.is_empty() {
            return;
        }
        let mut invalid = HashSet::new();
        // In order, because what is forgotten first is given out again first.
        let (mut invalid_blocks, mut invalid_snapshots) = (BTreeSet::new(), BTreeSet::new());
        let mut readers = Vec::new();
        // One pass is enough: a reader is planned after the step that fills the block, or saves the snapshot.
        for step in self.in_flight.steps() {
            for (residency, snapshot) in &step.saved {
                match invalid.contains(residency) {
                    true => invalid_snapshots.insert(*snapshot),
                    false => invalid_snapshots.remove(snapshot),
                };
            }
            // What the failed step has saved first are states of the steps before it.
            invalid.extend(&failed);
            for in_flight in &step.advances {
                let reads_snapshot = in_flight.snapshot.is_some_and(|it| invalid_snapshots.contains(&it));
                if reads_snapshot || in_flight.unwritten_blocks.iter().any(|it| invalid_blocks.contains(it)) {
                    invalid.insert(in_flight.residency);
                    if self.is_current(in_flight) {
                        readers.push(in_flight.id);
                    }
                }
                if invalid.contains(&in_flight.residency) {
                    invalid_blocks.extend(in_flight.filled_blocks.iter().copied());
                }
            }
        }
        for block_id in invalid_blocks {
            self.cache.forget(block_id);
        }
        self.cache.forget_snapshots(invalid_snapshots, &invalid);
        for id in readers {
            self.preempt(id, false);
        }
    }
}
