//! Element-wise arithmetic on single rows, each result rounded to bf16.

use crate::simd::{self, LANES};
use std::arch::x86_64::*;

/// sum += x
///
/// # Safety
/// Both must be valid for `dim` elements. The CPU must be `supported()`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn add(x: *const u16, sum: *mut u16, dim: usize) {
    for first in (0..dim).step_by(LANES) {
        let mask = simd::first_lanes(dim - first);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let (x, target) = (simd::load_bf16_masked(x.add(first), mask), sum.add(first));
            simd::store_bf16_masked(target, mask, _mm512_add_ps(simd::load_bf16_masked(target, mask), x));
        }
    }
}

/// product *= x
///
/// # Safety
/// As for `add`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn multiply(x: *const u16, product: *mut u16, dim: usize) {
    for first in (0..dim).step_by(LANES) {
        let mask = simd::first_lanes(dim - first);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let (x, target) = (simd::load_bf16_masked(x.add(first), mask), product.add(first));
            simd::store_bf16_masked(target, mask, _mm512_mul_ps(simd::load_bf16_masked(target, mask), x));
        }
    }
}

/// x *= factor
///
/// # Safety
/// As for `add`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn scale(x: *mut u16, factor: f32, dim: usize) {
    for first in (0..dim).step_by(LANES) {
        let (target, mask) = (x.wrapping_add(first), simd::first_lanes(dim - first));
        // SAFETY: guaranteed by the caller.
        unsafe {
            let scaled = _mm512_mul_ps(simd::load_bf16_masked(target, mask), _mm512_set1_ps(factor));
            simd::store_bf16_masked(target, mask, scaled);
        }
    }
}

/// Clamps x to ± `bound`; NaN stays NaN.
///
/// # Safety
/// As for `add`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn clamp(x: *mut u16, bound: f32, dim: usize) {
    for first in (0..dim).step_by(LANES) {
        let (target, mask) = (x.wrapping_add(first), simd::first_lanes(dim - first));
        // SAFETY: guaranteed by the caller.
        unsafe {
            let (low, high) = (_mm512_set1_ps(-bound), _mm512_set1_ps(bound));
            // The second operand is returned when one is NaN.
            let clamped = _mm512_max_ps(low, _mm512_min_ps(high, simd::load_bf16_masked(target, mask)));
            simd::store_bf16_masked(target, mask, clamped);
        }
    }
}
