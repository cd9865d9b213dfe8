//! silu(gate) · up, rounded like two separate bf16 operators.

use crate::pool::{Executor, Source, Target};
use crate::simd::{self, LANES};
use std::arch::x86_64::*;

const PART_NUMBERS: usize = 1 << 13;

/// Computes silu(gate) · up: rows [gate, up] of `2 · dim` elements to rows of `dim`.
///
/// # Safety
/// The pointers must be valid for `num_rows` such rows and must not overlap. The CPU must be `supported()`.
pub unsafe fn silu_multiply(
    executor: &impl Executor,
    gate_up: Source<u16>,
    output: Target<u16>,
    dim: usize,
    num_rows: usize,
) {
    executor.for_ranges(num_rows, PART_NUMBERS / dim.max(1), |range| {
        for row in range {
            // SAFETY: guaranteed by the caller.
            unsafe { multiply_row(gate_up.at(row * 2 * dim), output.at(row * dim), dim) };
        }
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn multiply_row(gate_up: *const u16, output: *mut u16, dim: usize) {
    for first in (0..dim).step_by(LANES) {
        let mask = simd::first_lanes(dim - first);
        // SAFETY: the row has `2 · dim` elements, the output `dim`.
        unsafe {
            let gate = simd::silu(simd::load_bf16_masked(gate_up.add(first), mask));
            let up = simd::load_bf16_masked(gate_up.add(dim + first), mask);
            simd::store_bf16_masked(output.add(first), mask, _mm512_mul_ps(simd::round_bf16(gate), up));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, assert_close, spawning_pool, to_f32};

    #[test]
    fn products_are_right_for_all_edge_sizes() {
        if !crate::supported() {
            return;
        }
        for (num_rows, dim) in [(1, 1), (2, 15), (40, 1536), (3, 33)] {
            let x = Random::new(dim as u64).bf16s(num_rows * 2 * dim);
            let mut y = vec![0; num_rows * dim];
            let (source, target) = (Source::new(x.as_ptr()), Target::new(y.as_mut_ptr()));
            // SAFETY: sizes as made.
            unsafe { silu_multiply(&spawning_pool(2), source, target, dim, num_rows) };
            for (row, result) in x.chunks(2 * dim).zip(y.chunks(dim)) {
                for index in 0..dim {
                    let (gate, up) = (to_f32(row[index]), to_f32(row[dim + index]));
                    assert_close(result[index], gate / (1.0 + (-gate).exp()) * up, 0.01, "product");
                }
            }
        }
    }
}
