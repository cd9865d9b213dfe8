//! Linear layers with quantized weights and inputs of 16 or 8 bits: w = scale · (code - offset) + min, with a scale, and in some formats a
//! min, for each group of consecutive input features of an output. Codes stay as small as in the checkpoint.
//!
//! INVARIANT: every output element is one chain over ascending units of 32 input features: the unit's exact integer product, times
//! the product of both scales, is added in one rounding; then, with mins, min times the sum of the inputs. So a row's bits do not depend
//! on the number of rows or threads.

mod activation;
mod pack;
mod tile;

pub(crate) use pack::{Format, Number, QuantizedLinear, QuantizedRows, SUPER_GROUP, Segment};

use super::epilogue::Outcome;
use super::{Output, Rows, for_units};
use crate::pool::{Executor, Target};
use activation::Layout;

/// Input features that share a scale of the input; they are also the smallest group of a weight but one half.
pub(super) const UNIT: usize = 32;
/// Rows per register tile: 6 rows of 2 vectors, as integers and as floats, use 24 of the 32 vector registers.
const TILE_ROWS: usize = 6;

/// The precision of inputs. PERF: 16 bits take twice the multiplications of 8, which memory hides in small batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputBits {
    Eight,
    Sixteen,
}

impl QuantizedLinear {
    fn layout(&self) -> Layout {
        Layout::of(self.in_features(), self.input_bits())
    }

    /// Bytes that `apply` needs for this number of rows.
    pub(crate) fn scratch_bytes(&self, num_rows: usize) -> usize {
        num_rows * self.layout().row_bytes()
    }

    /// Like `PackedLinear::apply`, in two phases.
    ///
    /// # Safety
    /// As there; `scratch` must have `scratch_bytes`.
    pub(crate) unsafe fn apply(&self, executor: &impl Executor, rows: Rows, output: Output, scratch: Target<u8>) {
        if rows.num_rows == 0 {
            return;
        }
        let layout = self.layout();
        // SAFETY: the caller vouches for the rows and the scratch.
        unsafe { activation::quantize(executor, rows, self.in_features(), layout, scratch) };
        let columns = self.output_columns();
        for_units(executor, self.num_units(), rows.num_rows, |unit, range| {
            let num_tiles = range.len().div_ceil(TILE_ROWS);
            for tile in 0..num_tiles {
                let first = range.start + range.len() * tile / num_tiles;
                let end = range.start + range.len() * (tile + 1) / num_tiles;
                let input = tile::Input { address: scratch.at(first * layout.row_bytes()).cast_const(), layout };
                let (panel, up) = self.unit(unit);
                let outcome = Outcome {
                    target: output.address().at(first * columns + panel.first_column),
                    stride: columns,
                    num_columns: panel.num_columns,
                    add: matches!(output, Output::Add(_)),
                };
                // SAFETY: the scratch holds the rows of the tile; the caller vouches for the output; units are disjoint in columns.
                unsafe {
                    match up {
                        Some(up) => tile::apply_gated(end - first, input, [panel, up], outcome),
                        None => tile::apply(end - first, input, panel, outcome),
                    }
                }
            }
        });
    }
}

#[cfg(test)]
mod tests;
