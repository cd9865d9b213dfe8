//! RMSNorm and LayerNorm, alone and fused with the preceding addition to the residual. Statistics are in float32.

use crate::pool::{Executor, Source, Target};
use crate::row;
use crate::simd::{self, LANES};
use std::arch::x86_64::*;

/// Elements from which a parallel section pays off.
const PART_NUMBERS: usize = 1 << 14;

/// How a row is normalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Divided by its root mean square, and rounded to bf16 before the weight is applied (Llama).
    Rms,
    /// The same, rounded only once, at the end (Gemma).
    WideRms,
    /// LayerNorm, rounded once.
    Layer,
}

/// The norm of groups of `dim` elements: whole rows, or the heads of a token.
pub(crate) struct Norm {
    kind: Kind,
    eps: f32,
    dim: usize,
    /// A weight for each element, of one group or of as many as a row has.
    weight: Vec<f32>,
    /// The same, or empty.
    bias: Vec<f32>,
}

/// The input of a norm: `num_rows` rows of `num_groups` contiguous groups, `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Groups {
    pub(crate) address: Source<u16>,
    pub(crate) stride: usize,
    pub(crate) num_groups: usize,
    pub(crate) num_rows: usize,
}

/// Mean and variance of a group; the mean is 0 where it is not subtracted.
struct Moments {
    mean: f32,
    variance: f32,
}

impl Norm {
    /// Validates the sizes. The error names the mismatch.
    pub(crate) fn new(kind: Kind, eps: f32, dim: usize, weight: Vec<f32>, bias: Vec<f32>) -> Result<Norm, String> {
        if dim == 0 || weight.is_empty() || !weight.len().is_multiple_of(dim) {
            return Err(format!("a norm of {dim} elements cannot have {} weights", weight.len()));
        }
        if !bias.is_empty() && bias.len() != weight.len() {
            return Err(format!("a norm has {} weights and {} biases", weight.len(), bias.len()));
        }
        Ok(Norm { kind, eps, dim, weight, bias })
    }

    /// Elements of a group.
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// Whether the norm applies to rows of this many groups.
    pub(crate) fn fits(&self, num_groups: usize) -> bool {
        self.weight.len() == self.dim || self.weight.len() == num_groups * self.dim
    }

    /// output = norm(x); the output's rows are contiguous.
    ///
    /// # Safety
    /// The norm must fit the groups, and the pointers be valid for them. The CPU must be `supported()`.
    pub(crate) unsafe fn apply(&self, executor: &impl Executor, x: Groups, output: Target<u16>) {
        let width = x.num_groups * self.dim;
        executor.for_ranges(x.num_rows, PART_NUMBERS / width.max(1), |range| {
            for row in range {
                // SAFETY: guaranteed by the caller.
                unsafe { self.apply_row(x.num_groups, x.address.at(row * x.stride), output.at(row * width)) };
            }
        });
    }

    /// residual += x; output = norm(residual). Rows are single groups, those of residual and output contiguous.
    ///
    /// # Safety
    /// As for `apply`; x, residual and output must not overlap, but output may be x.
    pub(crate) unsafe fn add_apply(
        &self,
        executor: &impl Executor,
        x: Groups,
        residual: Target<u16>,
        output: Target<u16>,
    ) {
        executor.for_ranges(x.num_rows, PART_NUMBERS / self.dim, |range| {
            for row in range {
                let (sum, target) = (residual.at(row * self.dim), output.at(row * self.dim));
                // SAFETY: guaranteed by the caller.
                unsafe {
                    row::add(x.address.at(row * x.stride), sum, self.dim);
                    self.apply_row(1, sum, target);
                }
            }
        });
    }

    /// output = norm(x) of one row. The output may be x.
    ///
    /// # Safety
    /// As for `apply`.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(crate) unsafe fn apply_row(&self, num_groups: usize, x: *const u16, output: *mut u16) {
        let has_weights_by_group = self.weight.len() > self.dim;
        for group in 0..num_groups {
            let first = group * self.dim;
            // SAFETY: guaranteed by the caller.
            unsafe {
                let moments = self.moments(x.add(first));
                self.scale(x.add(first), moments, if has_weights_by_group { first } else { 0 }, output.add(first));
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn moments(&self, x: *const u16) -> Moments {
        let mut mean = 0.0;
        if self.kind == Kind::Layer {
            let mut sum = _mm512_setzero_ps();
            for first in (0..self.dim).step_by(LANES) {
                // SAFETY: the group has `dim` elements.
                let x = unsafe { simd::load_bf16_masked(x.add(first), simd::first_lanes(self.dim - first)) };
                sum = _mm512_add_ps(sum, x);
            }
            mean = _mm512_reduce_add_ps(sum) / self.dim as f32;
        }
        let mut squares = _mm512_setzero_ps();
        for first in (0..self.dim).step_by(LANES) {
            let mask = simd::first_lanes(self.dim - first);
            // SAFETY: as above.
            let x = unsafe { simd::load_bf16_masked(x.add(first), mask) };
            let centered = _mm512_maskz_sub_ps(mask, x, _mm512_set1_ps(mean));
            squares = _mm512_fmadd_ps(centered, centered, squares);
        }
        Moments { mean, variance: _mm512_reduce_add_ps(squares) / self.dim as f32 }
    }

    /// Applies the moments, then weight and bias from element `offset` on.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn scale(&self, x: *const u16, moments: Moments, offset: usize, output: *mut u16) {
        let mean = _mm512_set1_ps(moments.mean);
        let factor = _mm512_set1_ps(1.0 / (moments.variance + self.eps).sqrt());
        let (weight, bias) = (self.weight.as_ptr().wrapping_add(offset), self.bias.as_ptr().wrapping_add(offset));
        for first in (0..self.dim).step_by(LANES) {
            let mask = simd::first_lanes(self.dim - first);
            // SAFETY: the group has `dim` elements; weight and bias cover it from `offset` on.
            unsafe {
                let centered = _mm512_sub_ps(simd::load_bf16_masked(x.add(first), mask), mean);
                let mut result = _mm512_mul_ps(centered, factor);
                if self.kind == Kind::Rms {
                    result = simd::round_bf16(result);
                }
                result = _mm512_mul_ps(result, _mm512_maskz_loadu_ps(mask, weight.add(first)));
                if !self.bias.is_empty() {
                    result = _mm512_add_ps(result, _mm512_maskz_loadu_ps(mask, bias.add(first)));
                }
                simd::store_bf16_masked(output.add(first), mask, result);
            }
        }
    }
}

#[cfg(test)]
mod tests;
