//! The packed form of a weight: panels of output columns, each [input group][column][GROUP], so that one vector load brings a group of
//! input features for 16 columns. Columns are padded to whole panels and input features to whole steps of AMX, with zeros.

use super::bias_of;
use super::tile::{Ahead, PANEL, Panel};
use crate::cpu::Amx;
use crate::element::{Element, GROUP};
use crate::memory::{Arena, Piece};
use crate::pool::{Executor, Source, Target};
use crate::product::STEP;
use crate::simd::{I32, LANES};
use std::io;
use std::ops::Range;

/// Input features to whose multiple a panel is padded: a row of a tile register of AMX.
pub(super) const PADDING: usize = 32;

/// The shape of a weight `[out_features, in_features]`, and its bias `[out_features]` or null.
#[derive(Clone, Copy)]
pub(crate) struct Weight {
    pub(crate) bias: *const Element,
    pub(crate) out_features: usize,
    pub(crate) in_features: usize,
    /// Whether the first half of the rows is a gate for the second half; their panels alternate.
    pub(crate) gated: bool,
}

/// A weight in panels.
pub(crate) struct PackedLinear {
    panels: Piece,
    /// Bias by column of the panels, padded; empty without a bias.
    bias: Vec<f32>,
    num_panels: usize,
    out_features: usize,
    in_features: usize,
    gated: bool,
    #[cfg_attr(
        not(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32")))),
        expect(dead_code, reason = "no tiles in this build")
    )]
    amx: Option<Amx>,
}

// SAFETY: only `fill` writes the panels, and its callers guarantee that nothing reads them meanwhile.
unsafe impl Send for PackedLinear {}
// SAFETY: as above.
unsafe impl Sync for PackedLinear {}

/// Consecutive rows of a weight, at most LANES, that are consecutive columns of one panel.
struct Group {
    rows: Range<usize>,
    panel: usize,
    column: usize,
}

impl PackedLinear {
    /// Allocates a packed weight of zeros for `fill`; the layer is computed with AMX if it is given. PERF: a weight is packed from pieces
    /// that are still in the cache, and is never in memory together with its packed form.
    ///
    /// # Safety
    /// The bias must be null or point to `out_features` elements.
    pub(crate) unsafe fn new(arena: &Arena, weight: Weight, amx: Option<Amx>) -> io::Result<PackedLinear> {
        let Weight { bias: address, out_features, in_features, gated } = weight;
        let columns = if gated { out_features / 2 } else { out_features };
        let num_panels = columns.div_ceil(PANEL) * if gated { 2 } else { 1 };
        let panels = arena.allocate(num_panels * panel_numbers(in_features) * size_of::<Element>())?;
        let mut packed = PackedLinear { panels, bias: Vec::new(), num_panels, out_features, in_features, gated, amx };
        // SAFETY: the caller vouches for the bias.
        let numbers = unsafe { bias_of(address, out_features) };
        if !numbers.is_empty() {
            packed.bias.resize(num_panels * PANEL, 0.0);
            for index in 0..packed.groups_before(out_features) {
                let Group { rows, panel, column } = packed.group(index);
                packed.bias[panel * PANEL + column..][..rows.len()].copy_from_slice(&numbers[rows]);
            }
        }
        Ok(packed)
    }

    /// Fills `num_rows` rows of the weight from row `first` on.
    ///
    /// # Safety
    /// `source` must hold these rows, the weight must have them, and nothing may use the layer meanwhile.
    pub(crate) unsafe fn fill(&self, executor: &impl Executor, source: Source<Element>, first: usize, num_rows: usize) {
        if num_rows == 0 {
            return;
        }
        let filled = first..first + num_rows;
        let (begin, end) = (self.groups_before(first + 1) - 1, self.groups_before(filled.end));
        let panel_numbers = panel_numbers(self.in_features);
        let destination = Target::new(self.panels.as_ptr().cast::<Element>());
        executor.for_each(end - begin, |index| {
            let group = self.group(begin + index);
            let rows = group.rows.start.max(filled.start)..group.rows.end.min(filled.end);
            let column = group.column + rows.start - group.rows.start;
            let from = source.at((rows.start - first) * self.in_features);
            let target = destination.at(group.panel * panel_numbers + column * GROUP);
            // SAFETY: the rows lie in the source, the columns in a panel of the piece; groups are disjoint.
            unsafe { interleave(from, target, rows.len(), self.in_features) };
        });
    }

    /// Number of groups that start before this row.
    fn groups_before(&self, row: usize) -> usize {
        let columns = self.output_columns().max(1);
        row / columns * columns.div_ceil(LANES) + (row % columns).div_ceil(LANES)
    }

    fn group(&self, index: usize) -> Group {
        let columns = self.output_columns();
        let groups = columns.div_ceil(LANES);
        let (half, column) = (index / groups, index % groups * LANES);
        let end = columns.min(column + LANES);
        Group {
            rows: half * columns + column..half * columns + end,
            panel: if self.gated { column / PANEL * 2 + half } else { column / PANEL },
            column: column % PANEL,
        }
    }

    /// Copies rows of the weight: an embedding whose table is also the head. Not for gated weights.
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
        debug_assert!(!self.gated);
        let panels = Source::new(self.panels.as_ptr().cast::<Element>().cast_const());
        executor.for_each(num_rows, |index| {
            // SAFETY: the caller vouches for `rows` and `output`; a row below `out_features` is a column of a panel.
            unsafe {
                let row = rows.at(index).read() as usize;
                let source = panels.at(row / PANEL * panel_numbers(self.in_features) + row % PANEL * GROUP);
                let target = output.at(index * self.in_features);
                for feature in 0..self.in_features {
                    target.add(feature).write(source.add(offset(feature)).read());
                }
            }
        });
    }

    pub(crate) fn out_features(&self) -> usize {
        self.out_features
    }

    pub(crate) fn in_features(&self) -> usize {
        self.in_features
    }

    /// Columns of the output: half of the weight's rows when gated.
    pub(crate) fn output_columns(&self) -> usize {
        if self.gated { self.out_features / 2 } else { self.out_features }
    }

    pub(crate) fn is_gated(&self) -> bool {
        self.gated
    }

    #[cfg(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32"))))]
    pub(super) fn amx(&self) -> Option<Amx> {
        self.amx
    }

    pub(super) fn num_panels(&self) -> usize {
        self.num_panels
    }

    pub(super) fn panel(&self, index: usize, ahead: Ahead) -> Panel {
        let numbers = panel_numbers(self.in_features);
        // SAFETY: the panel lies inside the piece, whose bias (when there is one) covers it too.
        let (weights, bias) = unsafe {
            let bias = if self.bias.is_empty() { std::ptr::null() } else { self.bias.as_ptr().add(index * PANEL) };
            (self.panels.as_ptr().cast::<Element>().cast_const().add(index * numbers), bias)
        };
        Panel { weights, bias, ahead, bytes: numbers * size_of::<Element>() }
    }
}

/// Elements of a panel.
fn panel_numbers(in_features: usize) -> usize {
    in_features.next_multiple_of(PADDING) * PANEL
}

/// Offset of a column's input feature from its first one.
fn offset(feature: usize) -> usize {
    feature / GROUP * GROUP * PANEL + feature % GROUP
}

/// Writes at most LANES rows as columns of a panel, from `target` on.
///
/// # Safety
/// `source` must hold the rows, `target` room for their columns.
unsafe fn interleave(source: *const Element, target: *mut Element, num_rows: usize, in_features: usize) {
    /// Features that are transposed at once: a vector of each row.
    const SQUARE: usize = LANES * STEP;
    // SAFETY: the caller vouches for all rows and columns; reads and writes stay within them.
    unsafe {
        let wide = if num_rows == LANES { in_features / SQUARE * SQUARE } else { 0 };
        for first in (0..wide).step_by(SQUARE) {
            let rows = std::array::from_fn(|row| I32::load(source.add(row * in_features + first).cast()));
            for (step, columns) in I32::transpose(rows).into_iter().enumerate() {
                let target = target.add(offset(first + step * STEP));
                if STEP == GROUP {
                    columns.store(target.cast());
                } else {
                    // Two features that are not a group: their columns are apart.
                    columns.narrow().store(target.cast());
                    columns.shift_right(16).narrow().store(target.add(PANEL).cast());
                }
            }
        }
        for row in 0..num_rows {
            for feature in wide..in_features {
                target.add(row * GROUP + offset(feature)).write(source.add(row * in_features + feature).read());
            }
        }
    }
}
