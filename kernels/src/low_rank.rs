//! Low-rank adapters of linear layers (LoRA): y += B·(scale · A·x), in a batch whose rows have different adapters or none.
//!
//! INVARIANT: an element of A·x is the sum of the lanes of one chain of `product::multiply_add` over ascending input features, and an
//! element of the product with B one chain in float32 over ascending ranks; the sum with y is rounded once. So a row's bits depend on its
//! own input and adapter only, and columns that are computed on several ranks or threads have the bits of one.

mod pack;
#[cfg(test)]
mod tests;

pub(crate) use pack::{Adapter, PlainPart};

use crate::element::Element;
use crate::linear::Rows;
use crate::pool::{Executor, Pool, Target};
use crate::product::{self, Factor, Operand, WIDTH, with_factors};
use crate::simd::{F32, LANES, SUMS, with_constant};
use pack::{CHUNK, GROUP_RANKS, PANEL, Site, TILE_VECTORS};
use std::array::from_fn;
use std::ops::Range;

/// Rows whose sums with some vectors are in registers at a time.
const TILE_ROWS: usize = if SUMS >= 16 { 4 } else { SUMS / TILE_VECTORS };
/// Most rows of a run.
pub(crate) const MAX_RUN_ROWS: usize = 32;

/// Adjacent rows with one adapter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Run {
    pub(crate) first: usize,
    pub(crate) num_rows: usize,
    /// Index in the list of the step's adapters.
    pub(crate) adapter: usize,
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

/// Most ranks of a row at one site, padded to whole groups.
pub(crate) fn max_rank(adapters: &[&Adapter]) -> usize {
    max_rank_of(adapters.iter().flat_map(|adapter| &adapter.sites))
}

fn max_rank_of<'a>(sites: impl Iterator<Item = &'a Site>) -> usize {
    sites.map(Site::num_groups).max().unwrap_or(0) * GROUP_RANKS
}

/// The rows of a step that have adapters.
#[derive(Clone, Copy)]
pub(crate) struct Adapted<'a> {
    pub(crate) adapters: &'a [&'a Adapter],
    pub(crate) runs: &'a [Run],
    /// [rows, max_rank]: scratch.
    pub(crate) inner: Target<f32>,
    /// Floats of a row of `inner`: the result of the function `max_rank`.
    pub(crate) max_rank: usize,
}

/// A layer's rows, and the result of its product for them: contiguous rows of `out_columns`.
#[derive(Clone, Copy)]
pub(crate) struct Product {
    pub(crate) rows: Rows,
    pub(crate) y: Target<Element>,
    pub(crate) out_columns: usize,
}

/// Adds to a product what the rows' adapters add at this site, as a section of its own.
///
/// # Safety
/// The adapters must fit the site. The product's rows must be readable, and its y writable for every row of the runs.
pub(crate) unsafe fn apply(pool: &Pool, adapters: &[&Adapter], runs: &[Run], site: usize, product: Product) {
    let max_rank = max_rank_of(adapters.iter().map(|adapter| &adapter.sites[site]));
    if max_rank == 0 {
        return;
    }
    // A test must not find zeros where nothing was written: a stack uses its scratch again.
    let mut inner = vec![if cfg!(test) { f32::NAN } else { 0.0 }; product.rows.num_rows * max_rank];
    let adapted = Adapted { adapters, runs, inner: Target::new(inner.as_mut_ptr()), max_rank };
    // SAFETY: guaranteed by the caller; `inner` has a place for every row.
    unsafe {
        if adapted.has_rows_for(pool.num_threads()) {
            pool.for_ranges(product.rows.num_rows, 1, |range| adapted.apply_to(range, site, product));
        } else {
            adapted.apply(pool, site, product);
        }
    }
}

impl Adapted<'_> {
    /// Phases that `apply` takes of a section.
    pub(crate) const NUM_PHASES: usize = 2;

    /// Whether any adapter changes this site.
    pub(crate) fn changes(&self, site: usize) -> bool {
        self.adapters.iter().any(|adapter| !adapter.sites[site].parts.is_empty())
    }

    /// The adapter of a row, in the list of the step's adapters.
    pub(crate) fn of_row(&self, row: usize) -> Option<usize> {
        let run = &self.runs[self.runs.partition_point(|run| run.first <= row).checked_sub(1)?];
        (row < run.first + run.num_rows).then_some(run.adapter)
    }

    /// Whether there is work for each of these threads where each row is one thread's (`apply_to`), without a barrier.
    pub(crate) fn has_rows_for(&self, num_threads: usize) -> bool {
        self.runs.iter().map(|run| run.num_rows.div_ceil(TILE_ROWS)).sum::<usize>() >= 2 * num_threads
    }

    /// Adds to a product what the rows' adapters add at this site. The threads share the work of each row.
    ///
    /// # Safety
    /// The adapters must fit the site. The product's rows must be readable, its y and `inner` writable for every row of the runs, and not
    /// overlap.
    pub(crate) unsafe fn apply(&self, executor: &impl Executor, site: usize, product: Product) {
        // SAFETY: guaranteed by the caller; a row's ranks of a group are one thread's, and so are its columns of a panel.
        self.for_units(executor, site, Site::num_groups, |adapter, site, groups, run| unsafe {
            self.shrink(adapter, site, groups, run, product);
        });
        // SAFETY: as above.
        self.for_units(executor, site, Site::num_panels, |adapter, site, panels, run| unsafe {
            self.expand(adapter, site, panels, run, product);
        });
    }

    /// Like `apply`, for some rows, on the calling thread.
    ///
    /// # Safety
    /// As for `apply`; no other thread may use these rows.
    pub(crate) unsafe fn apply_to(&self, range: Range<usize>, site: usize, product: Product) {
        for run in self.runs {
            let (first, end) = (run.first.max(range.start), (run.first + run.num_rows).min(range.end));
            if first >= end {
                continue;
            }
            // SAFETY: guaranteed by the caller.
            unsafe { self.apply_run(Run { first, num_rows: end - first, ..*run }, site, product) };
        }
    }

    /// Like `apply_to`, for a run of rows of the product, which need not be one of the step's runs.
    ///
    /// # Safety
    /// As for `apply_to`.
    pub(crate) unsafe fn apply_run(&self, run: Run, site: usize, product: Product) {
        let adapter = self.adapters[run.adapter];
        let site = &adapter.sites[site];
        if site.parts.is_empty() {
            return;
        }
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.shrink(adapter, site, 0..site.num_groups(), run, product);
            self.expand(adapter, site, 0..site.num_panels(), run, product);
        }
    }

    /// `inner` of a run's rows, for some groups of ranks.
    ///
    /// # Safety
    /// As for `apply`.
    unsafe fn shrink(&self, adapter: &Adapter, site: &Site, groups: Range<usize>, run: Run, product: Product) {
        let Rows { address, stride, .. } = product.rows;
        // SAFETY: guaranteed by the caller.
        unsafe {
            with_factors(address.at(run.first * stride), stride, run.num_rows, site.in_features, |rows, stride| {
                for group in groups {
                    let down = adapter.down(site, group);
                    let scale = |rank| site.scales.get(group * GROUP_RANKS + rank).copied().unwrap_or(0.0);
                    let scales: [f32; GROUP_RANKS] = from_fn(scale);
                    for_tiles(run.num_rows, |first, height| {
                        let x = Input { rows: rows.add(first * stride), stride, in_features: site.in_features };
                        let target = self.inner.at((run.first + first) * self.max_rank + group * GROUP_RANKS);
                        with_constant!(height, [1, 2, 3; 4], shrink(down, scales, x, target, self.max_rank));
                    });
                }
            });
        }
    }

    /// Adds the columns of some panels of a run's rows.
    ///
    /// # Safety
    /// As for `apply`; `inner` of these rows must be complete.
    unsafe fn expand(&self, adapter: &Adapter, site: &Site, panels: Range<usize>, run: Run, product: Product) {
        for (part, panel) in panels.filter_map(|panel| site.panel(panel)) {
            let first_column = part.columns.start + panel * PANEL;
            let panel = Panel {
                up: adapter.up(part, panel),
                num_ranks: part.ranks.len(),
                num_columns: PANEL.min(part.columns.end - first_column),
            };
            for_tiles(run.num_rows, |first, height| {
                let row = run.first + first;
                let source = self.inner.at(row * self.max_rank + part.ranks.start);
                let target = product.y.at(row * product.out_columns + first_column);
                // SAFETY: guaranteed by the caller.
                unsafe {
                    with_constant!(
                        height,
                        [1, 2, 3; 4],
                        expand(panel, source, self.max_rank, target, product.out_columns)
                    );
                }
            });
        }
    }

    /// Calls `work` for each run and for ranges of units of its adapter's site. `count`: number of units of a site. A
    /// thread's units are adjacent in memory.
    fn for_units(
        &self,
        executor: &impl Executor,
        site: usize,
        count: impl Fn(&Site) -> usize + Sync,
        work: impl Fn(&Adapter, &Site, Range<usize>, Run) + Sync,
    ) {
        let Adapted { adapters, runs, .. } = *self;
        let most = adapters.iter().map(|adapter| count(&adapter.sites[site])).max().unwrap_or(0);
        executor.for_ranges(runs.len() * most, 1, |range| {
            let mut next = range.start;
            while next < range.end {
                let (run, first) = (runs[next / most], next % most);
                let adapter = adapters[run.adapter];
                let site = &adapter.sites[site];
                let end = count(site).min(first + range.end - next);
                if first < end {
                    work(adapter, site, first..end, run);
                }
                next += most - first;
            }
        });
    }
}

/// Calls `work` with the first row and the height of each tile of some rows, which are as equal as can be.
fn for_tiles(num_rows: usize, mut work: impl FnMut(usize, usize)) {
    let num_tiles = num_rows.div_ceil(TILE_ROWS);
    for tile in 0..num_tiles {
        let [begin, end] = [tile, tile + 1].map(|tile| num_rows * tile / num_tiles);
        work(begin, end - begin);
    }
}

/// Rows of `in_features` factors, `stride` factors apart.
#[derive(Clone, Copy)]
struct Input {
    rows: *const Factor,
    stride: usize,
    in_features: usize,
}

/// inner[row][rank] = scale · A[rank]·x[row] for R rows and a group of ranks.
///
/// # Safety
/// R rows must be readable at x and writable at `inner`, and `down` be a group for these features.
unsafe fn shrink<const R: usize>(
    down: *const Element,
    scales: [f32; GROUP_RANKS],
    x: Input,
    inner: *mut f32,
    inner_stride: usize,
) {
    let mut sums = [[F32::splat(0.0); GROUP_RANKS]; R];
    let whole = x.in_features / CHUNK;
    // SAFETY: guaranteed by the caller; the last chunk of A is whole, and x's is copied.
    unsafe {
        for chunk in 0..whole {
            let rows = from_fn(|row| x.rows.add(row * x.stride + chunk * CHUNK));
            add_chunk(&mut sums, rows, down.add(chunk * GROUP_RANKS * CHUNK));
        }
        let rest = x.in_features % CHUNK;
        if rest > 0 {
            let mut last = [[Factor::default(); CHUNK]; R];
            for (row, last) in last.iter_mut().enumerate() {
                let features = std::slice::from_raw_parts(x.rows.add(row * x.stride + whole * CHUNK), rest);
                last[..rest].copy_from_slice(features);
            }
            add_chunk(&mut sums, from_fn(|row| last[row].as_ptr()), down.add(whole * GROUP_RANKS * CHUNK));
        }
        for (row, sums) in sums.iter().enumerate() {
            for (rank, sum) in sums.iter().enumerate() {
                inner.add(row * inner_stride + rank).write(sum.reduce_sum() * scales[rank]);
            }
        }
    }
}

/// Adds the products of a chunk of R rows with that of a group of ranks.
///
/// # Safety
/// The chunks must be readable.
#[inline(always)]
unsafe fn add_chunk<const R: usize>(
    sums: &mut [[F32; GROUP_RANKS]; R],
    rows: [*const Factor; R],
    down: *const Element,
) {
    for first in (0..CHUNK).step_by(LANES * WIDTH) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let weights: [Operand; GROUP_RANKS] = from_fn(|rank| product::consecutive(down.add(rank * CHUNK + first)));
            product::add(sums, weights, |row| product::consecutive_factors(rows[row].add(first)));
        }
    }
}

/// Columns of B.
#[derive(Clone, Copy)]
struct Panel {
    up: *const Element,
    num_ranks: usize,
    num_columns: usize,
}

/// y[row][columns of a panel] += the product of inner[row] with B, for R rows.
///
/// # Safety
/// R rows must be readable at `inner` and writable at y, and the panel have these ranks.
unsafe fn expand<const R: usize>(panel: Panel, inner: *const f32, inner_stride: usize, y: *mut Element, stride: usize) {
    let Panel { up, num_ranks, num_columns } = panel;
    let mut sums = [[F32::splat(0.0); TILE_VECTORS]; R];
    // SAFETY: guaranteed by the caller; panels are padded.
    unsafe {
        for rank in 0..num_ranks {
            let weights: [F32; TILE_VECTORS] = from_fn(|vector| Element::load(up.add(rank * PANEL + vector * LANES)));
            for (row, sums) in sums.iter_mut().enumerate() {
                let factor = F32::splat(inner.add(row * inner_stride + rank).read());
                for (sum, weights) in sums.iter_mut().zip(weights) {
                    *sum = weights.mul_add(factor, *sum);
                }
            }
        }
        for (row, sums) in sums.iter().enumerate() {
            for (vector, &sum) in sums.iter().enumerate() {
                let (first, target) = (vector * LANES, y.add(row * stride + vector * LANES));
                if num_columns >= first + LANES {
                    Element::store(Element::load(target) + sum, target);
                } else if num_columns > first {
                    let count = num_columns - first;
                    Element::store_first(Element::load_first(target, count) + sum, target, count);
                }
            }
        }
    }
}
