//! float32, multiplied one by one.

use super::Element;
use crate::simd::{F32, LANES};

/// Consecutive elements along a sum that packed layouts keep together.
pub(crate) const GROUP: usize = 1;
pub(crate) const NAME: &str = "float32";

pub(super) type Bits = f32;
pub(super) type Vector = F32;
pub(super) use std::convert::{identity as to_f32, identity as from_f32, identity as widen, identity as narrow};

/// # Safety
/// As for `Element::load_first_pairs`.
#[inline(always)]
pub(super) unsafe fn load_first_pairs(address: *const f32, count: usize) -> (F32, F32) {
    let mut pairs = [[0.0; 2]; LANES];
    // SAFETY: guaranteed by the caller; the arrays have 16 numbers.
    unsafe {
        pairs.as_mut_ptr().copy_from_nonoverlapping(address.cast(), count.min(LANES));
        let all = |which: usize| F32::load(pairs.map(|pair| pair[which]).as_ptr());
        (all(0), all(1))
    }
}

/// # Safety
/// As for `Element::store_first_pairs`.
#[inline(always)]
pub(super) unsafe fn store_first_pairs(first: F32, second: F32, address: *mut f32, count: usize) {
    let (first, second) = (first.to_array(), second.to_array());
    let pairs: [[f32; 2]; LANES] = std::array::from_fn(|lane| [first[lane], second[lane]]);
    // SAFETY: guaranteed by the caller.
    unsafe { pairs.as_ptr().copy_to_nonoverlapping(address.cast(), count.min(LANES)) };
}
