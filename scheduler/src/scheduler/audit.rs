//! Recounts everything that the scheduler keeps count of.

use super::Scheduler;

impl Scheduler {
    /// Panics if a count, a reference or a state is wrong. For tests: it takes time proportional to all state.
    pub fn audit(&self) {
        let (queued, resident): (Vec<_>, Vec<_>) =
            self.sequences.values().partition(|sequence| sequence.residency().is_none());
        self.queue.audit(queued.iter().map(|sequence| (sequence.precedence(), sequence.id())));
        for sequence in queued {
            let Some(node) = self.queue.awaited_node(sequence.id()) else { continue };
            let pending = self.cache.pending(node).expect("an awaited node is pending");
            assert!(pending.precedence < sequence.precedence());
            let producer = self.sequence(pending.producer).table();
            assert!(producer.computes_or_saves(node), "{:?} waits in vain", sequence.id());
        }
        let running = || resident.iter().filter(|sequence| !sequence.is_finishing());
        let max_tokens = resident.iter().map(|sequence| u64::from(sequence.max_tokens())).sum();
        self.residents.audit(running().map(|sequence| sequence.precedence()), running().count(), max_tokens);
        self.image_room.audit(resident.iter().map(|sequence| sequence.images()));
        if let Some((first, id)) = self.queue.awaiting_image_room().first_key_value() {
            let mut ready = self.queue.ready().map(|id| self.sequence(id)).filter(|it| !it.images().is_empty());
            let may_wait =
                !self.image_room.fits(self.sequence(*id).images()) || ready.any(|it| it.precedence() < *first);
            assert!(may_wait, "{id:?} waits for room that is there");
        }
        self.in_flight.audit();
        self.cache.audit(resident.iter().map(|sequence| (sequence.table(), sequence.is_finishing())));
    }
}
