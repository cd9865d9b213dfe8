//! Low-rank adapters of linear layers (LoRA): y += B·(scale · A·x), in a batch whose rows have different adapters or none.
//!
//! INVARIANT: an element of A·x is the sum of the lanes of one chain over ascending input features, and an element of the product with
//! B one chain over ascending ranks. Both are float32; the sum with y is rounded once. So a row's bits depend on its own input and
//! adapter only, and columns that are computed on several ranks or threads have the bits of one.

#[cfg(test)]
mod tests;

use crate::element::Element;
use crate::linear::Rows;
use crate::pool::{Executor, Target};
use crate::simd::{F32, LANES, SUMS};
use std::array::from_fn;
use std::ops::Range;

/// Rows and vectors (or ranks) whose sums are in registers at a time.
const TILE_VECTORS: usize = if SUMS >= 16 { 4 } else { 2 };
const TILE_ROWS: usize = if SUMS >= 16 { 4 } else { SUMS / TILE_VECTORS };
/// Most rows of a run: each is one thread's.
const MAX_RUN_ROWS: usize = 32;
/// Output columns of a part of the work.
const PART_COLUMNS: usize = 512;

/// What an adapter adds to adjacent output columns of a layer, as to the keys of a layer that computes queries, keys and values.
pub(crate) struct Part {
    /// A, [rank][in_features].
    down: Vec<Element>,
    /// B transposed, [rank][columns].
    up: Vec<Element>,
    rank: usize,
    columns: Range<usize>,
    scale: f32,
}

impl Part {
    /// `down`: A, [rank, in_features]; `up`: B transposed, [rank, columns], for the columns from `first_column` on. `None`: the sizes do
    /// not fit together.
    pub(crate) fn new(
        down: Vec<Element>,
        up: Vec<Element>,
        rank: usize,
        first_column: usize,
        scale: f32,
    ) -> Option<Part> {
        let columns = up.len().checked_div(rank)?;
        let end = first_column.checked_add(columns)?;
        let fits = up.len() == columns * rank && down.len().is_multiple_of(rank);
        fits.then_some(Part { down, up, rank, columns: first_column..end, scale })
    }

    fn in_features(&self) -> usize {
        self.down.len() / self.rank
    }
}

/// What an adapter adds to a layer: nothing, without parts.
#[derive(Default)]
pub(crate) struct LowRank {
    pub(crate) parts: Vec<Part>,
}

impl LowRank {
    /// Ranks of all parts together.
    fn rank(&self) -> usize {
        self.parts.iter().map(|part| part.rank).sum()
    }

    /// Whether every part belongs to a layer of these sizes.
    fn fits(&self, in_features: usize, out_columns: usize) -> bool {
        self.parts.iter().all(|part| part.in_features() == in_features && part.columns.end <= out_columns)
    }
}

/// An adapter: what it adds to each site, which is a layer that adapters can change.
pub(crate) struct Adapter {
    pub(crate) sites: Vec<LowRank>,
}

impl Adapter {
    /// Whether it was made for sites of these input features and output columns. `sites`: their numbers, and the sizes.
    pub(crate) fn fits(&self, sites: &[(usize, [usize; 2])]) -> bool {
        let fits = |&(site, [in_features, out_columns]): &(usize, [usize; 2])| {
            self.sites.get(site).is_some_and(|low_rank| low_rank.fits(in_features, out_columns))
        };
        sites.iter().all(fits)
    }
}

/// Adjacent rows with one adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Run {
    first: usize,
    num_rows: usize,
    /// In the list of the step's adapters.
    adapter: usize,
}

/// The runs of rows with these adapters; `None`: the row has none.
pub(crate) fn runs(adapters: impl Iterator<Item = Option<usize>>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (row, adapter) in adapters.enumerate() {
        let Some(adapter) = adapter else { continue };
        match runs.last_mut() {
            Some(run) if run.adapter == adapter && run.first + run.num_rows == row && run.num_rows < MAX_RUN_ROWS => {
                run.num_rows += 1;
            }
            _ => runs.push(Run { first: row, num_rows: 1, adapter }),
        }
    }
    runs
}

/// Most ranks of a row at one site.
pub(crate) fn max_rank(adapters: &[&Adapter]) -> usize {
    let ranks = adapters.iter().flat_map(|adapter| adapter.sites.iter().map(LowRank::rank));
    ranks.max().unwrap_or(0)
}

/// The rows of a step that have adapters.
#[derive(Clone, Copy)]
pub(crate) struct Adapted<'a> {
    pub(crate) adapters: &'a [&'a Adapter],
    pub(crate) runs: &'a [Run],
    /// [rows, max_rank]: scratch.
    pub(crate) inner: Target<f32>,
    /// As of `max_rank`.
    pub(crate) max_rank: usize,
}

impl Adapted<'_> {
    /// Phases that `apply` takes of a section.
    pub(crate) const NUM_PHASES: usize = 2;

    /// Adds to y, contiguous rows of `out_columns`, what the rows' adapters add at this site.
    ///
    /// # Safety
    /// The adapters must fit the site. `rows` must be readable, y and `inner` writable for every row of the runs, and not overlap.
    pub(crate) unsafe fn apply(
        &self,
        executor: &impl Executor,
        site: usize,
        rows: Rows,
        y: Target<Element>,
        out_columns: usize,
    ) {
        let Adapted { adapters, runs, inner, max_rank } = *self;
        let num_parts = adapters.iter().map(|adapter| adapter.sites[site].parts.len()).max().unwrap_or(0);
        executor.for_each(runs.len() * num_parts, |index| {
            let (run, part) = (runs[index / num_parts], index % num_parts);
            let parts = &adapters[run.adapter].sites[site].parts;
            if let Some(this) = parts.get(part) {
                let before: usize = parts[..part].iter().map(|part| part.rank).sum();
                for_tiles(run, |first, is_whole| {
                    let (x, target) = (rows.address.at(first * rows.stride), inner.at(first * max_rank + before));
                    // SAFETY: guaranteed by the caller; a row's ranks of a part are one thread's.
                    unsafe {
                        if is_whole {
                            shrink::<TILE_ROWS>(this, x, rows.stride, target, max_rank);
                        } else {
                            shrink::<1>(this, x, rows.stride, target, max_rank);
                        }
                    }
                });
            }
        });
        let num_chunks = out_columns.div_ceil(PART_COLUMNS);
        executor.for_each(runs.len() * num_chunks, |index| {
            let (run, start) = (runs[index / num_chunks], index % num_chunks * PART_COLUMNS);
            let mut before = 0;
            for part in &adapters[run.adapter].sites[site].parts {
                let columns = part.columns.start.max(start)..part.columns.end.min(start + PART_COLUMNS);
                for_tiles(run, |first, is_whole| {
                    let (source, target) = (inner.at(first * max_rank + before), y.at(first * out_columns));
                    // SAFETY: guaranteed by the caller; a row's columns are one thread's.
                    unsafe {
                        if is_whole {
                            expand::<TILE_ROWS>(part, source, max_rank, columns.clone(), target, out_columns);
                        } else {
                            expand::<1>(part, source, max_rank, columns.clone(), target, out_columns);
                        }
                    }
                });
                before += part.rank;
            }
        });
    }
}

/// Calls `work` with the first row of each tile of a run, and whether it has `TILE_ROWS` rows; otherwise it has one.
fn for_tiles(run: Run, mut work: impl FnMut(usize, bool)) {
    let end = run.first + run.num_rows;
    let mut first = run.first;
    while first < end {
        let is_whole = end - first >= TILE_ROWS;
        work(first, is_whole);
        first += if is_whole { TILE_ROWS } else { 1 };
    }
}

/// inner[row][k] = scale · A[k]·x[row] for R rows.
///
/// # Safety
/// R rows must be readable at x and writable at `inner`.
#[inline(always)]
unsafe fn shrink<const R: usize>(part: &Part, x: *const Element, stride: usize, inner: *mut f32, inner_stride: usize) {
    let mut first = 0;
    while first < part.rank {
        let is_whole = part.rank - first >= TILE_VECTORS;
        // SAFETY: guaranteed by the caller; the part has these ranks.
        unsafe {
            let target = inner.add(first);
            if is_whole {
                dots::<R, TILE_VECTORS>(part, first, x, stride, target, inner_stride);
            } else {
                dots::<R, 1>(part, first, x, stride, target, inner_stride);
            }
        }
        first += if is_whole { TILE_VECTORS } else { 1 };
    }
}

/// As `shrink`, for K ranks from `rank` on.
#[inline(always)]
unsafe fn dots<const R: usize, const K: usize>(
    part: &Part,
    rank: usize,
    x: *const Element,
    stride: usize,
    inner: *mut f32,
    inner_stride: usize,
) {
    let in_features = part.in_features();
    let down = part.down.as_ptr().wrapping_add(rank * in_features);
    let mut sums = [[F32::splat(0.0); K]; R];
    let whole = in_features / LANES * LANES;
    // SAFETY: guaranteed by the caller; the part has K ranks from here on.
    unsafe {
        for first in (0..whole).step_by(LANES) {
            let factors: [F32; R] = from_fn(|row| Element::load(x.add(row * stride + first)));
            let weights: [F32; K] = from_fn(|place| Element::load(down.add(place * in_features + first)));
            multiply_add(&mut sums, factors, weights);
        }
        if whole < in_features {
            let load = |address: *const Element| Element::load_first(address.add(whole), in_features - whole);
            let factors: [F32; R] = from_fn(|row| load(x.add(row * stride)));
            let weights: [F32; K] = from_fn(|place| load(down.add(place * in_features)));
            multiply_add(&mut sums, factors, weights);
        }
        for (row, sums) in sums.iter().enumerate() {
            for (place, sum) in sums.iter().enumerate() {
                inner.add(row * inner_stride + place).write(sum.reduce_sum() * part.scale);
            }
        }
    }
}

/// y[row][columns] += the product of inner[row] with B, for R rows. `columns`: some of the part's.
///
/// # Safety
/// R rows must be readable at `inner` and writable at y.
#[inline(always)]
unsafe fn expand<const R: usize>(
    part: &Part,
    inner: *const f32,
    inner_stride: usize,
    columns: Range<usize>,
    y: *mut Element,
    stride: usize,
) {
    let mut first = columns.start;
    while first < columns.end {
        let count = columns.end - first;
        let is_whole = count >= TILE_VECTORS * LANES;
        // SAFETY: guaranteed by the caller; these columns are the part's.
        unsafe {
            let (up, target) = (part.up.as_ptr().add(first - part.columns.start), y.add(first));
            if is_whole {
                sums_of_ranks::<R, TILE_VECTORS>(part, up, inner, inner_stride, count, target, stride);
            } else {
                sums_of_ranks::<R, 1>(part, up, inner, inner_stride, count, target, stride);
            }
        }
        first += if is_whole { TILE_VECTORS * LANES } else { LANES };
    }
}

/// As `expand`, for V vectors of columns, of which `count` columns exist.
#[inline(always)]
unsafe fn sums_of_ranks<const R: usize, const V: usize>(
    part: &Part,
    up: *const Element,
    inner: *const f32,
    inner_stride: usize,
    count: usize,
    y: *mut Element,
    stride: usize,
) {
    let num_columns = part.columns.len();
    let mut sums = [[F32::splat(0.0); V]; R];
    // SAFETY: guaranteed by the caller.
    unsafe {
        for rank in 0..part.rank {
            let factors: [F32; R] = from_fn(|row| F32::splat(inner.add(row * inner_stride + rank).read()));
            let weights: [F32; V] = from_fn(|vector| {
                let first = vector * LANES;
                Element::load_first(up.add(rank * num_columns + first), count - first)
            });
            multiply_add(&mut sums, factors, weights);
        }
        for (row, sums) in sums.iter().enumerate() {
            for (vector, &sum) in sums.iter().enumerate() {
                let (first, target) = (vector * LANES, y.add(row * stride + vector * LANES));
                let before = Element::load_first(target, count - first);
                Element::store_first(before + sum, target, count - first);
            }
        }
    }
}

/// sums[row][place] += factors[row] · weights[place]
#[inline(always)]
fn multiply_add<const R: usize, const K: usize>(sums: &mut [[F32; K]; R], factors: [F32; R], weights: [F32; K]) {
    for row in 0..R {
        for place in 0..K {
            sums[row][place] = weights[place].mul_add(factors[row], sums[row][place]);
        }
    }
}
