//! Any function of one bf16 number as a table of its 65,536 results. A result then depends on its argument only, whereas vector loops
//! compute their remainder differently, and the batch decides where they end.

use crate::pool::{Executor, Source, Target};

/// Number of bf16 bit patterns.
pub(crate) const NUM_PATTERNS: usize = 1 << 16;

/// Elements from which a parallel section pays off.
const PART_NUMBERS: usize = 1 << 14;

/// `output[row][i] = table[x[row][i]]` for rows of `dim` elements; rows of x are `stride` elements apart, those of output contiguous.
///
/// # Safety
/// The table must have `NUM_PATTERNS` results, indexed by the argument's bits. The pointers must be valid for `num_rows` rows and must
/// not overlap.
pub(crate) unsafe fn look_up(
    executor: &impl Executor,
    table: Source<u16>,
    (x, stride): (Source<u16>, usize),
    output: Target<u16>,
    dim: usize,
    num_rows: usize,
) {
    executor.for_ranges(num_rows, PART_NUMBERS / dim.max(1), |range| {
        for row in range {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let row_of_x = std::slice::from_raw_parts(x.at(row * stride), dim);
                let row_of_output = std::slice::from_raw_parts_mut(output.at(row * dim), dim);
                for (result, &argument) in row_of_output.iter_mut().zip(row_of_x) {
                    *result = *table.at(usize::from(argument));
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, spawning_pool};

    #[test]
    fn every_number_is_looked_up_alone() {
        let table: Vec<u16> = (0..NUM_PATTERNS).map(|pattern| (pattern as u16).wrapping_mul(31) ^ 5).collect();
        for (num_rows, dim, stride) in [(1, 1, 1), (3, 33, 40), (40, 700, 1400), (0, 8, 8)] {
            let x = Random::new(dim as u64).bf16s(num_rows * stride + 1);
            let mut output = vec![0; num_rows * dim + 1];
            let (rows, target) = ((Source::new(x.as_ptr()), stride), Target::new(output.as_mut_ptr()));
            // SAFETY: sizes as made.
            unsafe { look_up(&spawning_pool(3), Source::new(table.as_ptr()), rows, target, dim, num_rows) };
            let expected =
                x.chunks(stride).take(num_rows).flat_map(|row| &row[..dim]).map(|&number| table[number as usize]);
            assert!(output[..num_rows * dim].iter().copied().eq(expected));
            assert_eq!(output[num_rows * dim], 0);
        }
    }
}
