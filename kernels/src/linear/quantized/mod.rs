//! Linear layers with quantized weights and inputs of 16 or 8 bits: w = scale · (code - offset) + min, with a scale, and in some formats a
//! min, for each group of consecutive input features of an output. Codes stay as small as in the checkpoint.
//!
//! INVARIANT: every output element is one chain over ascending units of 32 input features: the unit's exact integer product, times
//! the product of both scales, is added in one rounding; then, with mins, min times the sum of the inputs. So a row's bits do not depend
//! on the number of rows or threads.

mod activation;
#[cfg(target_feature = "avx512bf16")]
mod amx;
mod pack;
mod tile;

pub(crate) use pack::{Format, Number, QuantizedLinear, QuantizedRows, SUPER_GROUP, Segment};

use super::epilogue::Outcome;
use super::{Output, Rows, for_parts};
use crate::cpu::Amx;
use crate::pool::{Executor, Target};
use activation::Layout;
use pack::Panel;
use tile::{Input, TILE_ROWS};

/// Input features that share a scale of the input; they are also the smallest group of a weight but one half.
pub(super) const UNIT: usize = 32;

/// The precision of inputs. PERF: 16 bits take twice the multiplications of 8, which memory hides in small batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputBits {
    Eight,
    Sixteen,
}

/// Rows from which AMX is faster than vectors, and rows of its tiles.
const AMX_ROWS: usize = 16;

impl QuantizedLinear {
    /// AMX, if it computes this number of rows.
    fn amx_for(&self, num_rows: usize) -> Option<Amx> {
        self.amx().filter(|_| cfg!(target_feature = "avx512bf16") && num_rows >= AMX_ROWS)
    }

    fn layout(&self, num_rows: usize) -> Layout {
        let group_rows = if self.amx_for(num_rows).is_some() { AMX_ROWS } else { 1 };
        Layout::of(self.in_features(), self.input_bits(), num_rows, group_rows)
    }

    /// Bytes that `apply` needs for this number of rows.
    pub(crate) fn scratch_bytes(&self, num_rows: usize) -> usize {
        self.layout(num_rows).bytes()
    }

    /// Like `PackedLinear::apply`, in two phases.
    ///
    /// # Safety
    /// As there; `scratch` must have `scratch_bytes`.
    pub(crate) unsafe fn apply(&self, executor: &impl Executor, rows: Rows, output: Output, scratch: Target<u8>) {
        if rows.num_rows == 0 {
            return;
        }
        let layout = self.layout(rows.num_rows);
        let scratch = Target::new(scratch.at(scratch.at(0).align_offset(activation::ALIGNMENT)));
        // SAFETY: the caller vouches for the rows and the scratch.
        unsafe { activation::quantize(executor, rows, self.in_features(), layout, scratch) };
        for_parts(executor, self.num_units(), rows.num_rows, |units, range| {
            #[cfg(target_feature = "avx512bf16")]
            if let Some(amx) = self.amx_for(rows.num_rows) {
                // Tiles are whole groups of rows.
                let whole = |row: usize| row.next_multiple_of(AMX_ROWS).min(rows.num_rows);
                let (first, num_rows) = (whole(range.start), whole(range.end) - whole(range.start));
                let input = Input { address: scratch.at(0).cast_const(), layout, first };
                let mut tiles = amx::Tiles::configure(amx, num_rows);
                for unit in units {
                    let (panel, up) = self.unit(unit);
                    // SAFETY: the scratch holds the rows; the caller vouches for the output; units are disjoint in columns.
                    unsafe { tiles.apply(input, panel, up, self.outcome(panel, first, output)) };
                }
                return;
            }
            let input = Input { address: scratch.at(0).cast_const(), layout, first: range.start };
            for unit in units {
                let (panel, up) = self.unit(unit);
                // SAFETY: as above.
                unsafe { apply_tiles(range.len(), input, panel, up, self.outcome(panel, range.start, output)) };
            }
        });
    }

    /// Where a panel's results go, from row `first` on.
    fn outcome(&self, panel: Panel, first: usize, output: Output) -> Outcome {
        Outcome {
            target: output.address().at(first * self.output_columns() + panel.first_column),
            stride: self.output_columns(),
            num_columns: panel.num_columns,
            add: matches!(output, Output::Add(_)),
        }
    }
}

/// Computes a unit for `num_rows` rows with vectors.
///
/// # Safety
/// As for `tile::apply`.
unsafe fn apply_tiles(num_rows: usize, input: Input, panel: Panel, up: Option<Panel>, outcome: Outcome) {
    let num_tiles = num_rows.div_ceil(TILE_ROWS);
    for tile in 0..num_tiles {
        let (first, end) = (num_rows * tile / num_tiles, num_rows * (tile + 1) / num_tiles);
        let (input, outcome) = (input.below(first), outcome.below(first));
        // SAFETY: guaranteed by the caller.
        unsafe {
            match up {
                Some(up) => tile::apply_gated(end - first, input, [panel, up], outcome),
                None => tile::apply(end - first, input, panel, outcome),
            }
        }
    }
}

#[cfg(test)]
mod tests;
