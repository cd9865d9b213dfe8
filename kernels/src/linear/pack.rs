//! The packed form of a weight: panels of 48 output columns, each [input pair][column][2], so that one vector load brings a pair of
//! input features for 16 columns. Missing columns, and the second half of an odd last pair, are zero.

use super::tile::{Ahead, Panel};
use crate::memory::{Arena, Piece};
use crate::pool::{Executor, Source, Target};
use crate::simd::LANES;
use std::io;

/// Output columns of one panel.
pub const PANEL: usize = 48;
/// Vectors across a panel.
pub(super) const VECTORS: usize = PANEL / LANES;
/// bf16 numbers of a panel for one input pair.
pub(super) const PAIR: usize = PANEL * 2;

/// A weight as a checkpoint has it: [out_features, in_features] contiguous, and a bias [out_features] or null.
#[derive(Clone, Copy)]
pub struct Weight {
    pub weight: *const u16,
    pub bias: *const u16,
    pub out_features: usize,
    pub in_features: usize,
}

/// A weight in panels.
pub struct PackedLinear {
    panels: Piece,
    /// Column after column of the panels, padded; empty without a bias.
    bias: Vec<f32>,
    num_panels: usize,
    out_features: usize,
    in_features: usize,
    gated: bool,
}

// SAFETY: the panels are written only while packing.
unsafe impl Send for PackedLinear {}
// SAFETY: as above.
unsafe impl Sync for PackedLinear {}

impl PackedLinear {
    /// Pack a weight. With `gated`, its first half of rows is a gate and the second half what it gates: the panels alternate.
    ///
    /// # Safety
    /// The addresses of `weight` must hold what it says.
    pub unsafe fn pack(
        executor: &impl Executor,
        arena: &Arena,
        weight: Weight,
        gated: bool,
    ) -> io::Result<PackedLinear> {
        let columns = if gated { weight.out_features / 2 } else { weight.out_features };
        let num_panels = columns.div_ceil(PANEL) * if gated { 2 } else { 1 };
        let pairs = weight.in_features.div_ceil(2);
        let panels = arena.allocate(num_panels * pairs * PAIR * 2)?;
        let destination = Target::new(panels.as_ptr().cast::<u16>());
        let numbers = Source::new(weight.weight);
        let source_rows = |panel: usize| {
            let (first, end) = if !gated {
                (panel * PANEL, columns)
            } else {
                (panel / 2 * PANEL + panel % 2 * columns, columns * (1 + panel % 2))
            };
            first..end.min(first + PANEL)
        };
        executor.for_each(num_panels, |panel| {
            for (column, row) in source_rows(panel).enumerate() {
                // SAFETY: source rows lie inside the weight; the column of this panel inside the piece.
                unsafe {
                    let target = destination.at(panel * pairs * PAIR + column * 2);
                    let source = numbers.at(row * weight.in_features);
                    for pair in 0..weight.in_features / 2 {
                        let both = source.add(pair * 2).cast::<u32>().read_unaligned();
                        target.add(pair * PAIR).cast::<u32>().write(both);
                    }
                    if weight.in_features % 2 == 1 {
                        target.add(weight.in_features / 2 * PAIR).write(source.add(weight.in_features - 1).read());
                    }
                }
            }
        });
        let mut bias = Vec::new();
        if !weight.bias.is_null() {
            bias.resize(num_panels * PANEL, 0.0);
            for panel in 0..num_panels {
                for (column, row) in source_rows(panel).enumerate() {
                    // SAFETY: the bias has `out_features` elements.
                    let number = unsafe { weight.bias.add(row).read() };
                    bias[panel * PANEL + column] = f32::from_bits(u32::from(number) << 16);
                }
            }
        }
        let Weight { out_features, in_features, .. } = weight;
        Ok(PackedLinear { panels, bias, num_panels, out_features, in_features, gated })
    }

    /// Write the weight's own rows: an embedding whose table is also the head. Not if gated.
    ///
    /// # Safety
    /// `rows` must hold `num_rows` numbers, each below `out_features`, and `output` room for as many rows.
    pub unsafe fn copy_rows(&self, executor: &impl Executor, rows: Source<i64>, num_rows: usize, output: Target<u16>) {
        debug_assert!(!self.gated);
        let pairs = self.in_features.div_ceil(2);
        let panels = Source::new(self.panels.as_ptr().cast::<u16>().cast_const());
        executor.for_each(num_rows, |index| {
            // SAFETY: the caller vouches for `rows` and `output`; a row below `out_features` is a column of a panel.
            unsafe {
                let row = rows.at(index).read() as usize;
                let source = panels.at(row / PANEL * pairs * PAIR + row % PANEL * 2);
                let target = output.at(index * self.in_features);
                for feature in 0..self.in_features {
                    target.add(feature).write(source.add(feature / 2 * PAIR + feature % 2).read());
                }
            }
        });
    }

    pub fn out_features(&self) -> usize {
        self.out_features
    }

    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// Columns of the result: half the weight's rows when gated.
    pub fn output_columns(&self) -> usize {
        if self.gated { self.out_features / 2 } else { self.out_features }
    }

    pub fn is_gated(&self) -> bool {
        self.gated
    }

    pub(super) fn num_panels(&self) -> usize {
        self.num_panels
    }

    pub(super) fn panel(&self, index: usize, ahead: Ahead) -> Panel {
        let numbers = self.in_features.div_ceil(2) * PAIR;
        // SAFETY: the panel lies inside the piece, whose bias (when there is one) covers it too.
        let (weights, bias) = unsafe {
            let bias = if self.bias.is_empty() { std::ptr::null() } else { self.bias.as_ptr().add(index * PANEL) };
            (self.panels.as_ptr().cast::<u16>().cast_const().add(index * numbers), bias)
        };
        Panel { weights, bias, ahead, bytes: numbers * 2 }
    }
}
