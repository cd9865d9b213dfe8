//! Parallel sections on the threads that the process already has: torch's libgomp threads, which spin while they wait. This module
//! starts no thread, so kernels and torch do not compete for cores.
//!
//! A kernel takes an `Executor`: the pool, which runs each kernel as a section, or a `Walker`, which runs a series of kernels inside
//! one section with a barrier after each. A thread at a barrier spins for a bounded time and then sleeps, so that the core is free for a
//! thread of the section that another process has displaced.

use std::cell::Cell;
use std::ffi::{c_uint, c_void};
use std::ops::Range;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
#[cfg(not(loom))]
use std::sync::{Condvar, Mutex, atomic::AtomicUsize};

// The model checker (`make loom`) replaces the types through which threads synchronize.
#[cfg(loom)]
use loom::sync::{Condvar, Mutex, atomic::AtomicUsize};

/// `GOMP_parallel(fn, data, num_threads, flags)` of libgomp's C ABI.
pub(crate) type GompParallel = unsafe extern "C" fn(extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

/// Runs parallel sections.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pool {
    num_threads: usize,
    parallel: Option<GompParallel>,
}

/// An address that a section only reads. INVARIANT: the memory stays valid and unchanged during the section.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source<T>(*const T);

// SAFETY: see the invariant above.
unsafe impl<T> Send for Source<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Source<T> {}

impl<T> Source<T> {
    pub(crate) fn new(address: *const T) -> Source<T> {
        Source(address)
    }

    /// The address of an element. The caller must check the bounds.
    #[inline]
    pub(crate) fn at(self, index: usize) -> *const T {
        self.0.wrapping_add(index)
    }
}

/// An address that a section writes to. INVARIANT: no two parts write the same element.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<T>(*mut T);

// SAFETY: see the invariant above.
unsafe impl<T> Send for Target<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Target<T> {}

impl<T> Target<T> {
    pub(crate) fn new(address: *mut T) -> Target<T> {
        Target(address)
    }

    /// The same address, for a later part that reads it.
    pub(crate) fn source(self) -> Source<T> {
        Source(self.0)
    }

    /// The address of an element. The caller must check the bounds.
    #[inline]
    pub(crate) fn at(self, index: usize) -> *mut T {
        self.0.wrapping_add(index)
    }
}

/// Runs the parts of a kernel's work.
pub(crate) trait Executor {
    /// Number of threads.
    fn num_threads(&self) -> usize;

    /// Calls `work` once for each of `0..num_parts`, on all threads, and returns when all calls have returned. Threads claim parts
    /// one by one, so a late thread gets fewer of them.
    fn for_each<F: Fn(usize) + Sync>(&self, num_parts: usize, work: F) {
        self.for_each_init(num_parts, || (), |(), part| work(part));
    }

    /// Like `for_each`, with a state for each thread: a thread calls `init` before its first part, and `work` gets the
    /// result.
    fn for_each_init<S>(&self, num_parts: usize, init: impl Fn() -> S + Sync, work: impl Fn(&S, usize) + Sync);

    /// Splits `0..num_items` into ranges of at least `least` items, about two per thread, and calls `work` for each range.
    fn for_ranges<F: Fn(Range<usize>) + Sync>(&self, num_items: usize, least: usize, work: F) {
        let size = num_items.div_ceil(self.num_threads() * 2).max(least).max(1);
        self.for_each(num_items.div_ceil(size), |part| work(part * size..num_items.min((part + 1) * size)));
    }
}

/// The entry point of each thread of a section. A panic aborts the process, because it cannot unwind out of `extern "C"`.
extern "C" fn enter<F: Fn() + Sync>(work: *mut c_void) {
    // SAFETY: `Pool::on_all_threads` passes an `F` that outlives the section; it is only shared, and is `Sync`.
    let work = unsafe { &*work.cast::<F>() };
    work();
}

impl Pool {
    /// Runs everything on the calling thread.
    pub(crate) fn single() -> Pool {
        Pool { num_threads: 1, parallel: None }
    }

    /// Runs sections on `num_threads` threads of the OpenMP runtime behind `parallel`.
    pub(crate) fn new(num_threads: usize, parallel: GompParallel) -> Pool {
        Pool { num_threads: num_threads.max(1), parallel: Some(parallel) }
    }

    /// Calls `work` on every thread, the calling one included, and returns when all calls have returned.
    fn on_all_threads<F: Fn() + Sync>(&self, work: F) {
        match self.parallel {
            Some(parallel) if self.num_threads > 1 => {
                let data = (&raw const work).cast_mut().cast::<c_void>();
                // The team size is constant, because libgomp ends and starts threads when it changes.
                // SAFETY: the creator of the pool vouched for `parallel`. It returns when every thread has left `enter`, so
                // `work` outlives all uses.
                unsafe { parallel(enter::<F>, data, self.num_threads as c_uint, 0) };
            }
            _ => work(),
        }
    }

    /// Runs a series of kernels in one section. `walk` runs on every thread and must make the same calls on each, at most
    /// `max_phases` in total.
    pub(crate) fn section<F: Fn(&Walker<'_>) + Sync>(&self, max_phases: usize, walk: F) {
        let section = Section::new(max_phases);
        self.on_all_threads(|| {
            let walker = Walker { section: &section, at: Cell::new(0), num_threads: self.num_threads };
            walk(&walker);
            debug_assert!(section.agrees(walker.at.get()), "all threads of a section make the same calls");
        });
    }
}

impl Executor for Pool {
    fn num_threads(&self) -> usize {
        if self.parallel.is_some() { self.num_threads } else { 1 }
    }

    fn for_each_init<S>(&self, num_parts: usize, init: impl Fn() -> S + Sync, work: impl Fn(&S, usize) + Sync) {
        let next = AtomicUsize::new(0);
        let claim = || {
            run_parts(&next, num_parts, &init, &work);
        };
        if num_parts > 1 { self.on_all_threads(claim) } else { claim() }
    }
}

/// Claims and runs parts until none is left; returns their number.
fn run_parts<S>(next: &AtomicUsize, num_parts: usize, init: &impl Fn() -> S, work: &impl Fn(&S, usize)) -> usize {
    let mut count = 0;
    let mut state = None;
    loop {
        let part = next.fetch_add(1, Ordering::Relaxed);
        if part >= num_parts {
            return count;
        }
        work(state.get_or_insert_with(init), part);
        count += 1;
    }
}

/// The progress of one kernel inside a section. The two counters are on separate cache lines, because threads claim from one while
/// they wait on the other.
#[derive(Default)]
struct Phase {
    next: Line,
    /// Finished parts, and the flag `ASLEEP`.
    done: Line,
}

#[derive(Default)]
#[repr(align(64))]
struct Line(AtomicUsize);

/// Flag in `Phase::done`: a thread sleeps until the phase is complete. It is part of the counter, so that the thread which finishes the
/// last part cannot miss it.
const ASLEEP: usize = 1 << (usize::BITS - 1);

/// Whether a phase of `num_parts` parts is complete, given its `Phase::done`.
fn is_complete(done: usize, num_parts: usize) -> bool {
    done & !ASLEEP >= num_parts
}

/// What the threads of a section share. Sleeping threads all wait for the same phase, because none gets past an incomplete one.
struct Section {
    phases: Vec<Phase>,
    lock: Mutex<()>,
    completed: Condvar,
    /// Kernels that the first thread to leave has run; `usize::MAX`: none has left.
    num_run: AtomicUsize,
}

impl Section {
    fn new(max_phases: usize) -> Section {
        let phases = (0..max_phases).map(|_| Phase::default()).collect();
        Section { phases, lock: Mutex::new(()), completed: Condvar::new(), num_run: AtomicUsize::new(usize::MAX) }
    }

    /// Whether a thread that leaves has run as many kernels as the others.
    fn agrees(&self, num_run: usize) -> bool {
        let first = self.num_run.compare_exchange(usize::MAX, num_run, Ordering::Relaxed, Ordering::Relaxed);
        first.is_ok() || first == Err(num_run)
    }

    fn sleep_until_complete(&self, phase: &Phase, num_parts: usize) {
        let mut lock = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut done = phase.done.0.fetch_or(ASLEEP, Ordering::AcqRel);
        while !is_complete(done, num_parts) {
            lock = self.completed.wait(lock).unwrap_or_else(PoisonError::into_inner);
            done = phase.done.0.load(Ordering::Acquire);
        }
    }

    /// Wakes the threads that set `ASLEEP` before their phase was completed.
    fn wake(&self) {
        // A thread sets the flag under the lock and releases the lock by sleeping, so from here on it sleeps.
        drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.completed.notify_all();
    }
}

/// One thread's progress through the kernels of a section. The barrier counts finished parts, not threads, so a thread that is not
/// scheduled delays no other.
pub(crate) struct Walker<'a> {
    section: &'a Section,
    at: Cell<usize>,
    num_threads: usize,
}

/// Polls of a counter before the thread sleeps: 30 to 100 µs. To sleep and wake costs about as much.
const MAX_SPINS: usize = if cfg!(loom) { 0 } else { 2000 };

impl Executor for Walker<'_> {
    fn num_threads(&self) -> usize {
        self.num_threads
    }

    fn for_each_init<S>(&self, num_parts: usize, init: impl Fn() -> S + Sync, work: impl Fn(&S, usize) + Sync) {
        let phase = &self.section.phases[self.at.get()];
        self.at.set(self.at.get() + 1);
        let count = run_parts(&phase.next.0, num_parts, &init, &work);
        // Release and acquire order the writes of parts before the reads of the next kernel.
        let before = phase.done.0.fetch_add(count, Ordering::AcqRel);
        if is_complete(before + count, num_parts) {
            if count > 0 && before & ASLEEP != 0 {
                self.section.wake();
            }
            return;
        }
        for _ in 0..MAX_SPINS {
            std::hint::spin_loop();
            if is_complete(phase.done.0.load(Ordering::Acquire), num_parts) {
                return;
            }
        }
        self.section.sleep_until_complete(phase, num_parts);
    }
}

#[cfg(all(test, loom))]
mod interleavings;
#[cfg(all(test, not(loom)))]
mod tests;
