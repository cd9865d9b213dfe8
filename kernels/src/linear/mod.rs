//! Linear layers: y = x·Wᵀ (+ bias) in bf16 with float32 sums, the weight packed once into panels of 48 output columns.
//! Fused epilogues: addition to a residual, and silu(gate)·up for a gate and an up projection packed together.
//!
//! INVARIANT: every output element is one chain of `vdpbf16ps` over ascending pairs of input features, in every code path, so a
//! row's bits do not depend on the number of rows or threads.

mod pack;
mod tile;

pub(crate) use pack::{PackedLinear, Weight};
pub(crate) use tile::PANEL;

use crate::pool::{Executor, Source, Target};
use tile::{Ahead, Outcome};

/// Rows per register tile: 8 rows of 3 vectors use 24 of the 32 vector registers.
const TILE_ROWS: usize = 8;
/// Largest number of rows per part of the work.
const PART_ROWS: usize = 128;

/// Input: `num_rows` rows of `in_features` bf16 elements, `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) address: Source<u16>,
    pub(crate) stride: usize,
    pub(crate) num_rows: usize,
}

/// The output, contiguous rows of bf16, and how results are combined with it.
#[derive(Clone, Copy)]
pub(crate) enum Output {
    /// y = x·Wᵀ
    Store(Target<u16>),
    /// y += x·Wᵀ, with the product rounded to bf16 before the addition, like two separate operators
    Add(Target<u16>),
}

impl Output {
    fn address(self) -> Target<u16> {
        match self {
            Output::Store(address) | Output::Add(address) => address,
        }
    }
}

impl PackedLinear {
    /// Applies the layer. A gated layer's output has `out_features / 2` columns and is always stored.
    ///
    /// # Safety
    /// `rows` must be readable, `output` writable for every row, and the two must not overlap. The CPU must be `supported()`.
    pub(crate) unsafe fn apply(&self, executor: &impl Executor, rows: Rows, output: Output) {
        if rows.num_rows == 0 {
            return;
        }
        let step = if self.is_gated() { 2 } else { 1 };
        let num_units = self.num_panels() / step;
        let num_row_parts = rows.num_rows.div_ceil(PART_ROWS);
        let units_per_part = (num_units * num_row_parts / (executor.num_threads() * 4)).clamp(1, num_units);
        let num_unit_parts = num_units.div_ceil(units_per_part);
        executor.for_each(num_unit_parts * num_row_parts, |part| {
            let (unit_part, row_part) = (part / num_row_parts, part % num_row_parts);
            let first_row = rows.num_rows * row_part / num_row_parts;
            let end_row = rows.num_rows * (row_part + 1) / num_row_parts;
            let last_unit = num_units.min((unit_part + 1) * units_per_part);
            for unit in unit_part * units_per_part..last_unit {
                // SAFETY: the caller vouches for rows and output; parts are disjoint in columns or rows.
                unsafe { self.apply_unit(unit, rows, first_row..end_row, output) };
            }
        });
    }

    /// Computes one panel (or gate panel and up panel) for some rows, in tiles of equal height.
    ///
    /// # Safety
    /// As for `apply`.
    unsafe fn apply_unit(&self, unit: usize, rows: Rows, range: std::ops::Range<usize>, output: Output) {
        let num_tiles = range.len().div_ceil(TILE_ROWS);
        let columns = self.output_columns();
        let first_column = unit * PANEL;
        for tile in 0..num_tiles {
            let first = range.start + range.len() * tile / num_tiles;
            let end = range.start + range.len() * (tile + 1) / num_tiles;
            let input = rows.address.at(first * rows.stride);
            let target = output.address().at(first * columns + first_column);
            let outcome = Outcome {
                target,
                stride: columns,
                num_columns: PANEL.min(columns - first_column),
                add: matches!(output, Output::Add(_)),
            };
            let shape = tile::Shape { stride: rows.stride, in_features: self.in_features() };
            // SAFETY: the panels exist; input and target have `end - first` rows.
            unsafe {
                if self.is_gated() {
                    let gate = self.panel(2 * unit, Ahead::plan(tile, num_tiles, 2));
                    let up = self.panel(2 * unit + 1, Ahead::plan(tile, num_tiles, 2));
                    tile::apply_gated(end - first, input, shape, [gate, up], outcome);
                } else {
                    let panel = self.panel(unit, Ahead::plan(tile, num_tiles, 1));
                    tile::apply(end - first, input, shape, panel, outcome);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
