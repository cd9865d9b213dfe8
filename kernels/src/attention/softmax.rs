//! Online softmax: each row's running maximum, sum and weighted values, and their update by new scores or another segment.

use super::TILE;
use crate::element::Element;
use crate::product::{Factor, store_factors};
use crate::simd::{F32, LANES};

/// Lower than every score, but finite, so that differences of maxima are never NaN.
const NO_MAXIMUM: f32 = -1e30;

/// The states of some rows, in the caller's memory: maxima, sums (16 lanes each, added up at the end), then `value_dim` weighted
/// values per row.
#[derive(Clone, Copy)]
pub(crate) struct State {
    address: *mut f32,
    num_rows: usize,
    value_dim: usize,
}

/// Floats in the state of `num_rows` rows.
pub(crate) fn state_floats(num_rows: usize, value_dim: usize) -> usize {
    num_rows * (1 + LANES + value_dim)
}

impl State {
    /// `address` must point to `state_floats` floats.
    pub(crate) fn new(address: *mut f32, num_rows: usize, value_dim: usize) -> State {
        State { address, num_rows, value_dim }
    }

    pub(crate) fn maximum(self, row: usize) -> *mut f32 {
        self.address.wrapping_add(row)
    }

    pub(crate) fn sums(self, row: usize) -> *mut f32 {
        self.address.wrapping_add(self.num_rows + row * LANES)
    }

    pub(crate) fn values(self, row: usize) -> *mut f32 {
        self.address.wrapping_add(self.num_rows * (1 + LANES) + row * self.value_dim)
    }

    /// Resets the state to that of an empty context.
    ///
    /// # Safety
    /// No other reference to the memory may exist.
    pub(crate) unsafe fn clear(self) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            std::slice::from_raw_parts_mut(self.address, self.num_rows).fill(NO_MAXIMUM);
            std::slice::from_raw_parts_mut(self.sums(0), self.num_rows * (LANES + self.value_dim)).fill(0.0);
        }
    }

    /// Merges a later segment's state into the rows from `first_row` on, which see it.
    ///
    /// # Safety
    /// Both states must have the same rows.
    pub(crate) unsafe fn merge(self, later: State, first_row: usize) {
        for row in first_row..self.num_rows {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let (mine, other) = (*self.maximum(row), *later.maximum(row));
                let maximum = if mine > other { mine } else { other };
                let keep = F32::splat(mine - maximum).exp2();
                let take = F32::splat(other - maximum).exp2();
                self.maximum(row).write(maximum);
                let combine = |target: *mut f32, source: *const f32| {
                    F32::load(target).mul_add(keep, F32::load(source) * take).store(target);
                };
                combine(self.sums(row), later.sums(row));
                for dim in (0..self.value_dim).step_by(LANES) {
                    combine(self.values(row).add(dim), later.values(row).add(dim));
                }
            }
        }
    }

    /// Writes the row's result. A sink is a score without a value. The values are `scale` times those of the state.
    ///
    /// # Safety
    /// `output` must point to `value_dim` elements.
    pub(crate) unsafe fn finish(self, row: usize, sink: Option<f32>, scale: f32, output: *mut Element) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut sum = F32::load(self.sums(row)).reduce_sum();
            if let Some(sink) = sink {
                let power = F32::splat(sink * std::f32::consts::LOG2_E - *self.maximum(row));
                sum += power.exp2().to_array()[0];
            }
            // A row that sees nothing (an empty source) gets zeros.
            let factor = F32::splat(if sum == 0.0 { 0.0 } else { scale / sum });
            for dim in (0..self.value_dim).step_by(LANES) {
                Element::store(F32::load(self.values(row).add(dim)) * factor, output.add(dim));
            }
        }
    }

    /// Turns the scores of one tile into weights, and updates maxima and sums.
    ///
    /// # Safety
    /// The tile's rows must be rows of the state.
    #[inline(always)]
    pub(crate) unsafe fn weigh<const PLAIN: bool>(self, tile: &mut TileRows, scale: f32) {
        let mut highest = [0.0f32; LANES];
        for row in 0..tile.count {
            let first = if PLAIN { 0 } else { tile.first_visible[row] };
            highest[row] = hide(&mut tile.scores[row], first, tile.end_visible[row]);
        }
        // SAFETY: the caller vouches for the state's rows; the arrays have a lane for each row, and each row has TILE scores.
        unsafe {
            let maxima = self.maximum(tile.first);
            let before = F32::load_first(maxima, tile.count);
            // If the scores have NaN, `max` keeps the maximum before.
            let after = (F32::load(highest.as_ptr()) * F32::splat(scale)).max(before);
            after.store_first(maxima, tile.count);
            (before - after).exp2().store(tile.factors.as_mut_ptr());
            for row in 0..tile.count {
                let shift = F32::splat(-*self.maximum(tile.first + row));
                let added = weights_of(&tile.scores[row], &mut tile.weights[row], F32::splat(scale), shift);
                let sums = self.sums(tile.first + row);
                F32::load(sums).mul_add(F32::splat(tile.factors[row]), added).store(sums);
            }
        }
    }
}

/// Most rows of a group: their maxima are a vector.
pub(crate) const MAX_ROWS: usize = LANES;

/// A group of consecutive rows at one tile of the context.
#[repr(align(64))]
pub(crate) struct TileRows {
    /// First row of the unit, and the number of rows.
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// The tokens of the tile that each row sees. `first_visible` is ignored for plain attention.
    pub(crate) first_visible: [usize; MAX_ROWS],
    pub(crate) end_visible: [usize; MAX_ROWS],
    pub(crate) scores: [[f32; TILE]; MAX_ROWS],
    pub(crate) weights: [[Factor; TILE]; MAX_ROWS],
    /// Factor of each row's accumulated values.
    pub(crate) factors: [f32; LANES],
}

impl TileRows {
    pub(crate) fn new(first: usize, count: usize) -> TileRows {
        TileRows {
            first,
            count,
            first_visible: [0; MAX_ROWS],
            end_visible: [0; MAX_ROWS],
            scores: [[0.0; TILE]; MAX_ROWS],
            weights: [[Factor::default(); TILE]; MAX_ROWS],
            factors: [0.0; LANES],
        }
    }
}

const VECTORS: usize = TILE / LANES;

/// Masks invisible scores with -∞ and returns the highest visible score.
#[inline(always)]
fn hide(scores: &mut [f32; TILE], first_visible: usize, end_visible: usize) -> f32 {
    scores[..first_visible.min(TILE)].fill(f32::NEG_INFINITY);
    scores[end_visible..].fill(f32::NEG_INFINITY);
    // SAFETY: the array holds VECTORS vectors.
    let x: [F32; VECTORS] = std::array::from_fn(|vector| unsafe { F32::load(scores[vector * LANES..].as_ptr()) });
    x[0].max(x[1]).max(x[2].max(x[3])).reduce_max()
}

/// 2^(score · scale + shift), as factors; returns their sums by lane.
#[inline(always)]
fn weights_of(scores: &[f32; TILE], weights: &mut [Factor; TILE], scale: F32, shift: F32) -> F32 {
    let x: [F32; VECTORS] = std::array::from_fn(|vector| {
        // SAFETY: both arrays hold VECTORS vectors.
        unsafe {
            let score = F32::load(scores[vector * LANES..].as_ptr());
            let power = score.mul_add(scale, shift);
            let weight = if size_of::<Element>() == 4 { power.exp2() } else { power.exp2_coarse() };
            store_factors(weight, weights[vector * LANES..].as_mut_ptr());
            weight
        }
    });
    (x[0] + x[1]) + (x[2] + x[3])
}
