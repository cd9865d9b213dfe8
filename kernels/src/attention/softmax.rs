//! Online softmax: each row's running maximum, sum and weighted values, and their update by new scores or another segment.

use super::TILE;
use super::tile::ROWS;
use crate::element::Element;
use crate::simd::{self, LANES};
use std::arch::x86_64::*;

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
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(crate) unsafe fn merge(self, later: State, first_row: usize) {
        for row in first_row..self.num_rows {
            // SAFETY: guaranteed by the caller.
            unsafe {
                let (mine, other) = (*self.maximum(row), *later.maximum(row));
                let maximum = if mine > other { mine } else { other };
                let keep = simd::exp2(_mm512_set1_ps(mine - maximum));
                let take = simd::exp2(_mm512_set1_ps(other - maximum));
                self.maximum(row).write(maximum);
                let combine = |target: *mut f32, source: *const f32| {
                    let scaled = _mm512_mul_ps(_mm512_loadu_ps(source), take);
                    _mm512_storeu_ps(target, _mm512_fmadd_ps(_mm512_loadu_ps(target), keep, scaled));
                };
                combine(self.sums(row), later.sums(row));
                for dim in (0..self.value_dim).step_by(LANES) {
                    combine(self.values(row).add(dim), later.values(row).add(dim));
                }
            }
        }
    }

    /// Writes the row's result as bf16. A sink is a score without a value.
    ///
    /// # Safety
    /// `output` must point to `value_dim` elements.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(crate) unsafe fn finish(self, row: usize, sink: Option<f32>, output: *mut Element) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let mut sum = _mm512_reduce_add_ps(_mm512_loadu_ps(self.sums(row)));
            if let Some(sink) = sink {
                let power = _mm512_set1_ps(sink * std::f32::consts::LOG2_E - *self.maximum(row));
                sum += _mm512_cvtss_f32(simd::exp2(power));
            }
            // A row that sees nothing (an empty source) gets zeros.
            let factor = _mm512_set1_ps(if sum == 0.0 { 0.0 } else { 1.0 / sum });
            for dim in (0..self.value_dim).step_by(LANES) {
                let value = _mm512_mul_ps(_mm512_loadu_ps(self.values(row).add(dim)), factor);
                simd::store_bf16(output.add(dim), value);
            }
        }
    }

    /// Turns the scores of one tile into weights, and updates maxima and sums.
    ///
    /// # Safety
    /// The tile's rows must be rows of the state.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(crate) unsafe fn weigh<const PLAIN: bool>(self, tile: &mut TileRows, scale: f32) {
        let rows = simd::first_lanes(tile.count);
        let mut highest = [0.0f32; LANES];
        for row in 0..tile.count {
            let first = if PLAIN { 0 } else { tile.first_visible[row] };
            // SAFETY: every row of a tile has TILE scores.
            highest[row] = unsafe { hide(&mut tile.scores[row], first, tile.end_visible[row]) };
        }
        // SAFETY: the caller vouches for the state's rows; the arrays have a lane for each row.
        unsafe {
            let maxima = self.maximum(tile.first);
            let before = _mm512_maskz_loadu_ps(rows, maxima);
            let scaled = _mm512_mul_ps(_mm512_loadu_ps(highest.as_ptr()), _mm512_set1_ps(scale));
            // `max` returns its second operand when one is NaN.
            let after = _mm512_max_ps(scaled, before);
            _mm512_mask_storeu_ps(maxima, rows, after);
            _mm512_storeu_ps(tile.factors.as_mut_ptr(), simd::exp2(_mm512_sub_ps(before, after)));
        }
        for row in 0..tile.count {
            // SAFETY: as above.
            unsafe {
                let shift = _mm512_set1_ps(*self.maximum(tile.first + row));
                let factor = _mm512_set1_ps(tile.factors[row]);
                let added = weights_of(&tile.scores[row], &mut tile.weights[row], _mm512_set1_ps(scale), shift);
                let sums = self.sums(tile.first + row);
                _mm512_storeu_ps(sums, _mm512_fmadd_ps(_mm512_loadu_ps(sums), factor, added));
            }
        }
    }
}

/// Consecutive rows at one tile of the context.
#[repr(align(64))]
pub(crate) struct TileRows {
    /// First row of the unit, and the number of rows.
    pub(crate) first: usize,
    pub(crate) count: usize,
    /// The tokens of the tile that each row sees. `first_visible` is ignored for plain attention.
    pub(crate) first_visible: [usize; ROWS],
    pub(crate) end_visible: [usize; ROWS],
    pub(crate) scores: [[f32; TILE]; ROWS],
    /// bf16, in pairs of consecutive tokens.
    pub(crate) weights: [[u32; TILE / 2]; ROWS],
    /// Factor of each row's accumulated values.
    pub(crate) factors: [f32; LANES],
}

impl TileRows {
    pub(crate) fn new(first: usize, count: usize) -> TileRows {
        TileRows {
            first,
            count,
            first_visible: [0; ROWS],
            end_visible: [0; ROWS],
            scores: [[0.0; TILE]; ROWS],
            weights: [[0; TILE / 2]; ROWS],
            factors: [0.0; LANES],
        }
    }
}

const VECTORS: usize = TILE / LANES;

/// Masks invisible scores with -∞ and returns the highest visible score.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn hide(scores: &mut [f32; TILE], first_visible: usize, end_visible: usize) -> f32 {
    let mut x = [_mm512_set1_ps(f32::NEG_INFINITY); VECTORS];
    // SAFETY: the array holds VECTORS vectors.
    unsafe {
        if first_visible == 0 && end_visible >= TILE {
            for vector in 0..VECTORS {
                x[vector] = _mm512_loadu_ps(scores.as_ptr().add(vector * LANES));
            }
        } else {
            for vector in 0..VECTORS {
                let lanes = |count: usize| simd::first_lanes(count.saturating_sub(vector * LANES));
                let mask = lanes(end_visible) & !lanes(first_visible);
                x[vector] = _mm512_mask_loadu_ps(x[vector], mask, scores.as_ptr().add(vector * LANES));
                _mm512_storeu_ps(scores.as_mut_ptr().add(vector * LANES), x[vector]);
            }
        }
    }
    _mm512_reduce_max_ps(_mm512_max_ps(_mm512_max_ps(x[0], x[1]), _mm512_max_ps(x[2], x[3])))
}

/// 2^(score · scale - shift), as bf16; returns their sums by lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn weights_of(scores: &[f32; TILE], weights: &mut [u32; TILE / 2], scale: __m512, shift: __m512) -> __m512 {
    let mut x = [shift; VECTORS];
    // SAFETY: the arrays hold VECTORS vectors, and half as many of pairs.
    unsafe {
        for vector in 0..VECTORS {
            let score = _mm512_loadu_ps(scores.as_ptr().add(vector * LANES));
            x[vector] = simd::exp2_coarse(_mm512_fmsub_ps(score, scale, shift));
        }
        for half in 0..VECTORS / 2 {
            let pairs = _mm512_cvtne2ps_pbh(x[2 * half + 1], x[2 * half]);
            let pairs = std::mem::transmute::<__m512bh, __m512i>(pairs);
            _mm512_storeu_si512(weights.as_mut_ptr().add(half * LANES).cast(), pairs);
        }
    }
    _mm512_add_ps(_mm512_add_ps(x[0], x[1]), _mm512_add_ps(x[2], x[3]))
}
