//! A number that processes share and can wait for: `futex(2)` on memory that several processes map. The wait looks at the number and
//! goes to sleep in one step, so no wake between the two is lost.

#[cfg(not(loom))]
use std::sync::atomic::AtomicU32;

/// The number; all zeros is a valid start.
#[cfg(not(loom))]
#[repr(transparent)]
pub(super) struct Futex(pub(super) AtomicU32);

#[cfg(not(loom))]
impl Futex {
    /// Sleeps until a wake, for a tenth of a second at most; returns at once if the number is not `seen`.
    pub(super) fn wait(&self, seen: u32) {
        let timeout = libc::timespec { tv_sec: 0, tv_nsec: 100_000_000 };
        // SAFETY: the address of the number and of the timeout are valid during the call. Every error means: look again.
        unsafe { libc::syscall(libc::SYS_futex, self.0.as_ptr(), libc::FUTEX_WAIT, seen, &raw const timeout) };
    }

    /// Wakes every waiting thread.
    pub(super) fn wake(&self) {
        // SAFETY: the address is valid during the call.
        unsafe { libc::syscall(libc::SYS_futex, self.0.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }
}

/// The same for the model checker: the kernel's lock on a futex is a mutex here.
#[cfg(loom)]
#[derive(Default)]
pub(super) struct Futex(pub(super) loom::sync::atomic::AtomicU32, loom::sync::Mutex<()>, loom::sync::Condvar);

#[cfg(loom)]
impl Futex {
    pub(super) fn wait(&self, seen: u32) {
        let guard = self.1.lock().expect("no thread panics");
        if self.0.load(std::sync::atomic::Ordering::Relaxed) == seen {
            drop(self.2.wait(guard));
        }
    }

    pub(super) fn wake(&self) {
        drop(self.1.lock());
        self.2.notify_all();
    }
}
