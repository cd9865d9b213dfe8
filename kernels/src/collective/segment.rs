//! The shared memory: a desk and two slots for each rank.

use super::round::Counter;
use crate::pool::Target;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicUsize;

/// Bytes of a slot. PERF: the slots of two ranks fit into a core's level-2 cache, and the parts of 128 tokens of a small model into a
/// slot.
pub(super) const SLOT_BYTES: usize = 128 << 10;
const PAGE: usize = 4096;

/// What a rank tells the others. Desks are two cache lines apart, because processors fetch lines in pairs.
#[repr(C, align(128))]
pub(super) struct Desk {
    pub(super) counter: Counter,
    /// Bytes of the whole part whose piece is in the slot of even and of odd rounds.
    pub(super) part_bytes: [AtomicUsize; 2],
}

/// A mapping of the memory.
pub(super) struct Segment {
    base: NonNull<u8>,
    size: usize,
}

// SAFETY: desks are atomics, and slots are addresses; who may use a slot is said by `Round`.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// Bytes of the desks of `size` ranks, in whole pages.
const fn desk_bytes(size: usize) -> usize {
    (size * size_of::<Desk>()).next_multiple_of(PAGE)
}

/// Bytes of the memory of `size` ranks.
pub(crate) const fn segment_bytes(size: usize) -> usize {
    desk_bytes(size) + size * 2 * SLOT_BYTES
}

impl Segment {
    /// Maps a file of `segment_bytes`.
    pub(super) fn map(file: BorrowedFd<'_>, size: usize) -> io::Result<Segment> {
        let mut found = std::mem::MaybeUninit::<libc::stat>::uninit();
        // SAFETY: the descriptor is open, and `found` has room for the result, which is written on success.
        let file_bytes = unsafe {
            if libc::fstat(file.as_raw_fd(), found.as_mut_ptr()) != 0 {
                return Err(io::Error::last_os_error());
            }
            found.assume_init().st_size as usize
        };
        let bytes = segment_bytes(size);
        if file_bytes != bytes {
            let message = format!("the shared memory has {file_bytes} bytes, must have {bytes} for {size} ranks");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches nothing that exists.
        let base =
            unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Segment { base, size })
    }

    pub(super) fn desk(&self, rank: usize) -> &Desk {
        assert!(rank < self.size);
        // SAFETY: the desks are at the start of the mapping, aligned, and valid as zeros; they consist of atomics.
        unsafe { &*self.base.as_ptr().cast::<Desk>().add(rank) }
    }

    /// The slot of a rank for a round.
    pub(super) fn slot(&self, rank: usize, round: u32) -> Target<u8> {
        assert!(rank < self.size);
        let index = rank * 2 + round as usize % 2;
        Target::new(self.base.as_ptr().wrapping_add(desk_bytes(self.size) + index * SLOT_BYTES))
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the segment owns this mapping.
        unsafe { libc::munmap(self.base.as_ptr().cast(), segment_bytes(self.size)) };
    }
}
