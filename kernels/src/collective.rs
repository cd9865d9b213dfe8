//! Collectives between the ranks of one host, through memory that they share. A rank copies its part into its slot, publishes the round,
//! and copies the other ranks' parts out of theirs: about a microsecond for a small tensor.
//!
//! A part larger than a slot takes several rounds. Each rank has two slots, for even and odd rounds, so it fills one while others read
//! the other.
//! INVARIANT: all ranks make the same calls in the same order, with the same number of rows and the same widths.

mod futex;
mod peer;
mod round;
mod segment;

use crate::pool::{Source, Target};
use peer::Peer;
use round::Round;
use segment::{SLOT_BYTES, Segment};
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError, TryLockError};

pub(crate) use segment::segment_bytes;

/// Why a collective failed. The group cannot be used afterwards.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The process of this rank has ended.
    Ended { rank: usize, pid: i32 },
    /// This rank's part has another size: the ranks do not compute the same step.
    Differs { rank: usize, given_bytes: usize, expected_bytes: usize },
    /// Another thread of this process is inside a collective.
    Busy,
}

/// One rank's view of the group.
pub(crate) struct Collective {
    rank: usize,
    segment: Segment,
    /// Peers by rank; None: this process.
    peers: Vec<Option<Peer>>,
    last_round: Mutex<u32>,
}

/// Rows of a rank: byte `i` of row `r` is at `address + r * stride + i`.
pub(crate) struct Part {
    pub(crate) address: Source<u8>,
    pub(crate) stride: usize,
    pub(crate) num_rows: usize,
}

impl Collective {
    /// Joins the ranks of `pids`; this process is number `rank`. `memory`: one file of `segment_bytes` zeros for all.
    pub(crate) fn new(rank: usize, pids: &[i32], memory: BorrowedFd<'_>) -> io::Result<Collective> {
        let open = |(other, &pid)| if other == rank { Ok(None) } else { Peer::open(pid).map(Some) };
        Ok(Collective {
            rank,
            segment: Segment::map(memory, pids.len())?,
            peers: pids.iter().enumerate().map(open).collect::<io::Result<_>>()?,
            last_round: Mutex::new(0),
        })
    }

    /// This process's rank.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub(crate) fn size(&self) -> usize {
        self.peers.len()
    }

    /// Joins the ranks' parts side by side: row `r` of the contiguous `output` is row `r` of each rank's part in turn. `widths`: bytes
    /// of a row on each rank. Without `output` this rank only sends. `sleeping` runs a wait that has become long.
    ///
    /// # Safety
    /// The part has rows of `widths[rank]` bytes, and `output` has room for as many rows of all ranks' widths. The part is apart from it, or
    /// where it belongs in it.
    pub(crate) unsafe fn gather(
        &self,
        part: &Part,
        widths: &[usize],
        output: Option<Target<u8>>,
        sleeping: impl Fn(&(dyn Fn() -> bool + Sync)) -> bool,
    ) -> Result<(), Failure> {
        assert_eq!(widths.len(), self.size(), "every rank has a width");
        let mut last_round = match self.last_round.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(error)) => PoisonError::into_inner(error),
            Err(TryLockError::WouldBlock) => return Err(Failure::Busy),
        };
        let row_bytes: usize = widths.iter().sum();
        let part_bytes = |rank: usize| widths[rank] * part.num_rows;
        let largest = (0..self.size()).map(part_bytes).max().unwrap_or(0);
        for start in (0..largest).step_by(SLOT_BYTES) {
            let bytes = |rank: usize| start.min(part_bytes(rank))..(start + SLOT_BYTES).min(part_bytes(rank));
            *last_round = last_round.wrapping_add(1);
            let number = *last_round;
            let round = Round { number, rank: self.rank, size: self.size() };
            let write = || {
                let desk = self.segment.desk(self.rank);
                let slot = self.segment.slot(self.rank, number);
                for_each_piece(bytes(self.rank), widths[self.rank], |row, column, offset, length| {
                    // SAFETY: the piece is inside the part and the slot, which no rank reads now.
                    unsafe { slot.at(offset).copy_from(part.address.at(row * part.stride + column), length) };
                });
                desk.part_bytes[number as usize % 2].store(part_bytes(self.rank), Ordering::Relaxed);
            };
            let read = |rank: usize| {
                let given = self.segment.desk(rank).part_bytes[number as usize % 2].load(Ordering::Relaxed);
                if given != part_bytes(rank) {
                    return Err(Failure::Differs { rank, given_bytes: given, expected_bytes: part_bytes(rank) });
                }
                let Some(output) = output else { return Ok(()) };
                let slot = self.segment.slot(rank, number);
                let first_column: usize = widths[..rank].iter().sum();
                for_each_piece(bytes(rank), widths[rank], |row, column, offset, length| {
                    let to = output.at(row * row_bytes + first_column + column);
                    // SAFETY: the piece is inside the slot, which its rank has published, and inside the output.
                    unsafe { to.copy_from(slot.at(offset), length) };
                });
                Ok(())
            };
            let wait = |rank: usize, number: u32| self.wait(rank, number, &sleeping);
            let counter = |rank: usize| &self.segment.desk(rank).counter;
            let reads = |rank: usize| output.is_some() && !bytes(rank).is_empty();
            round.exchange(counter, wait, write, reads, read)?;
        }
        Ok(())
    }

    /// Waits until a rank has published a round.
    fn wait(
        &self,
        rank: usize,
        number: u32,
        sleeping: &impl Fn(&(dyn Fn() -> bool + Sync)) -> bool,
    ) -> Result<(), Failure> {
        let Some(peer) = &self.peers[rank] else { return Ok(()) };
        let counter = &self.segment.desk(rank).counter;
        if counter.spin_until(number) || sleeping(&|| counter.sleep_until(number, || peer.has_ended())) {
            Ok(())
        } else {
            Err(Failure::Ended { rank, pid: peer.pid() })
        }
    }
}

/// Calls `copy(row, column, offset, length)` for the pieces of rows that a range of their concatenated bytes consists of; `offset`
/// counts from the start of the range.
fn for_each_piece(bytes: Range<usize>, width: usize, mut copy: impl FnMut(usize, usize, usize, usize)) {
    let mut at = bytes.start;
    while at < bytes.end {
        let (row, column) = (at / width, at % width);
        let length = (width - column).min(bytes.end - at);
        copy(row, column, at - bytes.start, length);
        at += length;
    }
}

#[cfg(all(test, loom))]
mod interleavings;
#[cfg(all(test, not(loom)))]
mod tests;
