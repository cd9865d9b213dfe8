//! Pairs of consecutive elements of 16 bits.

use super::{narrow, widen};
use crate::simd::F32;

/// # Safety
/// As for `Element::load_first_pairs`.
#[inline(always)]
pub(in crate::element) unsafe fn load_first_pairs(address: *const u16, count: usize) -> (F32, F32) {
    // SAFETY: guaranteed by the caller.
    let pairs = unsafe { F32::load_first(address.cast(), count) }.to_bits();
    (widen(pairs.narrow()), widen(pairs.shift_right(16).narrow()))
}

/// # Safety
/// As for `Element::store_first_pairs`.
#[inline(always)]
pub(in crate::element) unsafe fn store_first_pairs(first: F32, second: F32, address: *mut u16, count: usize) {
    let pairs = narrow(first).widen() | narrow(second).widen().shift_left(16);
    // SAFETY: guaranteed by the caller.
    unsafe { F32::from_bits(pairs).store_first(address.cast(), count) };
}
