//! Parallel sections on the threads the process already has: libgomp's, which torch started and which wait spinning.
//! This room starts no thread of its own, so kernels and torch never compete for cores.

use std::ffi::{c_uint, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};

/// `GOMP_parallel(fn, data, num_threads, flags)` of libgomp's C ABI.
pub type GompParallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// How to run a parallel section.
#[derive(Clone, Copy, Debug)]
pub struct Pool {
    num_threads: usize,
    parallel: Option<GompParallel>,
}

/// An address that a section only reads. Whoever makes one promises that what it points to stays alive and unchanged meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Source<T>(*const T);

// SAFETY: see the promise above.
unsafe impl<T> Send for Source<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Source<T> {}

impl<T> Source<T> {
    pub fn new(address: *const T) -> Source<T> {
        Source(address)
    }

    /// The address of an element; using it is the caller's responsibility.
    #[inline]
    pub fn at(self, index: usize) -> *const T {
        self.0.wrapping_add(index)
    }
}

/// An address that a section writes to. Whoever makes one promises that no two parts write the same element.
#[derive(Clone, Copy, Debug)]
pub struct Target<T>(*mut T);

// SAFETY: see the promise above.
unsafe impl<T> Send for Target<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Target<T> {}

impl<T> Target<T> {
    pub fn new(address: *mut T) -> Target<T> {
        Target(address)
    }

    /// The address of an element; using it is the caller's responsibility.
    #[inline]
    pub fn at(self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

struct Job<'a, F> {
    next: AtomicUsize,
    num_parts: usize,
    work: &'a F,
}

impl<F: Fn(usize) + Sync> Job<'_, F> {
    fn run(&self) {
        loop {
            let part = self.next.fetch_add(1, Ordering::Relaxed);
            if part >= self.num_parts {
                return;
            }
            (self.work)(part);
        }
    }
}

/// What each thread of a section does. A panic in it aborts the process, as unwinding out of an `extern "C"` function does.
extern "C" fn enter<F: Fn(usize) + Sync>(job: *mut c_void) {
    // SAFETY: `Pool::for_each` passes a `Job<F>` that outlives the section; it is only shared, and is `Sync`.
    let job = unsafe { &*job.cast::<Job<'_, F>>() };
    job.run();
}

impl Pool {
    /// Run everything on the calling thread.
    pub fn single() -> Pool {
        Pool { num_threads: 1, parallel: None }
    }

    /// Run sections on `num_threads` threads of the pool behind `parallel`.
    pub fn new(num_threads: usize, parallel: GompParallel) -> Pool {
        Pool { num_threads: num_threads.max(1), parallel: Some(parallel) }
    }

    /// Threads that take part in a section.
    pub fn num_threads(&self) -> usize {
        self.num_threads
    }

    /// Call `work` once for each of `0..num_parts`, on as many threads as there are; returns when all are done.
    /// Parts are claimed one by one, so a late thread only gets fewer of them.
    pub fn for_each<F: Fn(usize) + Sync>(&self, num_parts: usize, work: F) {
        let job = Job { next: AtomicUsize::new(0), num_parts, work: &work };
        match self.parallel {
            Some(parallel) if num_parts > 1 && self.num_threads > 1 => {
                let data = (&raw const job).cast_mut().cast::<c_void>();
                // The team keeps one size: libgomp ends and starts threads when it changes.
                // SAFETY: whoever made the pool vouched for `parallel`; it returns when every thread has left `enter`,
                // so `job` outlives all uses.
                unsafe { parallel(enter::<F>, data, self.num_threads as c_uint, 0) };
            }
            _ => job.run(),
        }
    }

    /// Split `0..num_items` into ranges of at least `least` items, some for each thread, and call `work` for each range.
    pub fn for_ranges<F: Fn(std::ops::Range<usize>) + Sync>(&self, num_items: usize, least: usize, work: F) {
        if num_items == 0 {
            return;
        }
        let size = num_items.div_ceil(self.num_threads * 2).max(least).max(1);
        self.for_each(num_items.div_ceil(size), |part| work(part * size..num_items.min((part + 1) * size)));
    }
}

#[cfg(test)]
mod tests {
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
}
