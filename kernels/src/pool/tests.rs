use super::*;
use crate::testing::spawning_pool;

#[test]
fn every_part_runs_exactly_once() {
    for pool in [Pool::single(), spawning_pool(3)] {
        for num_parts in [0, 1, 2, 7, 100] {
            let counts: Vec<AtomicUsize> = (0..num_parts).map(|_| AtomicUsize::new(0)).collect();
            pool.for_each(num_parts, |part| {
                counts[part].fetch_add(1, Ordering::Relaxed);
            });
            assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
        }
    }
}

#[test]
fn a_walk_finishes_each_kernel_before_the_next() {
    for pool in [Pool::single(), spawning_pool(2), spawning_pool(5)] {
        let sum = AtomicUsize::new(0);
        pool.section(100, |walker| {
            let mut expected = 0;
            for round in 0..100 {
                let num_parts = round % 7;
                walker.for_each(num_parts, |_| {
                    assert!(sum.fetch_add(1, Ordering::Relaxed) >= expected);
                });
                expected += num_parts;
                assert!(sum.load(Ordering::Relaxed) >= expected);
            }
        });
        assert_eq!(sum.load(Ordering::Relaxed), (0..100).map(|round| round % 7).sum::<usize>());
    }
}

#[test]
fn ranges_cover_all_items_once() {
    for (num_items, least) in [(0, 1), (1, 4), (13, 4), (1000, 1)] {
        let counts: Vec<AtomicUsize> = (0..num_items).map(|_| AtomicUsize::new(0)).collect();
        spawning_pool(2).for_ranges(num_items, least, |range| {
            for item in range {
                counts[item].fetch_add(1, Ordering::Relaxed);
            }
        });
        assert!(counts.iter().all(|count| count.load(Ordering::Relaxed) == 1));
    }
}

#[test]
fn each_thread_that_claims_a_part_has_a_state_of_its_own() {
    for pool in [Pool::single(), spawning_pool(3)] {
        for num_parts in [0, 1, 100] {
            let (num_states, num_run) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let init = || (std::thread::current().id(), num_states.fetch_add(1, Ordering::Relaxed));
            let work = |&(thread, _): &(std::thread::ThreadId, usize), _| {
                assert_eq!(thread, std::thread::current().id());
                num_run.fetch_add(1, Ordering::Relaxed);
            };
            pool.for_each_init(num_parts, init, work);
            pool.section(1, |walker| walker.for_each_init(num_parts, init, work));
            assert_eq!(num_run.load(Ordering::Relaxed), 2 * num_parts);
            let most = 2 * num_parts.min(Executor::num_threads(&pool));
            assert!((usize::from(num_parts > 0) * 2..=most).contains(&num_states.load(Ordering::Relaxed)));
        }
    }
}
