//! Linear layers with quantized weights and inputs of 16 or 8 bits: w = scale · (code - offset) + min, with a scale, and in some formats a
//! min or a zero point in the place of the offset, for each group of consecutive input features of an output. Codes stay as small as in the checkpoint. Codes that are 8-bit floats
//! are multiplied with inputs as they are, in `float`; the rest of this room is for integers.
//!
//! INVARIANT: every output element is one chain over ascending units of 32 input features: the unit's exact integer product, times
//! the product of both scales, is added in one rounding; then, with mins, min times the sum of the inputs. So a row's bits do not depend
//! on the number of rows or threads.

mod activation;
#[cfg(target_feature = "avx512bf16")]
mod amx;
mod float;
mod format;
mod pack;
mod tile;

pub(crate) use format::{Format, Number, SUPER_GROUP};
pub(crate) use pack::{QuantizedLinear, QuantizedRows, Segment};

use super::epilogue::Outcome;
use super::tile::Input as Factors;
use super::{Output, Rows, for_parts, for_parts_init};
#[cfg(target_feature = "avx512bf16")]
use crate::cpu::Amx;
use crate::pool::{Executor, Target};
use crate::product::with_factors;
use activation::{Layout, Local};
use pack::Panel;
use std::ops::Range;
use tile::{Input, TILE_ROWS};

/// Input features that share a scale of the input. The smallest group of a weight is half of them.
pub(super) const UNIT: usize = 32;
/// Output columns per panel.
const PANEL: usize = 32;

/// The precision of inputs. PERF: 16 bits take twice the multiplications of 8, which memory hides in small batches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InputBits {
    Eight,
    Sixteen,
}

/// Rows from which AMX is faster than vectors. PERF: the last tile costs as much as 16 rows, even if it has fewer (Emerald Rapids).
#[cfg(target_feature = "avx512bf16")]
const AMX_ROWS: usize = 48;

impl QuantizedLinear {
    /// AMX, if it computes this number of rows.
    #[cfg(target_feature = "avx512bf16")]
    fn amx_for(&self, num_rows: usize) -> Option<Amx> {
        self.amx().filter(|_| num_rows >= AMX_ROWS)
    }

    fn layout(&self, num_rows: usize) -> Layout {
        Layout::of(self.in_features(), self.input_bits(), num_rows)
    }

    /// Bytes that `apply` needs for this number of rows.
    pub(crate) fn scratch_bytes(&self, num_rows: usize) -> usize {
        let layout = self.layout(num_rows);
        if self.is_float() || Local::has_room_for(layout) { 0 } else { layout.bytes() }
    }

    /// Like `PackedLinear::apply`, in two phases, or in one if rows are few.
    ///
    /// # Safety
    /// As for `PackedLinear::apply`; `scratch` must have `scratch_bytes`.
    pub(crate) unsafe fn apply(&self, executor: &impl Executor, rows: Rows, output: Output, scratch: Target<u8>) {
        if rows.num_rows == 0 {
            return;
        }
        if self.is_float() {
            // SAFETY: guaranteed by the caller.
            return unsafe { self.apply_floats(executor, rows, output) };
        }
        let layout = self.layout(rows.num_rows);
        if Local::has_room_for(layout) {
            // SAFETY: the caller vouches for the rows, which nothing changes before the last part is done.
            let quantize = || unsafe { Local::quantize(rows, self.in_features(), layout) };
            for_parts_init(executor, self.num_units(), rows.num_rows, quantize, |local, units, range| {
                // SAFETY: the caller vouches for the output; units are disjoint in columns.
                unsafe { self.apply_units(local.address(), layout, units, range, rows.num_rows, output) };
            });
            return;
        }
        let scratch = Target::new(scratch.at(scratch.at(0).align_offset(activation::ALIGNMENT)));
        // SAFETY: the caller vouches for the rows and the scratch.
        unsafe { activation::quantize(executor, rows, self.in_features(), layout, scratch) };
        for_parts(executor, self.num_units(), rows.num_rows, |units, range| {
            // SAFETY: as above.
            unsafe { self.apply_units(scratch.at(0), layout, units, range, rows.num_rows, output) };
        });
    }

    /// Computes panels, or pairs of a gate panel and an up panel, for some of the rows that are quantized at `address`.
    ///
    /// # Safety
    /// The rows must be there, and the output be writable.
    unsafe fn apply_units(
        &self,
        address: *const u8,
        layout: Layout,
        units: Range<usize>,
        range: Range<usize>,
        all_rows: usize,
        output: Output,
    ) {
        // Parts are whole groups of rows.
        let whole = |row: usize| row.next_multiple_of(layout.group_rows).min(all_rows);
        let (first, num_rows) = (whole(range.start), whole(range.end) - whole(range.start));
        let input = Input { address, layout, group: first / layout.group_rows };
        #[cfg(target_feature = "avx512bf16")]
        if let Some(amx) = self.amx_for(all_rows) {
            let mut tiles = amx::Tiles::configure(amx, num_rows);
            for unit in units {
                let (panel, up) = self.unit(unit);
                // SAFETY: guaranteed by the caller.
                unsafe { tiles.apply(input, panel, up, self.outcome(panel, first, output)) };
            }
            return;
        }
        for unit in units {
            let (panel, up) = self.unit(unit);
            let outcome = self.outcome(panel, first, output);
            for tile in (0..num_rows).step_by(TILE_ROWS) {
                let height = TILE_ROWS.min(num_rows - tile);
                // SAFETY: guaranteed by the caller.
                unsafe { tile::apply(height, input.below(tile), panel, up, outcome.below(tile)) };
            }
        }
    }

    /// Like `apply`, with weights in floating point.
    ///
    /// # Safety
    /// As for `apply`, without scratch.
    unsafe fn apply_floats(&self, executor: &impl Executor, rows: Rows, output: Output) {
        let in_features = self.in_features();
        for_parts(executor, self.num_units(), rows.num_rows, |units, range| {
            let first = rows.address.at(range.start * rows.stride);
            // SAFETY: the caller vouches for the rows and the output; units are disjoint in columns.
            unsafe {
                with_factors(first, rows.stride, range.len(), in_features, |rows, stride| {
                    let mut tiles = float::Tiles::new(Factors { rows, stride, in_features }, range.len());
                    for unit in units {
                        let (panel, up) = self.unit(unit);
                        tiles.apply(panel, up, self.outcome(panel, range.start, output));
                    }
                });
            }
        });
    }

    /// The place for a panel's results, from row `first` on.
    fn outcome(&self, panel: &Panel, first: usize, output: Output) -> Outcome {
        output.outcome(self.output_columns(), first, panel.first_column, panel.num_columns)
    }
}

#[cfg(test)]
mod tests;
