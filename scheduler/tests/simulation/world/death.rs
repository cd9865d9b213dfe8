//! The worker dies and is replaced. The sequences that were in flight can be quarantined one by one, as an engine
//! would.

use penstock_scheduler::SequenceId;

use super::World;
use crate::worker::Worker;

impl World {
    /// Checks that each sequence that was preempted because of a failure had read an unwritten block, unless its step
    /// was not executed.
    pub(super) fn check_voided(&mut self) {
        for (id, start_step) in std::mem::take(&mut self.ledger.voided) {
            self.tally.add("preempted after a failure of another", 1);
            let executed = start_step <= self.worker.last_step;
            assert!(
                !executed || self.worker.poisoned.contains(&(id, start_step)),
                "{id:?} was preempted without a reason"
            );
        }
    }

    /// Replaces the worker. Its blocks and the results in flight are lost.
    pub(super) fn die(&mut self) {
        self.check_voided();
        let is_on_worker = |id: &&SequenceId| self.ledger.knows(**id);
        let on_worker: Vec<_> = self.live.keys().filter(is_on_worker).copied().collect();
        self.tally.add("deaths", 1);
        self.tally.add("on the worker in a death", on_worker.len() as u64);
        let got_tokens = on_worker.iter().filter(|id| !self.live[id].received.is_empty());
        self.tally.add("continued after a death", got_tokens.count() as u64);
        let lost: Vec<_> = self.scheduler.restart().into_keys().collect();
        self.scheduler.audit();
        let in_flight = self.in_flight.iter().flat_map(|step| &step.plan.advances).map(|advance| advance.id);
        let mut in_flight: Vec<_> = in_flight.filter(|id| self.live.contains_key(id)).collect();
        in_flight.sort_unstable();
        in_flight.dedup();
        assert_eq!(lost, in_flight);
        let stats = self.scheduler.stats();
        assert_eq!(
            (stats.num_allocatable_blocks, stats.num_cached_blocks),
            (stats.num_blocks, 0),
            "a block is still in use"
        );
        assert_eq!((stats.num_full_memory_slots, stats.num_full_disk_slots), (0, 0), "a slot is still in use");
        assert_eq!(stats.num_full_snapshots, 0, "a snapshot is still in use");
        assert_eq!((stats.num_queued, stats.num_running), (self.live.len(), 0), "a sequence was lost");
        self.in_flight.clear();
        self.ledger.restart();
        if let Some(reference) = &mut self.reference {
            reference.restart();
        }
        self.reset_max_steps_left();
        let limits = self.scenario.limits;
        self.worker = Worker::new(&limits, self.scenario.repeats_failures);
        if self.scenario.quarantines {
            let suspect = |id: SequenceId| (id, self.live[&id].submission, self.live[&id].received.len());
            self.suspects = lost.into_iter().map(suspect).collect();
        }
    }

    /// Quarantines the next suspect.
    pub(super) fn quarantine(&mut self) {
        while let Some((id, submission, num_tokens)) = self.suspects.front().copied() {
            let suspect = self.live.get(&id).filter(|suspect| suspect.submission == submission);
            if suspect.is_some_and(|suspect| suspect.received.len() == num_tokens) {
                break;
            }
            self.tally.add("quarantined and cleared", u64::from(suspect.is_some()));
            self.suspects.pop_front();
        }
        let quarantined = self.suspects.front().map(|suspect| suspect.0);
        self.scheduler.quarantine(quarantined);
        self.scheduler.audit();
        self.ledger.quarantined = quarantined;
        if let Some(reference) = &mut self.reference {
            reference.quarantine(quarantined);
        }
    }
}
