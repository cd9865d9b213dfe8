//! bf16, which AVX-512 BF16 multiplies in pairs.

use super::Element;
use crate::simd::{F32, U16};

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
