//! Any function of one bf16 number as a table of its 65,536 results. A result then depends on its argument only, whereas vector loops
//! compute their remainder differently, and the batch decides where they end.

use crate::element::Element;
use crate::pool::{Executor, Source, Target};
use crate::row;

/// Number of bf16 bit patterns.
pub(crate) const NUM_PATTERNS: usize = 1 << 16;

/// Elements from which a parallel section pays off.
const PART_NUMBERS: usize = 1 << 14;

/// A function, and what its arguments are.
#[derive(Clone, Copy)]
pub(crate) struct Table {
    /// `NUM_PATTERNS` results, indexed by the argument's bits.
    pub(crate) results: Source<Element>,
    /// Whether a row is a gate, the function's arguments, and as many numbers that the results are multiplied with.
    pub(crate) is_gate: bool,
}

impl Table {
    /// Elements of the result of a row of `width` elements, which must be even for a gate.
    pub(crate) fn output_columns(&self, width: usize) -> usize {
        if self.is_gate { width / 2 } else { width }
    }

    /// Applies the table to rows of `width` elements; rows of x are `stride` elements apart, those of output contiguous.
    ///
    /// # Safety
    /// The pointers must be valid for `num_rows` rows and must not overlap.
    pub(crate) unsafe fn apply(
        &self,
        executor: &impl Executor,
        (x, stride): (Source<Element>, usize),
        output: Target<Element>,
        width: usize,
        num_rows: usize,
    ) {
        executor.for_ranges(num_rows, PART_NUMBERS / width.max(1), |range| {
            for row in range {
                // SAFETY: guaranteed by the caller.
                unsafe { self.apply_row(x.at(row * stride), output.at(row * self.output_columns(width)), width) };
            }
        });
    }

    /// Applies the table to one row.
    ///
    /// # Safety
    /// As for `apply`.
    pub(crate) unsafe fn apply_row(&self, x: *const Element, output: *mut Element, width: usize) {
        let dim = self.output_columns(width);
        // SAFETY: guaranteed by the caller.
        unsafe {
            let arguments = std::slice::from_raw_parts(x, dim);
            let results = std::slice::from_raw_parts_mut(output, dim);
            for (result, &argument) in results.iter_mut().zip(arguments) {
                *result = *self.results.at(usize::from(argument.bits()));
            }
            if self.is_gate {
                row::multiply(x.add(dim), output, dim);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, spawning_pool};

    fn applied(
        results: &[Element],
        is_gate: bool,
        x: &[Element],
        stride: usize,
        width: usize,
        num_rows: usize,
    ) -> Vec<Element> {
        let table = Table { results: Source::new(results.as_ptr()), is_gate };
        let mut output = vec![Element::default(); num_rows * table.output_columns(width)];
        let (rows, target) = ((Source::new(x.as_ptr()), stride), Target::new(output.as_mut_ptr()));
        // SAFETY: sizes as made.
        unsafe { table.apply(&spawning_pool(3), rows, target, width, num_rows) };
        output
    }

    #[test]
    fn every_number_is_looked_up_alone() {
        let results: Vec<Element> =
            (0..NUM_PATTERNS).map(|pattern| Element::from_bits((pattern as u16).wrapping_mul(31) ^ 5)).collect();
        for (num_rows, dim, stride) in [(1, 1, 1), (3, 33, 40), (40, 700, 1400), (0, 8, 8)] {
            let x = Random::new(dim as u64).elements(num_rows * stride + 1);
            let rows = x.chunks(stride).take(num_rows);
            let expected: Vec<Element> =
                rows.flat_map(|row| &row[..dim]).map(|&x| results[usize::from(x.bits())]).collect();
            assert_eq!(applied(&results, false, &x, stride, dim, num_rows), expected);
        }
    }

    #[test]
    fn results_of_a_gate_are_multiplied() {
        let halves: Vec<Element> = (0..NUM_PATTERNS)
            .map(|pattern| Element::from_f32(Element::to_f32(Element::from_bits(pattern as u16)) / 2.0))
            .collect();
        for (num_rows, dim, stride) in [(1, 1, 2), (3, 33, 70), (40, 700, 1400)] {
            let x = Random::new(dim as u64).elements(num_rows * stride);
            let gated = |row: &[Element]| -> Vec<Element> {
                let halved = row[..dim].iter().map(|&x| Element::to_f32(halves[usize::from(x.bits())]));
                halved.zip(&row[dim..]).map(|(gate, &up)| Element::from_f32(gate * Element::to_f32(up))).collect()
            };
            let expected: Vec<Element> = x.chunks(stride).flat_map(gated).collect();
            assert_eq!(applied(&halves, true, &x, stride, 2 * dim, num_rows), expected);
        }
    }
}
