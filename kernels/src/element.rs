//! The data type of weights, activations and the KV cache. The crate is compiled once for each: with `--cfg element="f16"` or
//! `--cfg element="f32"`, otherwise for bf16. All arithmetic is in float32; an `Element` is a number in memory.

use crate::simd::{F32, Float8, LANES};

#[cfg_attr(not(any(element = "f16", element = "f32")), path = "element/bf16.rs")]
#[cfg_attr(element = "f16", path = "element/f16.rs")]
#[cfg_attr(element = "f32", path = "element/f32.rs")]
mod format;

use format::{Bits, Vector, narrow, widen};
pub(crate) use format::{GROUP, NAME};

/// 8-bit floats that become elements at a time.
pub(crate) const FLOAT8S: usize = 64;

/// A number in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[repr(transparent)]
pub(crate) struct Element(Bits);

impl Element {
    /// The number rounded to nearest even.
    #[inline(always)]
    pub(crate) fn from_f32(value: f32) -> Element {
        Element(format::from_f32(value))
    }

    #[inline(always)]
    pub(crate) fn to_f32(self) -> f32 {
        format::to_f32(self.0)
    }

    #[inline(always)]
    pub(crate) fn from_bits(bits: Bits) -> Element {
        Element(bits)
    }

    /// The bits in memory.
    #[inline(always)]
    pub(crate) fn bits(self) -> Bits {
        self.0
    }

    /// Loads 16 elements.
    ///
    /// # Safety
    /// They must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(address: *const Element) -> F32 {
        // SAFETY: guaranteed by the caller.
        widen(unsafe { Vector::load(address.cast()) })
    }

    /// Loads the first `count` elements, and zeros.
    ///
    /// # Safety
    /// At least `count` elements, or 16, must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_first(address: *const Element, count: usize) -> F32 {
        // SAFETY: guaranteed by the caller.
        widen(unsafe { Vector::load_first(address.cast(), count) })
    }

    /// Stores 16 elements, rounded to nearest even.
    ///
    /// # Safety
    /// They must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store(values: F32, address: *mut Element) {
        // SAFETY: guaranteed by the caller.
        unsafe { narrow(values).store(address.cast()) };
    }

    /// Stores the first `count` elements, rounded to nearest even.
    ///
    /// # Safety
    /// At least `count` elements, or 16, must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_first(values: F32, address: *mut Element, count: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { narrow(values).store_first(address.cast(), count) };
    }

    /// Turns 64 stored 8-bit floats into elements, exactly.
    ///
    /// # Safety
    /// The bytes must be readable, the elements writable.
    #[inline(always)]
    pub(crate) unsafe fn store_float8(format: Float8, bytes: *const u8, elements: *mut Element) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if cfg!(any(element = "f16", element = "f32")) {
                for first in (0..FLOAT8S).step_by(LANES) {
                    Element::store(format.load(bytes.add(first)), elements.add(first));
                }
                return;
            }
            for (half, words) in format.load_as_bf16(bytes).into_iter().enumerate() {
                words.store(elements.add(half * FLOAT8S / 2).cast());
            }
        }
    }

    /// Loads the first `count` of 16 pairs: their first and their second elements; zeros in other lanes.
    ///
    /// # Safety
    /// At least `count` pairs, or 16, must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_first_pairs(address: *const Element, count: usize) -> (F32, F32) {
        // SAFETY: guaranteed by the caller.
        unsafe { format::load_first_pairs(address.cast(), count) }
    }

    /// Stores the first `count` of 16 pairs, given their first and their second elements, rounded to nearest even.
    ///
    /// # Safety
    /// At least `count` pairs, or 16, must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_first_pairs(first: F32, second: F32, address: *mut Element, count: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { format::store_first_pairs(first, second, address.cast(), count) };
    }

    /// Rounds as if stored and loaded.
    #[inline(always)]
    pub(crate) fn round(values: F32) -> F32 {
        widen(narrow(values))
    }
}

#[cfg(test)]
mod tests;
