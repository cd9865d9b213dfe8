//! The worker is lost, with all that it knew; and what helps to find out whether one of the sequences was to blame.

use crate::order::Line;
use crate::plan::SequenceId;
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Goes on with a new worker. Everybody goes back to the queue with the tokens that have come back, nothing is cached or
    /// in flight, nobody is quarantined, and the next plan is step 1. Returns the known ids
    /// among those in flight.
    pub fn restart(&mut self) -> Vec<SequenceId> {
        let in_flight = self.flights.iter().flat_map(|flight| &flight.advances);
        // Also who was preempted since: it may have been to blame all the same.
        let mut lost: Vec<_> = in_flight.map(|in_flight| in_flight.id).collect();
        lost.retain(|id| self.sequences.contains_key(id));
        lost.sort_unstable();
        lost.dedup();
        self.flights.clear();
        self.freed.clear();
        self.waiting.clear();
        self.num_waiting = 0;
        self.running = Line::default();
        self.max_running_tokens = 0;
        self.num_steps = 0;
        self.quarantined = None;
        self.cache = self.cache.emptied();
        for (id, sequence) in &mut self.sequences {
            // Its table names blocks of the pool that is gone.
            drop(sequence.leave());
            sequence.set_awaits(None);
            self.queue.insert(sequence.precedence(), *id);
        }
        lost
    }

    /// Nobody but `id` advances, and one step at a time, until it ends or this is called again: if the worker is lost
    /// then, it was with this sequence. The others wait in the queue. `None`: nobody is quarantined any more.
    pub fn quarantine(&mut self, id: Option<SequenceId>) {
        self.quarantined = id.filter(|id| self.sequences.contains_key(id));
        if self.quarantined.is_some() {
            let others: Vec<_> = self.running.iter().filter(|id| Some(*id) != self.quarantined).collect();
            for id in others.into_iter().rev() {
                self.preempt(id);
            }
        }
    }

    /// Who is next to leave the queue.
    pub(crate) fn first_in_line(&self) -> Option<SequenceId> {
        match self.quarantined {
            // It never waits for another one: nobody else is on the worker.
            Some(id) => Some(id).filter(|id| self.sequence(*id).stay().is_none()),
            None => self.queue.first(),
        }
    }

    pub(crate) fn max_steps_in_flight(&self) -> usize {
        if self.quarantined.is_some() { 1 } else { self.limits.max_steps_in_flight as usize }
    }
}
