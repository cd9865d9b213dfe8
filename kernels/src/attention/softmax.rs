//! The online softmax: for each row a running maximum, sum and weighted values, and how new scores or another segment enter.

use super::TILE;
use crate::simd::{self, LANES};
use std::arch::x86_64::*;

/// Below every score, yet a number: differences of maxima are never NaN.
pub const NO_MAXIMUM: f32 = -1e30;

/// The state of some rows, in memory that the caller owns: maxima, sums, then `head_dim` weighted values each.
#[derive(Clone, Copy)]
pub struct State {
    address: *mut f32,
    num_rows: usize,
    head_dim: usize,
}

impl State {
    /// `address` must have `plan::state_floats` floats.
    pub fn new(address: *mut f32, num_rows: usize, head_dim: usize) -> State {
        State { address, num_rows, head_dim }
    }

    pub fn maximum(self, row: usize) -> *mut f32 {
        self.address.wrapping_add(row)
    }

    pub fn sum(self, row: usize) -> *mut f32 {
        self.address.wrapping_add(self.num_rows + row)
    }

    pub fn values(self, row: usize) -> *mut f32 {
        self.address.wrapping_add(2 * self.num_rows + row * self.head_dim)
    }

    /// Nothing seen yet.
    ///
    /// # Safety
    /// The memory must be the state's alone.
    pub unsafe fn clear(self) {
        // SAFETY: the caller's word.
        unsafe {
            std::slice::from_raw_parts_mut(self.address, self.num_rows).fill(NO_MAXIMUM);
            std::slice::from_raw_parts_mut(self.sum(0), self.num_rows * (self.head_dim + 1)).fill(0.0);
        }
    }

    /// Let a later segment's state in.
    ///
    /// # Safety
    /// Both must be states of the same rows, and the CPU `supported()`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub unsafe fn merge(self, later: State) {
        for row in 0..self.num_rows {
            // SAFETY: the caller's word.
            unsafe {
                let (mine, other) = (*self.maximum(row), *later.maximum(row));
                if other == NO_MAXIMUM {
                    continue; // the row does not see that segment
                }
                let maximum = if mine > other { mine } else { other };
                let keep = exp2_of(mine - maximum);
                let take = exp2_of(other - maximum);
                self.maximum(row).write(maximum);
                self.sum(row).write((*self.sum(row)).mul_add(keep, *later.sum(row) * take));
                let (keep, take) = (_mm512_set1_ps(keep), _mm512_set1_ps(take));
                for dim in (0..self.head_dim).step_by(LANES) {
                    let (target, source) = (self.values(row).add(dim), later.values(row).add(dim));
                    let scaled = _mm512_mul_ps(_mm512_loadu_ps(source), take);
                    _mm512_storeu_ps(target, _mm512_fmadd_ps(_mm512_loadu_ps(target), keep, scaled));
                }
            }
        }
    }

    /// The row's result, as bf16.
    ///
    /// # Safety
    /// `output` must have `head_dim` numbers, and the CPU be `supported()`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub unsafe fn finish(self, row: usize, output: *mut u16) {
        // SAFETY: the caller's word.
        unsafe {
            let factor = _mm512_set1_ps(1.0 / *self.sum(row));
            for dim in (0..self.head_dim).step_by(LANES) {
                let value = _mm512_mul_ps(_mm512_loadu_ps(self.values(row).add(dim)), factor);
                simd::store_bf16(output.add(dim), value);
            }
        }
    }

    /// Turn a row's scores of one tile into weights (in bf16, neighbouring tokens in pairs), and update maximum and sum.
    /// Returns what the values so far are to be multiplied by. Only the first `num_visible` tokens count.
    ///
    /// # Safety
    /// `scores` must hold TILE floats, `weights` have room for TILE / 2 pairs, and the CPU be `supported()`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub unsafe fn weigh(
        self,
        row: usize,
        scores: *const f32,
        num_visible: usize,
        scale: f32,
        weights: *mut u32,
    ) -> f32 {
        const VECTORS: usize = TILE / LANES;
        let hidden = _mm512_set1_ps(f32::NEG_INFINITY);
        let scale = _mm512_set1_ps(scale);
        // SAFETY: the caller's word.
        unsafe {
            let mut x = [hidden; VECTORS];
            for vector in 0..VECTORS {
                let mask = simd::first_lanes(num_visible.saturating_sub(vector * LANES));
                let score = _mm512_maskz_loadu_ps(mask, scores.add(vector * LANES));
                x[vector] = _mm512_mask_mul_ps(hidden, mask, score, scale);
            }
            let highest = _mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3]));
            let before = *self.maximum(row);
            let maximum = before.max(_mm512_reduce_max_ps(highest));
            let shift = _mm512_set1_ps(maximum);
            let factor = exp2_of(before - maximum);
            for vector in 0..VECTORS {
                x[vector] = simd::exp2(_mm512_sub_ps(x[vector], shift));
            }
            for half in 0..VECTORS / 2 {
                let pairs = _mm512_cvtne2ps_pbh(x[2 * half + 1], x[2 * half]);
                let pairs = std::mem::transmute::<__m512bh, __m512i>(pairs);
                _mm512_storeu_si512(weights.add(half * LANES).cast(), pairs);
            }
            let sum = _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3])));
            self.maximum(row).write(maximum);
            self.sum(row).write((*self.sum(row)).mul_add(factor, sum));
            factor
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn exp2_of(x: f32) -> f32 {
    _mm512_cvtss_f32(simd::exp2(_mm512_set1_ps(x)))
}
