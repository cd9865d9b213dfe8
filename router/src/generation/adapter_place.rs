//! The choice of the adapters in the workers, and of the requests that get one next: a state machine without time or I/O.
//!
//! First come, first served: a free place, or that of the least recently used adapter without a lease, goes to the adapter whose request
//! has waited longest. Without an idle place, the adapter that was loaded first gives out no leases to requests that came later, so that
//! its place becomes idle: adapters in constant use take turns with those that wait.
//!
//! INVARIANT: at most `max_loaded` adapters are loaded or being loaded, and none with a lease is unloaded.

use std::collections::{BTreeMap, HashMap, HashSet};

/// The adapters in the workers, and the requests that want one.
#[derive(Debug)]
pub(super) struct Places {
    max_loaded: usize,
    /// By the adapter's id.
    places: HashMap<u64, Place>,
    /// The adapter of each request without a lease, in order of arrival.
    waiting: BTreeMap<u64, u64>,
    /// Events so far, the time of this state machine.
    now: u64,
}

/// An adapter in the workers.
#[derive(Debug)]
struct Place {
    is_loaded: bool,
    num_leases: usize,
    taken: u64,
    last_lease: u64,
}

/// What a request for an adapter does next.
#[derive(Debug, PartialEq)]
pub(super) enum Step {
    /// It has a lease.
    Leased,
    /// Until something changes.
    Wait,
    /// The place is taken.
    Load { unloaded_ids: Vec<u64> },
}

impl Places {
    pub(super) fn new(max_loaded: usize) -> Self {
        Self { max_loaded, places: HashMap::new(), waiting: BTreeMap::new(), now: 0 }
    }

    /// A request arrives. Returns its ticket.
    pub(super) fn arrive(&mut self, adapter_id: u64) -> u64 {
        let ticket = self.tick();
        self.waiting.insert(ticket, adapter_id);
        ticket
    }

    /// The request has got a lease, or is gone.
    pub(super) fn leave(&mut self, ticket: u64) {
        self.waiting.remove(&ticket);
    }

    pub(super) fn step(&mut self, ticket: u64, adapter_id: u64) -> Step {
        let earlier: HashSet<u64> =
            self.waiting.range(..ticket).map(|(_, &id)| id).filter(|id| !self.places.contains_key(id)).collect();
        if let Some(place) = self.places.get(&adapter_id) {
            let taken_before = self.places.values().filter(|other| other.taken < place.taken).count();
            if !place.is_loaded || taken_before < earlier.len() {
                return Step::Wait;
            }
            self.lease(adapter_id);
            return Step::Leased;
        }
        if !earlier.is_empty() && !earlier.contains(&adapter_id) {
            return Step::Wait;
        }
        let mut unloaded_ids = Vec::new();
        if self.places.len() >= self.max_loaded {
            let idle = self.places.iter().filter(|(_, place)| place.is_loaded && place.num_leases == 0);
            let Some((&oldest, _)) = idle.min_by_key(|(_, place)| place.last_lease) else { return Step::Wait };
            self.places.remove(&oldest);
            unloaded_ids.push(oldest);
        }
        let taken = self.tick();
        self.places.insert(adapter_id, Place { is_loaded: false, num_leases: 0, taken, last_lease: taken });
        Step::Load { unloaded_ids }
    }

    /// An adapter is loaded. Its first lease is that of the request that loaded it.
    pub(super) fn loaded(&mut self, adapter_id: u64) {
        if let Some(place) = self.places.get_mut(&adapter_id) {
            place.is_loaded = true;
        }
        self.lease(adapter_id);
    }

    /// An adapter could not be loaded.
    pub(super) fn failed(&mut self, adapter_id: u64) {
        self.places.remove(&adapter_id);
    }

    /// A lease ends.
    pub(super) fn release(&mut self, adapter_id: u64) {
        if let Some(place) = self.places.get_mut(&adapter_id) {
            place.num_leases -= 1;
        }
    }

    /// No later request wants this adapter: when its last lease ends, its place is the first to go to another one.
    pub(super) fn retire(&mut self, adapter_id: u64) {
        if let Some(place) = self.places.get_mut(&adapter_id) {
            place.last_lease = 0;
        }
    }

    pub(super) fn max_loaded(&self) -> usize {
        self.max_loaded
    }

    pub(super) fn is_loaded(&self, adapter_id: u64) -> bool {
        self.places.get(&adapter_id).is_some_and(|place| place.is_loaded)
    }

    /// The adapters of the requests without a lease.
    pub(super) fn awaited(&self) -> HashSet<u64> {
        self.waiting.values().copied().collect()
    }

    fn lease(&mut self, adapter_id: u64) {
        let now = self.tick();
        if let Some(place) = self.places.get_mut(&adapter_id) {
            place.num_leases += 1;
            place.last_lease = now;
        }
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    impl Places {
        /// The next step of a request that arrives now. What is to be loaded is loaded at once.
        fn request(&mut self, adapter_id: u64) -> Step {
            let ticket = self.arrive(adapter_id);
            self.retry(ticket, adapter_id)
        }

        fn retry(&mut self, ticket: u64, adapter_id: u64) -> Step {
            let step = self.step(ticket, adapter_id);
            if let Step::Load { .. } = step {
                self.loaded(adapter_id);
            }
            if step != Step::Wait {
                self.leave(ticket);
            }
            step
        }
    }

    fn load(unloaded_ids: &[u64]) -> Step {
        Step::Load { unloaded_ids: unloaded_ids.to_vec() }
    }

    #[test]
    fn an_adapter_with_a_lease_keeps_its_place() {
        let mut places = Places::new(2);
        assert_eq!([places.request(1), places.request(2)], [load(&[]), load(&[])]);
        assert_eq!(places.request(1), Step::Leased);
        let third = places.arrive(3);
        assert_eq!(places.retry(third, 3), Step::Wait);
        places.release(1);
        assert_eq!(places.retry(third, 3), Step::Wait);
        places.release(2);
        assert_eq!(places.retry(third, 3), load(&[2]));
    }

    #[test]
    fn a_place_that_is_being_filled_is_waited_for() {
        let mut places = Places::new(1);
        let first = places.arrive(1);
        assert_eq!(places.step(first, 1), load(&[]));
        assert_eq!(places.request(1), Step::Wait);
        assert_eq!(places.request(2), Step::Wait);
    }

    #[test]
    fn a_retired_adapter_gives_way_before_less_recently_used_ones() {
        let mut places = Places::new(2);
        for id in [1, 2] {
            places.request(id);
            places.release(id);
        }
        places.retire(2);
        assert_eq!(places.request(3), load(&[2]));
    }

    #[test]
    fn a_request_that_leaves_lets_later_ones_pass() {
        let mut places = Places::new(1);
        places.request(1);
        let gone = places.arrive(2);
        let later = places.arrive(1);
        assert_eq!(places.retry(later, 1), Step::Wait, "adapter 2 came first");
        places.leave(gone);
        assert_eq!(places.retry(later, 1), Step::Leased);
    }

    /// Most requests are for the first two adapters, which would keep both places for ever. At each turn a request arrives and one ends.
    #[test]
    fn adapters_that_wait_get_their_turns_in_order() {
        let mut places = Places::new(2);
        let mut waiting: Vec<(u64, u64, u64)> = Vec::new();
        let mut running: VecDeque<u64> = VecDeque::new();
        let mut loaded: Vec<u64> = Vec::new();
        for turn in 0..2000 {
            let adapter_id = if turn % 5 == 0 { 3 + turn / 5 % 4 } else { 1 + turn % 2 };
            waiting.push((places.arrive(adapter_id), adapter_id, turn));
            while running.len() > 4 || (turn > 4 && !running.is_empty()) {
                places.release(running.pop_front().unwrap());
                if running.len() <= 4 {
                    break;
                }
            }
            let mut num_waiting = usize::MAX;
            while waiting.len() < num_waiting {
                num_waiting = waiting.len();
                waiting.retain(|&(ticket, id, _)| {
                    let step = places.retry(ticket, id);
                    if let Step::Load { .. } = step {
                        loaded.push(ticket);
                    }
                    if step != Step::Wait {
                        running.push_back(id);
                    }
                    step == Step::Wait
                });
            }
            assert!(places.places.len() <= 2);
            let oldest = waiting.iter().map(|&(_, _, arrived)| turn - arrived).max();
            assert!(oldest.unwrap_or(0) < 40, "a request waits for {oldest:?} turns");
        }
        assert!(loaded.is_sorted(), "the adapter that came first is loaded first");
        assert!(loaded.len() > 100, "{} turns", loaded.len());
    }
}
