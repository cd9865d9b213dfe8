//! Linear layers whose results are float32: routers, which would choose other experts if their logits were rounded to elements.
//!
//! INVARIANT: a result is the sum of 16 chains, one per lane, over ascending input features. So it does not depend on the number of rows
//! or threads.

use super::{Rows, for_parts};
use crate::element::Element;
use crate::pool::{Executor, Target};
use crate::simd::{F32, LANES, with_constant};
use std::array::from_fn;

/// Rows and columns of a tile. PERF: as many chains of additions run at the same time, and their sums fit the registers of AVX2.
const ROWS: usize = 2;
const COLUMNS: usize = 4;

/// A weight [out_features, in_features].
pub(crate) struct WideLinear {
    weight: Vec<Element>,
    out_features: usize,
    in_features: usize,
}

impl WideLinear {
    /// The error names the sizes if they do not fit together.
    pub(crate) fn new(weight: Vec<Element>, out_features: usize, in_features: usize) -> Result<WideLinear, String> {
        if out_features == 0 || in_features == 0 || Some(weight.len()) != out_features.checked_mul(in_features) {
            return Err(format!("a weight of {} elements cannot be [{out_features}, {in_features}]", weight.len()));
        }
        Ok(WideLinear { weight, out_features, in_features })
    }

    pub(crate) fn out_features(&self) -> usize {
        self.out_features
    }

    pub(crate) fn in_features(&self) -> usize {
        self.in_features
    }

    /// output [rows, out_features] = x·Wᵀ
    ///
    /// # Safety
    /// The rows must be readable, and the output have room for their results.
    pub(crate) unsafe fn apply(&self, executor: &impl Executor, rows: Rows, output: Target<f32>) {
        if rows.num_rows == 0 {
            return;
        }
        for_parts(executor, self.out_features.div_ceil(COLUMNS), rows.num_rows, |units, range| {
            for first_column in units.map(|unit| unit * COLUMNS) {
                for first_row in range.clone().step_by(ROWS) {
                    let count = ROWS.min(range.end - first_row);
                    // SAFETY: the caller vouches for rows and output; parts are disjoint in columns or rows.
                    unsafe { with_constant!(count, [1; 2], tile(self, rows, first_row, first_column, output)) };
                }
            }
        });
    }
}

/// Computes `R` rows by at most `COLUMNS` columns.
///
/// # Safety
/// As for `WideLinear::apply`.
unsafe fn tile<const R: usize>(
    linear: &WideLinear,
    rows: Rows,
    first_row: usize,
    first_column: usize,
    output: Target<f32>,
) {
    let &WideLinear { out_features, in_features, .. } = linear;
    let x: [_; R] = from_fn(|row| rows.address.at((first_row + row) * rows.stride));
    // The last column is repeated in place of those that are missing.
    let weights: [_; COLUMNS] = from_fn(|column| {
        let column = (first_column + column).min(out_features - 1);
        linear.weight.as_ptr().wrapping_add(column * in_features)
    });
    let mut sums = [[F32::splat(0.0); COLUMNS]; R];
    for first in (0..in_features).step_by(LANES) {
        let count = in_features - first;
        // SAFETY: the caller vouches for the rows; the weight has the columns.
        unsafe {
            let x: [F32; R] = from_fn(|row| Element::load_first(x[row].wrapping_add(first), count));
            for (column, weight) in weights.iter().enumerate() {
                let weight = Element::load_first(weight.wrapping_add(first), count);
                for row in 0..R {
                    sums[row][column] = weight.mul_add(x[row], sums[row][column]);
                }
            }
        }
    }
    for (row, sums) in sums.into_iter().enumerate() {
        for (column, sum) in (first_column..out_features).zip(sums) {
            // SAFETY: the caller vouches for the output.
            unsafe { output.at((first_row + row) * out_features + column).write(sum.reduce_sum()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{Pool, Source};
    use crate::testing::{Random, spawning_pool};

    fn apply(linear: &WideLinear, pool: &Pool, x: &[Element], num_rows: usize) -> Vec<f32> {
        let mut output = vec![f32::NAN; num_rows * linear.out_features];
        let rows = Rows { address: Source::new(x.as_ptr()), stride: linear.in_features, num_rows };
        // SAFETY: the vectors have the sizes said.
        unsafe { linear.apply(pool, rows, Target::new(output.as_mut_ptr())) };
        output
    }

    #[test]
    fn results_are_not_rounded_and_rows_are_independent() {
        for (out_features, in_features) in [(1, 1), (5, 40), (12, 64), (30, 333)] {
            let mut random = Random::new(out_features as u64);
            let weight = random.elements(out_features * in_features);
            let linear = WideLinear::new(weight.clone(), out_features, in_features).unwrap();
            let x = random.elements(131 * in_features);
            let together = apply(&linear, &spawning_pool(3), &x, 131);
            for (row, results) in together.chunks(out_features).enumerate() {
                let x = &x[row * in_features..][..in_features];
                assert_eq!(results, apply(&linear, &Pool::single(), x, 1));
                for (weight, result) in weight.chunks(in_features).zip(results) {
                    let exact: f64 =
                        x.iter().zip(weight).map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum();
                    assert!((exact - f64::from(*result)).abs() < 1e-5, "{result} is not {exact}");
                }
            }
        }
        assert!(
            apply(&WideLinear::new(vec![Element::default(); 6], 2, 3).unwrap(), &Pool::single(), &[], 0).is_empty()
        );
    }

    #[test]
    fn a_weight_of_another_size_is_refused() {
        for (out_features, in_features) in [(2, 2), (0, 0), (usize::MAX, 3)] {
            assert!(WideLinear::new(vec![Element::default(); 3], out_features, in_features).is_err());
        }
    }
}
