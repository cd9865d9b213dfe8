//! The two matrix products of a tile: the scores of some rows against 4 blocks, and the weighted sums of values. Keys and values are
//! loaded once for all rows.

use super::TILE;
use super::cache::BLOCK;
use crate::element::{Element, GROUP};
use crate::product::{self, Factor, STEP, WIDTH};
use crate::simd::{F32, LANES, SUMS, prefetch, with_constant};
use std::array::from_fn;

/// Rows per register tile: with 4 vectors of columns for each, or as many as registers hold.
pub(crate) const ROWS: usize = if SUMS < 6 { SUMS } else { 6 };
/// Blocks per tile.
pub(crate) const BLOCKS: usize = TILE / BLOCK;

/// Vectors of columns that R rows compute at a time.
const fn vectors(num_rows: usize) -> usize {
    if SUMS / num_rows < BLOCKS { SUMS / num_rows } else { BLOCKS }
}

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

/// Writes q·k of up to `ROWS` rows with the tile's tokens to `scores` [rows][TILE].
///
/// # Safety
/// Each query must have `head_dim` factors, `scores` room for all rows.
pub(crate) unsafe fn score(queries: &[*const Factor], blocks: &Blocks, scores: *mut f32) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_constant!(queries.len(), [1, 2, 3, 4, 5; 6], score_rows(queries, blocks, scores)) }
}

unsafe fn score_rows<const R: usize>(queries: &[*const Factor], blocks: &Blocks, scores: *mut f32) {
    if const { R > ROWS } {
        return;
    }
    let num_blocks = blocks.num_tokens.div_ceil(BLOCK);
    for first in (0..num_blocks).step_by(vectors(R)) {
        let count = vectors(R).min(num_blocks - first);
        // SAFETY: guaranteed by the caller.
        unsafe { with_constant!(count, [1, 2, 3; 4], score_blocks::<R>(queries, blocks, first, scores)) };
    }
}

/// Scores of B blocks from block `first` on.
unsafe fn score_blocks<const R: usize, const B: usize>(
    queries: &[*const Factor],
    blocks: &Blocks,
    first: usize,
    scores: *mut f32,
) {
    if const { B > vectors(R) } {
        return;
    }
    // One pass computes all blocks.
    let first = if const { vectors(R) < BLOCKS } { first } else { 0 };
    let mut sums = [[F32::splat(0.0); B]; R];
    let queries: [*const Factor; R] = from_fn(|row| queries[row]);
    let keys: [*const Element; B] = from_fn(|block| blocks.here.keys[first + block]);
    for step in 0..blocks.head_dim / STEP {
        for block in if const { vectors(R) < BLOCKS } { first..first + B } else { 0..BLOCKS } {
            prefetch(blocks.next.keys[block].wrapping_add(step * STEP * BLOCK));
        }
        for operation in 0..STEP / WIDTH {
            let dim = step * STEP + operation * WIDTH;
            // SAFETY: the caller of `score` vouches for queries and blocks.
            unsafe {
                let columns = keys.map(|keys| product::columns(keys, BLOCK, dim));
                product::add(&mut sums, columns, |row| product::splat(queries[row].add(dim)));
            }
        }
    }
    for row in 0..R {
        for block in 0..B {
            // SAFETY: the caller of `score` vouches for room.
            unsafe { sums[row][block].store(scores.add(row * TILE + (first + block) * BLOCK)) };
        }
    }
}

/// One row's accumulators [value_dim], the factor that rescales them first, and the tile's weights.
#[derive(Clone, Copy)]
pub(crate) struct Weighted {
    pub(crate) sums: *mut f32,
    pub(crate) factor: f32,
    pub(crate) weights: *const Factor,
}

impl Default for Weighted {
    fn default() -> Weighted {
        Weighted { sums: std::ptr::null_mut(), factor: 0.0, weights: std::ptr::null() }
    }
}

/// sums = sums · factor + weights · values, for up to `ROWS` rows.
///
/// # Safety
/// Each row's pointers must be valid for `value_dim` floats and TILE weights.
pub(crate) unsafe fn weigh(rows: &[Weighted], blocks: &Blocks) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_constant!(rows.len(), [1, 2, 3, 4, 5; 6], weigh_rows(rows, blocks)) }
}

unsafe fn weigh_rows<const R: usize>(rows: &[Weighted], blocks: &Blocks) {
    if const { R > ROWS } {
        return;
    }
    let rows: [Weighted; R] = from_fn(|row| rows[row]);
    let num_vectors = blocks.value_dim / LANES;
    for first in (0..num_vectors).step_by(vectors(R)) {
        let count = vectors(R).min(num_vectors - first);
        // SAFETY: guaranteed by the caller.
        unsafe { with_constant!(count, [1, 2, 3; 4], weigh_dims::<R>(&rows, blocks, first * LANES)) }
    }
}

/// The weighted sums of V vectors of values from `first_dim` on.
unsafe fn weigh_dims<const R: usize, const V: usize>(rows: &[Weighted; R], blocks: &Blocks, first_dim: usize) {
    if const { V > vectors(R) } {
        return;
    }
    let value_dim = blocks.value_dim;
    let mut sums = [[F32::splat(0.0); V]; R];
    // SAFETY: the caller of `weigh` vouches for rows and blocks; `last_columns` ignores the token after the last.
    unsafe {
        for row in 0..R {
            let factor = F32::splat(rows[row].factor);
            for vector in 0..V {
                sums[row][vector] = F32::load(rows[row].sums.add(first_dim + vector * LANES)) * factor;
            }
        }
        for block in 0..blocks.num_tokens.div_ceil(BLOCK) {
            let values = blocks.here.values[block].add(first_dim * GROUP);
            let next_values = blocks.next.values[block].wrapping_add(first_dim * GROUP);
            let vector_of = |vector: usize| values.add(vector * LANES * GROUP);
            let weights = |row: usize, token: usize| product::splat(rows[row].weights.add(block * BLOCK + token));
            let num_tokens = BLOCK.min(blocks.num_tokens - block * BLOCK);
            let num_steps = num_tokens / STEP;
            for step in 0..num_steps {
                for index in 0..STEP / GROUP {
                    let group = next_values.wrapping_add((step * STEP + index * GROUP) * value_dim);
                    for line in 0..V.div_ceil(STEP / GROUP) {
                        prefetch(group.wrapping_add(line * LANES * STEP));
                    }
                }
                for operation in 0..STEP / WIDTH {
                    let token = step * STEP + operation * WIDTH;
                    let columns = from_fn(|vector| product::columns(vector_of(vector), value_dim, token));
                    product::add::<R, V>(&mut sums, columns, |row| weights(row, token));
                }
            }
            if !num_tokens.is_multiple_of(STEP) {
                let token = num_steps * STEP;
                let columns = from_fn(|vector| product::last_columns(vector_of(vector), value_dim, token));
                product::add::<R, V>(&mut sums, columns, |row| weights(row, token));
            }
        }
        for row in 0..R {
            for vector in 0..V {
                sums[row][vector].store(rows[row].sums.add(first_dim + vector * LANES));
            }
        }
    }
}
