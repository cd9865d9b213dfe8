//! Recovery: a restart after the worker was lost, and the quarantine that finds the sequence that brought it down.

use std::collections::BTreeMap;

use super::Scheduler;
use crate::in_flight::InFlightSteps;
use crate::plan::SequenceId;
use crate::queue::Queue;

impl Scheduler {
    /// Continues with a new worker. All sequences are queued again with the tokens that have come back, the cache is
    /// empty, no step is in flight, no sequence is quarantined, and the next plan is step 1.
    ///
    /// Returns the known sequences that were in flight, even if they have been preempted since, because any of them may be
    /// the cause; each with the most tokens that the lost steps could have given it.
    pub fn restart(&mut self) -> BTreeMap<SequenceId, u32> {
        let mut lost = BTreeMap::new();
        for in_flight in self.in_flight.advances().filter(|in_flight| self.sequences.contains_key(&in_flight.id)) {
            let num_tokens = if in_flight.sample { in_flight.num_draft_tokens + 1 } else { 0 };
            *lost.entry(in_flight.id).or_default() += num_tokens;
        }
        self.in_flight = InFlightSteps::default();
        self.residents.clear();
        self.cache.clear();
        self.image_room.clear();
        self.quarantined = None;
        self.queue = Queue::default();
        for (id, sequence) in &mut self.sequences {
            // The blocks of its table are gone.
            drop(sequence.end_residency());
            self.queue.insert(sequence.precedence(), *id);
        }
        lost
    }

    /// Advances only `id`, one step at a time, until it ends or this is called again: if the worker is lost then, this
    /// sequence was the cause. All other sequences wait in the queue. `None` ends the quarantine.
    pub fn quarantine(&mut self, id: Option<SequenceId>) {
        self.quarantined = id.filter(|id| self.sequences.contains_key(id));
        if self.quarantined.is_some() {
            let running = self.residents.running();
            let others: Vec<_> = running.filter(|id| Some(*id) != self.quarantined).collect();
            for id in others.into_iter().rev() {
                self.preempt(id, true);
            }
        }
    }

    /// The sequence to admit first.
    pub(super) fn first_in_queue(&self) -> Option<SequenceId> {
        match self.quarantined {
            // It is ready, not blocked: no other sequence is running.
            Some(id) => Some(id).filter(|id| self.sequence(*id).residency().is_none()),
            None => self.queue.ready().next(),
        }
    }

    pub(super) fn max_steps_in_flight(&self) -> usize {
        if self.quarantined.is_some() {
            return 1;
        }
        (self.limits.max_steps_in_flight + self.limits.num_stages - 1) as usize
    }
}
