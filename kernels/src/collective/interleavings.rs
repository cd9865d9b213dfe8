//! Model-checks the rounds with loom: interleavings of two ranks, every value that the memory model allows, races on the slots,
//! and wakes that are lost. `make loom`.

use super::round::{Counter, Round};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;
use std::convert::Infallible;

/// The counter and the slots of one rank.
#[derive(Default)]
struct Rank {
    counter: Counter,
    slots: [UnsafeCell<u32>; 2],
}

#[derive(Default)]
struct Group([Rank; 2]);

// SAFETY: loom checks that no two threads access a slot at once, unless both read.
unsafe impl Sync for Group {}
// SAFETY: as above.
unsafe impl Send for Group {}

/// Three rounds of one rank. In each it writes the round's number, and checks the other's if it reads it.
fn run(group: &Group, rank: usize, reads: bool) {
    for number in 1..=3 {
        let slot = |of: usize| &group.0[of].slots[number as usize % 2];
        let wait = |other: usize, number: u32| -> Result<(), Infallible> {
            assert!(group.0[other].counter.sleep_until(number, || false));
            Ok(())
        };
        let read = |of: usize| {
            // SAFETY: see above.
            slot(of).with(|value| assert_eq!(unsafe { *value }, number));
            Ok(())
        };
        // SAFETY: see above.
        let write = || slot(rank).with_mut(|value| unsafe { *value = number });
        let round = Round { number, rank, size: 2 };
        let Ok(()) = round.exchange(|of| &group.0[of].counter, wait, write, |of| of == rank || reads, read);
    }
}

fn check(reads: [bool; 2]) {
    // More preemptions take longer than a test may.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let group = Arc::new(Group::default());
        let other = thread::spawn({
            let group = Arc::clone(&group);
            move || run(&group, 1, reads[1])
        });
        run(&group, 0, reads[0]);
        other.join().expect("no thread panics");
    });
}

#[test]
fn ranks_read_what_the_other_wrote_in_the_same_round() {
    check([true, true]);
}

#[test]
fn a_slot_is_not_reused_before_the_rank_that_receives_has_read_it() {
    check([true, false]);
}
