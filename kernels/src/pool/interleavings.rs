//! Model-checks the threads of a section with loom: every interleaving, every value that the memory model allows, races on the data
//! that parts write and read, and threads that are never woken. `make loom`. Waiting threads do not spin here but sleep at once.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicUsize as Count;
use loom::thread;

use super::*;

/// Data that parts write and later parts read, as kernels do through `Target` and `Source`.
struct Cells(Vec<UnsafeCell<usize>>);

// SAFETY: loom checks that no two threads access a cell at once, unless both read.
unsafe impl Sync for Cells {}
// SAFETY: as above.
unsafe impl Send for Cells {}

impl Cells {
    fn new(count: usize) -> Cells {
        Cells((0..count).map(|_| UnsafeCell::new(0)).collect())
    }

    fn add(&self, index: usize, value: usize) {
        // SAFETY: see above.
        self.0[index].with_mut(|cell| unsafe { *cell += value });
    }

    fn get(&self, index: usize) -> usize {
        // SAFETY: see above.
        self.0[index].with(|cell| unsafe { *cell })
    }
}

/// Runs `walk` on a team of threads as `Pool::section` does, and returns when all have finished.
fn section(num_threads: usize, max_phases: usize, walk: impl Fn(&Walker<'_>) + Send + Sync + 'static) {
    let section = Arc::new(Section::new(max_phases));
    let walk = Arc::new(walk);
    let enter = move || walk(&Walker { section: &section, at: Cell::new(0), num_threads });
    let others: Vec<_> = (1..num_threads).map(|_| thread::spawn(enter.clone())).collect();
    enter();
    for other in others {
        other.join().expect("no thread panics");
    }
}

#[test]
fn a_kernel_sees_all_that_the_one_before_wrote() {
    loom::model(|| {
        section(2, 2, {
            let (first, second) = (Cells::new(2), Cells::new(2));
            move |walker| {
                walker.for_each(2, |part| first.add(part, part + 1));
                walker.for_each(2, |part| second.add(part, first.get(0) + first.get(1)));
                assert_eq!((second.get(0), second.get(1)), (3, 3));
            }
        });
    });
}

#[test]
fn a_kernel_without_parts_and_one_with_a_single_part_block_no_thread() {
    loom::model(|| {
        section(2, 3, {
            let cell = Cells::new(1);
            move |walker| {
                walker.for_each(1, |_| cell.add(0, 1));
                walker.for_each(0, |_| unreachable!("there is no part"));
                walker.for_each(1, |_| cell.add(0, 1));
                assert_eq!(cell.get(0), 2);
            }
        });
    });
}

#[test]
fn the_last_part_wakes_both_threads_that_sleep() {
    // Three threads have too many interleavings for all of them.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        section(3, 1, {
            let cell = Cells::new(1);
            move |walker| {
                walker.for_each(1, |_| cell.add(0, 1));
                assert_eq!(cell.get(0), 1);
            }
        });
    });
}

#[test]
fn parts_are_claimed_once_by_three_threads() {
    loom::model(|| {
        let shared = Arc::new((Count::new(0), Cells::new(3)));
        let claim = {
            let shared = Arc::clone(&shared);
            move || run_parts(&shared.0, 3, &|| (), &|(), part| shared.1.add(part, 1))
        };
        let others = [thread::spawn(claim.clone()), thread::spawn(claim.clone())];
        let count = claim() + others.into_iter().map(|other| other.join().expect("no thread panics")).sum::<usize>();
        assert_eq!((count, shared.1.get(0), shared.1.get(1), shared.1.get(2)), (3, 1, 1, 1));
    });
}
