//! The two matrix products of a tile: the scores of up to 6 rows against 4 blocks, and the weighted sums of values. Keys and values
//! are loaded once for all rows.

use super::TILE;
use super::cache::{BLOCK, load_first_of_pairs, load_pairs};
use crate::element::Element;
use crate::simd::{self, LANES, with_constant};
use std::arch::x86_64::*;

/// Rows per register tile: 6 rows of 4 vectors use 24 of the 32 vector registers.
pub(crate) const ROWS: usize = 6;
/// Blocks per tile.
pub(crate) const BLOCKS: usize = TILE / BLOCK;

/// Addresses of a tile's keys and values, per block.
#[derive(Clone, Copy)]
pub(crate) struct Addresses {
    pub(crate) keys: [*const Element; BLOCKS],
    pub(crate) values: [*const Element; BLOCKS],
}

/// The visible blocks of one tile, and the number of its tokens that exist for these rows.
#[derive(Clone, Copy)]
pub(crate) struct Blocks {
    pub(crate) here: Addresses,
    /// The blocks of the next tile, prefetched at the same pace. PERF: blocks are too short for the hardware prefetcher.
    pub(crate) next: Addresses,
    pub(crate) num_tokens: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
}

/// Writes q·k of up to 6 rows with the tile's tokens to `scores` [rows][TILE].
///
/// # Safety
/// Each query must have `head_dim` elements, `scores` room for all rows.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn score(queries: &[*const Element], blocks: &Blocks, scores: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_constant!(queries.len(), [1, 2, 3, 4, 5; 6], score_rows(queries, blocks, scores)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn score_rows<const R: usize>(queries: &[*const Element], blocks: &Blocks, scores: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        with_constant!(blocks.num_tokens.div_ceil(BLOCK), [1, 2, 3; 4], score_blocks::<R>(queries, blocks, scores));
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn score_blocks<const R: usize, const B: usize>(queries: &[*const Element], blocks: &Blocks, scores: *mut f32) {
    let mut sums = [[_mm512_setzero_ps(); B]; R];
    let queries: [*const Element; R] = std::array::from_fn(|row| queries[row]);
    for pair in 0..blocks.head_dim / 2 {
        // SAFETY: the caller of `score` vouches for queries and blocks.
        unsafe {
            let mut keys = [_mm512_setzero_si512(); B];
            for block in 0..B {
                keys[block] = load_pairs(blocks.here.keys[block].add(pair * BLOCK * 2));
            }
            for block in 0..BLOCKS {
                prefetch(blocks.next.keys[block].wrapping_add(pair * BLOCK * 2));
            }
            for row in 0..R {
                let both = simd::broadcast_pair(queries[row].add(pair * 2));
                for block in 0..B {
                    sums[row][block] = simd::dot_pairs(sums[row][block], both, keys[block]);
                }
            }
        }
    }
    for row in 0..R {
        for block in 0..B {
            // SAFETY: the caller of `score` vouches for room.
            unsafe { _mm512_storeu_ps(scores.add(row * TILE + block * BLOCK), sums[row][block]) };
        }
    }
}

/// One row's accumulators [value_dim], the factor that rescales them first, and the tile's weights.
#[derive(Clone, Copy)]
pub(crate) struct Weighted {
    pub(crate) sums: *mut f32,
    pub(crate) factor: f32,
    pub(crate) weights: *const u32,
}

impl Default for Weighted {
    fn default() -> Weighted {
        Weighted { sums: std::ptr::null_mut(), factor: 0.0, weights: std::ptr::null() }
    }
}

/// sums = sums · factor + weights · values, for up to 6 rows.
///
/// # Safety
/// Each row's pointers must be valid for `value_dim` floats and TILE / 2 pairs.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn weigh(rows: &[Weighted], blocks: &Blocks) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_constant!(rows.len(), [1, 2, 3, 4, 5; 6], weigh_rows(rows, blocks)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn weigh_rows<const R: usize>(rows: &[Weighted], blocks: &Blocks) {
    let rows: [Weighted; R] = std::array::from_fn(|row| rows[row]);
    let vectors = blocks.value_dim / LANES;
    for first in (0..vectors).step_by(4) {
        // SAFETY: guaranteed by the caller.
        unsafe { with_constant!((vectors - first).min(4), [1, 2, 3; 4], weigh_dims::<R>(&rows, blocks, first * LANES)) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn weigh_dims<const R: usize, const V: usize>(rows: &[Weighted; R], blocks: &Blocks, first_dim: usize) {
    let mut sums = [[_mm512_setzero_ps(); V]; R];
    // SAFETY: the caller of `weigh` vouches for rows and blocks; the second half of a token pair is ignored when that token does not exist.
    unsafe {
        for row in 0..R {
            let factor = _mm512_set1_ps(rows[row].factor);
            for vector in 0..V {
                let old = _mm512_loadu_ps(rows[row].sums.add(first_dim + vector * LANES));
                sums[row][vector] = _mm512_mul_ps(old, factor);
            }
        }
        for block in 0..blocks.num_tokens.div_ceil(BLOCK) {
            let values = blocks.here.values[block].add(first_dim * 2);
            let next_values = blocks.next.values[block].wrapping_add(first_dim * 2);
            let num_tokens = BLOCK.min(blocks.num_tokens - block * BLOCK);
            for pair in 0..num_tokens / 2 {
                let mut pairs = [_mm512_setzero_si512(); V];
                for vector in 0..V {
                    let offset = (pair * blocks.value_dim + vector * LANES) * 2;
                    pairs[vector] = load_pairs(values.add(offset));
                    prefetch(next_values.wrapping_add(offset));
                }
                for row in 0..R {
                    let weights = _mm512_set1_epi32(*rows[row].weights.add(block * BLOCK / 2 + pair) as i32);
                    for vector in 0..V {
                        sums[row][vector] = simd::dot_pairs(sums[row][vector], weights, pairs[vector]);
                    }
                }
            }
            if num_tokens % 2 == 1 {
                let pair = num_tokens / 2;
                let base = values.add(pair * blocks.value_dim * 2);
                for row in 0..R {
                    let weights = _mm512_set1_epi32(*rows[row].weights.add(block * BLOCK / 2 + pair) as i32);
                    for vector in 0..V {
                        let pairs = load_first_of_pairs(base.add(vector * LANES * 2));
                        sums[row][vector] = simd::dot_pairs(sums[row][vector], weights, pairs);
                    }
                }
            }
        }
        for row in 0..R {
            for vector in 0..V {
                _mm512_storeu_ps(rows[row].sums.add(first_dim + vector * LANES), sums[row][vector]);
            }
        }
    }
}

#[inline]
fn prefetch(address: *const Element) {
    // SAFETY: prefetching touches nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
}
