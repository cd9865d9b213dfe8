//! Linear layers: y = x·Wᵀ (+ bias) with float32 sums, the weight packed once into panels of output columns: dense, or quantized.
//! Fused epilogues: addition to a residual, and silu(gate)·up for a gate and an up projection packed together.
//!
//! INVARIANT: every output element of a dense layer is one chain over ascending input features, of `tdpbf16ps` where the layer has AMX and
//! of `product::multiply_add` where it has not, for every number of rows. So a row's bits do not depend on the number of rows or threads.

#[cfg(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32"))))]
mod amx;
mod epilogue;
mod pack;
mod quantized;
mod tile;
mod wide;

pub(crate) use pack::{PackedLinear, Weight};
pub(crate) use quantized::{Format, InputBits, Number, QuantizedLinear, QuantizedRows, SUPER_GROUP, Segment};
pub(crate) use tile::PANEL;
pub(crate) use wide::WideLinear;

#[cfg(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32"))))]
use crate::cpu::Amx;
use crate::element::Element;
use crate::pool::{Executor, Source, Target};
use crate::product::with_factors;
use epilogue::Outcome;
use std::ops::Range;
use tile::{Ahead, Input, TILE_ROWS};

/// Largest number of rows per part of the work.
const PART_ROWS: usize = 128;

/// Input: `num_rows` rows of `in_features` elements, `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) address: Source<Element>,
    pub(crate) stride: usize,
    pub(crate) num_rows: usize,
}

/// The output's rows, `stride` elements apart, and how results are combined with them.
#[derive(Clone, Copy)]
pub(crate) struct Output {
    pub(crate) address: Target<Element>,
    pub(crate) stride: usize,
    pub(crate) combine: Combine,
}

/// What becomes of a linear layer's product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Combine {
    /// y = x·Wᵀ
    Store,
    /// y += x·Wᵀ, with the product rounded before the addition, like two separate operators
    Add,
    /// Gated layers only: a row's gates, then its ups
    Apart,
}

impl Output {
    /// y = x·Wᵀ
    pub(crate) fn store(address: Target<Element>, stride: usize) -> Output {
        Output { address, stride, combine: Combine::Store }
    }

    /// The place for `num_columns` columns of a layer with `columns` columns, from row `row` and column `column` on.
    fn outcome(self, columns: usize, row: usize, column: usize, num_columns: usize) -> Outcome {
        let Output { address, stride, combine } = self;
        let apart = if combine == Combine::Apart { columns } else { 0 };
        Outcome { target: address.at(row * stride + column), stride, num_columns, add: combine == Combine::Add, apart }
    }
}

/// A layer's weight, packed.
pub(crate) enum Linear {
    Dense(PackedLinear),
    Quantized(QuantizedLinear),
}

impl Linear {
    /// Applies the layer. A gated layer's output has `out_features / 2` columns, or all of them apart, and is never added.
    ///
    /// # Safety
    /// `rows` must be readable, `output` writable for every row, and the two must not overlap; `scratch` must have `scratch_bytes`.
    pub(crate) unsafe fn apply(&self, executor: &impl Executor, rows: Rows, output: Output, scratch: Target<u8>) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self {
                Linear::Dense(linear) => linear.apply(executor, rows, output),
                Linear::Quantized(linear) => linear.apply(executor, rows, output, scratch),
            }
        }
    }

    /// Bytes that `apply` needs for this number of rows.
    pub(crate) fn scratch_bytes(&self, num_rows: usize) -> usize {
        match self {
            Linear::Dense(_) => 0,
            Linear::Quantized(linear) => linear.scratch_bytes(num_rows),
        }
    }

    /// Copies rows of the weight as bf16: an embedding whose table is also the head. Not for gated weights.
    ///
    /// # Safety
    /// `rows` must point to `num_rows` row numbers below `out_features`, `output` to room for as many rows.
    pub(crate) unsafe fn copy_rows(
        &self,
        executor: &impl Executor,
        rows: Source<i64>,
        num_rows: usize,
        output: Target<Element>,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self {
                Linear::Dense(linear) => linear.copy_rows(executor, rows, num_rows, output),
                Linear::Quantized(linear) => linear.copy_rows(executor, rows, num_rows, output),
            }
        }
    }

    pub(crate) fn out_features(&self) -> usize {
        match self {
            Linear::Dense(linear) => linear.out_features(),
            Linear::Quantized(linear) => linear.out_features(),
        }
    }

    pub(crate) fn in_features(&self) -> usize {
        match self {
            Linear::Dense(linear) => linear.in_features(),
            Linear::Quantized(linear) => linear.in_features(),
        }
    }

    pub(crate) fn is_gated(&self) -> bool {
        match self {
            Linear::Dense(linear) => linear.is_gated(),
            Linear::Quantized(linear) => linear.is_gated(),
        }
    }

    /// Columns of the output: half of the weight's rows when gated.
    pub(crate) fn output_columns(&self) -> usize {
        if self.is_gated() { self.out_features() / 2 } else { self.out_features() }
    }
}

/// Calls `work` for ranges of units of columns and of rows that cover all.
fn for_parts(
    executor: &impl Executor,
    num_units: usize,
    num_rows: usize,
    work: impl Fn(Range<usize>, Range<usize>) + Sync,
) {
    for_parts_init(executor, num_units, num_rows, || (), |(), units, range| work(units, range));
}

/// Like `for_parts`, with a state that `init` returns on each thread; see `Executor::for_each_init`.
fn for_parts_init<S>(
    executor: &impl Executor,
    num_units: usize,
    num_rows: usize,
    init: impl Fn() -> S + Sync,
    work: impl Fn(&S, Range<usize>, Range<usize>) + Sync,
) {
    let num_row_parts = num_rows.div_ceil(PART_ROWS);
    let units_per_part = (num_units * num_row_parts / (executor.num_threads() * 4)).clamp(1, num_units);
    let num_unit_parts = num_units.div_ceil(units_per_part);
    executor.for_each_init(num_unit_parts * num_row_parts, init, |state, part| {
        let (unit_part, row_part) = (part / num_row_parts, part % num_row_parts);
        let (first_row, end_row) = (num_rows * row_part / num_row_parts, num_rows * (row_part + 1) / num_row_parts);
        let first_unit = unit_part * units_per_part;
        work(state, first_unit..num_units.min(first_unit + units_per_part), first_row..end_row);
    });
}

/// A bias as float32; empty if it is null.
///
/// # Safety
/// The bias must be null or point to `count` elements.
unsafe fn bias_of(bias: *const Element, count: usize) -> Vec<f32> {
    if bias.is_null() {
        return Vec::new();
    }
    // SAFETY: the caller vouches for the elements.
    (0..count).map(|index| unsafe { bias.add(index).read() }.to_f32()).collect()
}

impl PackedLinear {
    /// Like `Linear::apply`, without scratch.
    ///
    /// # Safety
    /// As for `Linear::apply`.
    pub(crate) unsafe fn apply(&self, executor: &impl Executor, rows: Rows, output: Output) {
        if rows.num_rows == 0 {
            return;
        }
        let num_units = self.num_panels() / if self.is_gated() { 2 } else { 1 };
        for_parts(executor, num_units, rows.num_rows, |units, range| {
            // SAFETY: the caller vouches for rows and output; units and ranges are disjoint in columns or rows.
            unsafe {
                #[cfg(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32"))))]
                if let Some(amx) = self.amx() {
                    return self.apply_units_amx(amx, units, rows, range, output);
                }
                let first = rows.address.at(range.start * rows.stride);
                with_factors(first, rows.stride, range.len(), self.in_features(), |rows, stride| {
                    let input = Input { rows, stride, in_features: self.in_features() };
                    for unit in units.clone() {
                        self.apply_unit(unit, input, range.clone(), output, unit == units.start);
                    }
                });
            }
        });
    }

    /// The place for a unit's results, from row `first` on.
    fn outcome(&self, unit: usize, first: usize, output: Output) -> Outcome {
        let (columns, first_column) = (self.output_columns(), unit * PANEL);
        output.outcome(columns, first, first_column, PANEL.min(columns - first_column))
    }

    #[cfg(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32"))))]
    /// Computes panels (or pairs of a gate panel and an up panel) for some rows with AMX. The last tile repeats rows of the tile before
    /// to be as high, because configuring the registers for another height takes as long as some steps.
    ///
    /// # Safety
    /// As for `apply`.
    unsafe fn apply_units_amx(&self, amx: Amx, units: Range<usize>, rows: Rows, range: Range<usize>, output: Output) {
        let num_tiles = range.len().div_ceil(amx::TILE_ROWS);
        let height = range.len().div_ceil(num_tiles);
        let shape = amx::Shape { stride: rows.stride, in_features: self.in_features() };
        let mut tiles = amx::Tiles::configure(amx, height);
        let first_unit = units.start;
        for unit in units {
            let ahead = |tile, panels| Ahead::plan(tile, num_tiles, panels, unit == first_unit);
            for tile in 0..num_tiles {
                let next = range.start + height * tile;
                let first = next.min(range.end - height);
                let (input, outcome) = (rows.address.at(first * rows.stride), self.outcome(unit, next, output));
                // SAFETY: the panels exist; input has `height` rows, and the target those from `next` on.
                unsafe {
                    if self.is_gated() {
                        let panels = [2 * unit, 2 * unit + 1].map(|panel| self.panel(panel, ahead(tile, 2)));
                        tiles.apply_gated(input, shape, panels, next - first, outcome);
                    } else {
                        let panel = self.panel(unit, ahead(tile, 1));
                        tiles.apply(input, shape, panel, next - first, outcome);
                    }
                }
            }
        }
    }

    /// Computes one panel (or gate panel and up panel) for the rows of a range, in tiles of equal height. `is_first`: of a part.
    ///
    /// # Safety
    /// `input` must be the range's rows; the rest as for `apply`.
    unsafe fn apply_unit(&self, unit: usize, input: Input, range: Range<usize>, output: Output, is_first: bool) {
        let num_rows = range.len();
        let num_tiles = num_rows.div_ceil(TILE_ROWS);
        let panel = |index: usize, tile: usize, panels: usize| {
            self.panel(index, Ahead::plan(tile, num_tiles, panels, is_first))
        };
        for tile in 0..num_tiles {
            let (first, end) = (num_rows * tile / num_tiles, num_rows * (tile + 1) / num_tiles);
            let input = input.below(first);
            let outcome = self.outcome(unit, range.start + first, output);
            // SAFETY: the panels exist; input and target have `end - first` rows.
            unsafe {
                if self.is_gated() {
                    let panels = [panel(2 * unit, tile, 2), panel(2 * unit + 1, tile, 2)];
                    tile::apply_gated(end - first, input, panels, outcome);
                } else {
                    tile::apply(end - first, input, panel(unit, tile, 1), outcome);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
