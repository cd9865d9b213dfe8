//! bf16, multiplied in pairs: by one instruction with AVX-512 BF16, otherwise as two numbers in float32.

use super::Element;
use crate::simd::{F32, I32, U16};

pub(crate) const NAME: &str = "bfloat16";
/// Consecutive elements along a sum that packed layouts keep together.
pub(crate) const GROUP: usize = 2;

pub(super) type Bits = u16;
pub(super) type Vector = U16;
pub(super) use crate::simd::{from_bf16 as to_f32, to_bf16 as from_f32};

#[path = "words.rs"]
mod words;
pub(super) use words::{load_first_pairs, store_first_pairs};

#[inline(always)]
pub(super) fn widen(words: U16) -> F32 {
    F32::from_bf16(words)
}

#[inline(always)]
pub(super) fn narrow(values: F32) -> U16 {
    values.to_bf16()
}

/// A pair of elements in each lane, ready to be multiplied.
#[derive(Clone, Copy)]
#[cfg(target_feature = "avx512bf16")]
pub(crate) struct Group(I32);

#[cfg(target_feature = "avx512bf16")]
impl Group {
    #[inline(always)]
    fn new(pairs: I32) -> Group {
        Group(pairs)
    }

    /// sum + self·other per lane, over the elements of the group.
    #[inline(always)]
    pub(crate) fn dot(self, other: Group, sum: F32) -> F32 {
        self.0.dot_pairs(other.0, sum)
    }
}

/// A pair of elements in each lane, ready to be multiplied.
#[derive(Clone, Copy)]
#[cfg(not(target_feature = "avx512bf16"))]
pub(crate) struct Group {
    even: F32,
    odd: F32,
}

#[cfg(not(target_feature = "avx512bf16"))]
impl Group {
    #[inline(always)]
    fn new(pairs: I32) -> Group {
        let odd = pairs & I32::splat(0xffff_0000_u32 as i32);
        Group { even: F32::from_bits(pairs.shift_left(16)), odd: F32::from_bits(odd) }
    }

    /// sum + self·other per lane, over the elements of the group.
    #[inline(always)]
    pub(crate) fn dot(self, other: Group, sum: F32) -> F32 {
        self.odd.mul_add(other.odd, self.even.mul_add(other.even, sum))
    }
}

impl Group {
    /// Loads the groups of 16 lanes, one after the other.
    ///
    /// # Safety
    /// 16 groups must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(address: *const Element) -> Group {
        // SAFETY: guaranteed by the caller.
        Group::new(unsafe { I32::load(address.cast()) })
    }

    /// As `load`, with zeros instead of all but the first element of each group, which may be anything.
    ///
    /// # Safety
    /// As for `load`.
    #[inline(always)]
    pub(crate) unsafe fn load_head(address: *const Element) -> Group {
        // SAFETY: guaranteed by the caller.
        Group::new(unsafe { I32::load(address.cast()) } & I32::splat(0xffff))
    }

    /// The same group in every lane.
    ///
    /// # Safety
    /// A group must be readable.
    #[inline(always)]
    pub(crate) unsafe fn broadcast(address: *const Element) -> Group {
        // SAFETY: guaranteed by the caller.
        Group::new(I32::splat(unsafe { address.cast::<i32>().read_unaligned() }))
    }

    /// The same element, followed by zeros, in every lane.
    #[inline(always)]
    pub(crate) fn broadcast_head(element: Element) -> Group {
        Group::new(I32::splat(i32::from(element.bits())))
    }
}
