//! The worker dies, and another one takes its place; those who were in a step then are tried alone, as an engine may do.

use penstock_scheduler::SequenceId;

use super::World;
use crate::worker::Worker;

impl World {
    /// Of this worker's life. What it did not come to execute could not be poisoned.
    pub(super) fn check_voided(&mut self) {
        for (id, start_step) in std::mem::take(&mut self.ledger.voided) {
            self.tally.add("restarted after another's failure", 1);
            let executed = start_step <= self.worker.last_step;
            assert!(!executed || self.worker.poisoned.contains(&(id, start_step)), "{id:?} lost its stay for nothing");
        }
    }

    /// The worker dies with its blocks and the results that are not back, and another one takes its place.
    pub(super) fn die(&mut self) {
        self.check_voided();
        let is_on_worker = |id: &&SequenceId| self.ledger.knows(**id);
        let on_worker: Vec<_> = self.live.keys().filter(is_on_worker).copied().collect();
        self.tally.add("deaths", 1);
        self.tally.add("lost in a death", on_worker.len() as u64);
        let got_tokens = on_worker.iter().filter(|id| !self.live[id].received.is_empty());
        self.tally.add("went on after a death", got_tokens.count() as u64);
        let lost = self.scheduler.restart();
        self.scheduler.audit();
        let in_flight = self.flights.iter().flat_map(|flight| &flight.plan.advances).map(|advance| advance.id);
        let mut in_flight: Vec<_> = in_flight.filter(|id| self.live.contains_key(id)).collect();
        in_flight.sort_unstable();
        in_flight.dedup();
        assert_eq!(lost, in_flight);
        let stats = self.scheduler.stats();
        assert_eq!(
            (stats.num_allocatable_blocks, stats.num_cached_blocks),
            (stats.num_blocks, 0),
            "a block was not lost"
        );
        assert_eq!((stats.num_queued, stats.num_running), (self.live.len(), 0), "a sequence was lost");
        self.flights.clear();
        self.ledger.restart();
        if let Some(reference) = &mut self.reference {
            reference.restart();
        }
        self.reset_patience();
        let limits = self.scenario.limits;
        self.worker = Worker::new(limits.num_blocks, limits.block_tokens, self.scenario.reports_dead);
        if self.scenario.quarantines {
            let trial = |id: SequenceId| (id, self.live[&id].submission, self.live[&id].received.len());
            self.trials = lost.into_iter().map(trial).collect();
        }
    }

    /// Runs the next suspect alone.
    pub(super) fn quarantine(&mut self) {
        while let Some((id, submission, num_tokens)) = self.trials.front().copied() {
            let suspect = self.live.get(&id).filter(|suspect| suspect.submission == submission);
            if suspect.is_some_and(|suspect| suspect.received.len() == num_tokens) {
                break;
            }
            self.tally.add("run alone and cleared", u64::from(suspect.is_some()));
            self.trials.pop_front();
        }
        let alone = self.trials.front().map(|trial| trial.0);
        self.scheduler.quarantine(alone);
        self.scheduler.audit();
        self.ledger.alone = alone;
        if let Some(reference) = &mut self.reference {
            reference.quarantine(alone);
        }
    }
}
