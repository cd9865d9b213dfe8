//! The order in which the ranks of a group write, publish and read. It is apart from what they copy, so that the model checker can run
//! it.

use super::futex::Futex;
#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, fence};
use std::sync::atomic::Ordering;
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, fence};

/// Polls of a counter before the thread sleeps, about 50 µs: as long as a sleep and its wake take, so that waiting costs at most twice
/// the processor time that is needed.
const MAX_POLLS: usize = if cfg!(loom) { 0 } else { 3000 };
/// Polls after which the thread lets others run between polls, because the rank that it waits for may be on the same core.
const POLLS_ALONE: usize = 500;
const POLLS_PER_YIELD: usize = 50;

/// The last round that a rank has published.
#[repr(C)]
#[cfg_attr(loom, derive(Default))]
pub(super) struct Counter {
    published: Futex,
    /// Threads that sleep, or are about to.
    num_sleepers: AtomicU32,
}

impl Counter {
    pub(super) fn publish(&self, number: u32) {
        self.published.0.store(number, Ordering::Release);
        // Together with the fence in `sleep_until`: this thread sees the sleeper, or the sleeper sees the number.
        fence(Ordering::SeqCst);
        if self.num_sleepers.load(Ordering::Relaxed) > 0 {
            self.published.wake();
        }
    }

    pub(super) fn published(&self) -> u32 {
        self.published.0.load(Ordering::Acquire)
    }

    fn has_reached(&self, number: u32) -> bool {
        is_reached(self.published(), number)
    }

    /// Waits for a short time. Returns whether the round was published.
    pub(super) fn spin_until(&self, number: u32) -> bool {
        for poll in 0..MAX_POLLS {
            if self.has_reached(number) {
                return true;
            }
            if poll >= POLLS_ALONE && poll % POLLS_PER_YIELD == 0 {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        self.has_reached(number)
    }

    /// Waits until the round is published. Returns false if the rank's process ended before.
    pub(super) fn sleep_until(&self, number: u32, has_ended: impl Fn() -> bool) -> bool {
        loop {
            self.num_sleepers.fetch_add(1, Ordering::Relaxed);
            fence(Ordering::SeqCst);
            let seen = self.published();
            if !is_reached(seen, number) {
                self.published.wait(seen);
            }
            self.num_sleepers.fetch_sub(1, Ordering::Relaxed);
            if self.has_reached(number) {
                return true;
            }
            if has_ended() {
                // It may have published the round just before its end.
                return self.has_reached(number);
            }
        }
    }
}

/// Round numbers wrap around.
fn is_reached(published: u32, number: u32) -> bool {
    published.wrapping_sub(number) as i32 >= 0
}

/// One round, as one rank sees it.
pub(super) struct Round {
    /// Counts from 1 and wraps around.
    pub(super) number: u32,
    pub(super) rank: usize,
    pub(super) size: usize,
}

impl Round {
    /// Waits until every rank has read what this rank wrote two rounds ago, calls `write` and publishes the round. Then
    /// calls `read` for this rank, and for each other rank with `reads` as soon as that rank has written.
    pub(super) fn exchange<'a, E>(
        &self,
        counter: impl Fn(usize) -> &'a Counter,
        wait: impl Fn(usize, u32) -> Result<(), E>,
        write: impl FnOnce(),
        reads: impl Fn(usize) -> bool,
        read: impl Fn(usize) -> Result<(), E>,
    ) -> Result<(), E> {
        // A rank publishes a round after it has read all of the round before: with this, its reads of two rounds ago are over.
        for other in self.others() {
            wait(other, self.number.wrapping_sub(1))?;
        }
        write();
        counter(self.rank).publish(self.number);
        if reads(self.rank) {
            read(self.rank)?;
        }
        for other in self.others().filter(|&other| reads(other)) {
            wait(other, self.number)?;
            read(other)?;
        }
        Ok(())
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        (1..self.size).map(|ahead| (self.rank + ahead) % self.size)
    }
}
