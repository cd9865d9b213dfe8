//! What becomes of the sums of a tile: they are stored, added to the output, or combined as gate and up.

use crate::element::Element;
use crate::simd::{self, LANES};
use std::arch::x86_64::*;

/// The output of a tile.
#[derive(Clone, Copy)]
pub(super) struct Outcome {
    pub(super) target: *mut Element,
    pub(super) stride: usize,
    pub(super) num_columns: usize,
    pub(super) add: bool,
}

impl Outcome {
    /// The output from a later row on.
    pub(super) fn below(self, num_rows: usize) -> Outcome {
        Outcome { target: self.target.wrapping_add(num_rows * self.stride), ..self }
    }
}

/// The sums of `R` rows by `V` vectors of columns.
pub(super) type Sums<const R: usize, const V: usize> = [[__m512; V]; R];

/// Adds a bias for every column of the panel, unless it is null.
///
/// # Safety
/// The bias must be null or cover the panel.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn add_bias<const R: usize, const V: usize>(sums: &mut Sums<R, V>, bias: *const f32) {
    if bias.is_null() {
        return;
    }
    for row in sums {
        for (vector, sum) in row.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the bias.
            *sum = _mm512_add_ps(*sum, unsafe { _mm512_loadu_ps(bias.add(vector * LANES)) });
        }
    }
}

/// Stores the sums, or adds them, rounded to bf16, to what is there.
///
/// # Safety
/// `outcome` must be writable for all rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn store<const R: usize, const V: usize>(sums: &Sums<R, V>, outcome: Outcome) {
    for row in 0..R {
        for vector in 0..V {
            // SAFETY: the caller vouches for the target.
            unsafe {
                let target = outcome.target.add(row * outcome.stride + vector * LANES);
                let mask = simd::first_lanes(outcome.num_columns.saturating_sub(vector * LANES));
                let mut result = sums[row][vector];
                if outcome.add {
                    let old = simd::load_bf16_masked(target, mask);
                    result = _mm512_add_ps(old, simd::round_bf16(result));
                }
                simd::store_bf16_masked(target, mask, result);
            }
        }
    }
}

/// Stores silu(gate)·up, with a rounding to bf16 after every operator.
///
/// # Safety
/// `outcome` must be writable for all rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn store_gated<const R: usize, const V: usize>(
    gates: &Sums<R, V>,
    ups: &Sums<R, V>,
    outcome: Outcome,
) {
    for row in 0..R {
        for vector in 0..V {
            let gate = simd::silu(simd::round_bf16(gates[row][vector]));
            let product = _mm512_mul_ps(simd::round_bf16(gate), simd::round_bf16(ups[row][vector]));
            // SAFETY: the caller vouches for the target.
            unsafe {
                let target = outcome.target.add(row * outcome.stride + vector * LANES);
                let mask = simd::first_lanes(outcome.num_columns.saturating_sub(vector * LANES));
                simd::store_bf16_masked(target, mask, product);
            }
        }
    }
}
