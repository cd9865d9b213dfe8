//! RMSNorm, alone and fused with the preceding addition to the residual. Statistics are in float32; the normalized row is rounded to
//! bf16 before the weight is applied, as in Llama.

use crate::pool::{Executor, Source, Target};
use crate::simd::{self, LANES};
use std::arch::x86_64::*;

/// Elements from which a parallel section pays off.
const PART_NUMBERS: usize = 1 << 14;

/// The norm of `num_rows` contiguous rows of `dim` elements.
#[derive(Clone, Copy)]
pub(crate) struct RmsNorm {
    pub(crate) weight: Source<u16>,
    pub(crate) eps: f32,
    pub(crate) dim: usize,
    pub(crate) num_rows: usize,
}

impl RmsNorm {
    /// output = norm(x).
    ///
    /// # Safety
    /// The pointers must be valid for `num_rows` rows, the weight for `dim` elements. The CPU must be `supported()`.
    pub(crate) unsafe fn apply(&self, executor: &impl Executor, x: Source<u16>, output: Target<u16>) {
        executor.for_ranges(self.num_rows, PART_NUMBERS / self.dim.max(1), |range| {
            for row in range {
                let (source, target) = (x.at(row * self.dim), output.at(row * self.dim));
                // SAFETY: guaranteed by the caller.
                unsafe { self.scale_row(source, self.sum_of_squares(source), target) };
            }
        });
    }

    /// residual += x; output = norm(residual).
    ///
    /// # Safety
    /// As for `apply`; x, residual and output must not overlap, but output may be x.
    pub(crate) unsafe fn add_apply(
        &self,
        executor: &impl Executor,
        x: Source<u16>,
        residual: Target<u16>,
        output: Target<u16>,
    ) {
        executor.for_ranges(self.num_rows, PART_NUMBERS / self.dim.max(1), |range| {
            for row in range {
                let (sum, target) = (residual.at(row * self.dim), output.at(row * self.dim));
                // SAFETY: guaranteed by the caller.
                unsafe { self.scale_row(sum, self.add_row(x.at(row * self.dim), sum), target) };
            }
        });
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn sum_of_squares(&self, row: *const u16) -> f32 {
        let mut sum = _mm512_setzero_ps();
        for first in (0..self.dim).step_by(LANES) {
            // SAFETY: the row has `dim` elements.
            let x = unsafe { simd::load_bf16_masked(row.add(first), simd::first_lanes(self.dim - first)) };
            sum = _mm512_fmadd_ps(x, x, sum);
        }
        _mm512_reduce_add_ps(sum)
    }

    /// Adds a row to another in place and returns the sum of squares.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn add_row(&self, x: *const u16, residual: *mut u16) -> f32 {
        let mut sum = _mm512_setzero_ps();
        for first in (0..self.dim).step_by(LANES) {
            let mask = simd::first_lanes(self.dim - first);
            // SAFETY: both rows have `dim` elements.
            unsafe {
                let target = residual.add(first);
                let added =
                    _mm512_add_ps(simd::load_bf16_masked(target, mask), simd::load_bf16_masked(x.add(first), mask));
                let rounded = simd::round_bf16(added);
                simd::store_bf16_masked(target, mask, rounded);
                sum = _mm512_fmadd_ps(rounded, rounded, sum);
            }
        }
        _mm512_reduce_add_ps(sum)
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn scale_row(&self, row: *const u16, sum_of_squares: f32, output: *mut u16) {
        let factor = _mm512_set1_ps(1.0 / (sum_of_squares / self.dim as f32 + self.eps).sqrt());
        for first in (0..self.dim).step_by(LANES) {
            let mask = simd::first_lanes(self.dim - first);
            // SAFETY: rows and weight have `dim` elements.
            unsafe {
                let normed = _mm512_mul_ps(simd::load_bf16_masked(row.add(first), mask), factor);
                let weight = simd::load_bf16_masked(self.weight.at(first), mask);
                simd::store_bf16_masked(output.add(first), mask, _mm512_mul_ps(simd::round_bf16(normed), weight));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, assert_close, spawning_pool, to_bf16, to_f32};

    const EPS: f32 = 1e-5;

    fn assert_normed(output: &[u16], x: &[u16], weight: &[u16], what: &str) {
        for (row, result) in x.chunks(weight.len()).zip(output.chunks(weight.len())) {
            let mean = row.iter().map(|&x| to_f32(x) * to_f32(x)).sum::<f32>() / row.len() as f32;
            let normed = row.iter().map(|&x| to_f32(to_bf16(to_f32(x) / (mean + EPS).sqrt())));
            for ((normed, &weight), &actual) in normed.zip(weight).zip(result) {
                assert_close(actual, normed * to_f32(weight), 0.01, what);
            }
        }
    }

    #[test]
    #[cfg_attr(not(avx512_bf16), ignore = "needs AVX-512 BF16")]
    fn norms_are_right_and_the_residual_is_updated() {
        for (num_rows, dim) in [(1, 1), (3, 17), (200, 576), (2, 64)] {
            let mut random = Random::new(dim as u64);
            let (x, residual, weight) = (random.bf16s(num_rows * dim), random.bf16s(num_rows * dim), random.bf16s(dim));
            let norm = RmsNorm { weight: Source::new(weight.as_ptr()), eps: EPS, dim, num_rows };
            let mut output = vec![0; num_rows * dim];
            let mut sum = residual.clone();
            // SAFETY: all have `num_rows` rows.
            unsafe {
                norm.apply(&spawning_pool(2), Source::new(x.as_ptr()), Target::new(output.as_mut_ptr()));
            }
            assert_normed(&output, &x, &weight, "norm");
            // SAFETY: as above.
            unsafe {
                let (x, output) = (Source::new(x.as_ptr()), Target::new(output.as_mut_ptr()));
                norm.add_apply(&spawning_pool(2), x, Target::new(sum.as_mut_ptr()), output);
            }
            for index in 0..sum.len() {
                assert_eq!(sum[index], to_bf16(to_f32(residual[index]) + to_f32(x[index])));
            }
            assert_normed(&output, &sum, &weight, "norm after addition");
        }
    }
}
