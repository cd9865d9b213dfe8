//! Weights in 8-bit floating point: a block of a panel becomes elements, as dequantization would store them, for all rows of a part.
//!
//! INVARIANT: every output element is the chain of a dense layer without AMX, so it has the bits of the dequantized weight.

use super::UNIT;
use super::pack::Panel;
use super::tile::{VECTORS, numbers};
use crate::linear::PART_ROWS;
use crate::linear::epilogue::{self, Outcome};
use crate::linear::tile::Input;
use crate::product::{self, Operand, WIDTH};
use crate::simd::{F32, I32, LANES, SUMS, with_constant};
use std::array::from_fn;

/// Vectors of a panel that are multiplied at a time.
const PASS: usize = if SUMS >= 24 { VECTORS } else { 1 };
/// Most rows whose sums are in registers.
const TILE_ROWS: usize = if SUMS / PASS < 8 { SUMS / PASS } else { 8 };
/// Input features that become elements at a time. PERF: a panel's stay in the first-level cache.
const BLOCK: usize = 2 * UNIT;
/// Features that share a scale at least.
const HALF: usize = UNIT / 2;

/// The columns of a panel, for each operation of a block.
type Block = [[Operand; VECTORS]; BLOCK / WIDTH];
/// The sums of a row.
type Sums = [F32; VECTORS];

/// The rows of a part, and what is computed with them.
pub(super) struct Tiles {
    input: Input,
    num_rows: usize,
    /// Sums of a panel, or of a gate panel and the panel that it gates.
    sums: [[Sums; PART_ROWS]; 2],
    block: Block,
}

impl Tiles {
    /// num_rows: at most `PART_ROWS`.
    pub(super) fn new(input: Input, num_rows: usize) -> Tiles {
        let sums = [[[F32::splat(0.0); VECTORS]; PART_ROWS]; 2];
        let block = [[product::columns_of([F32::splat(0.0); WIDTH]); VECTORS]; BLOCK / WIDTH];
        Tiles { input, num_rows, sums, block }
    }

    /// Computes a panel, or a gate panel and the panel that it gates.
    ///
    /// # Safety
    /// The rows must be readable, `outcome` writable for them, and the panels made for as many input features.
    pub(super) unsafe fn apply(&mut self, panel: &Panel, up: Option<&Panel>, outcome: Outcome) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.multiply(0, panel);
            if let Some(up) = up {
                self.multiply(1, up);
            }
            for row in 0..self.num_rows {
                let [mut gate, mut up_sums] = [0, 1].map(|place| [self.sums[place][row]]);
                epilogue::add_bias(&mut gate, panel.bias);
                match up {
                    Some(up) => {
                        epilogue::add_bias(&mut up_sums, up.bias);
                        epilogue::store_gated(&gate, &up_sums, outcome.below(row));
                    }
                    None => epilogue::store(&gate, outcome.below(row)),
                }
            }
        }
    }

    /// Computes the sums with a panel, without its bias, as sums `place`.
    ///
    /// # Safety
    /// As for `apply`.
    unsafe fn multiply(&mut self, place: usize, panel: &Panel) {
        let (in_features, sums) = (self.input.in_features, &mut self.sums[place][..self.num_rows]);
        sums.fill([F32::splat(0.0); VECTORS]);
        let num_tiles = self.num_rows.div_ceil(TILE_ROWS);
        for first in (0..in_features).step_by(BLOCK) {
            let num_features = BLOCK.min(in_features - first);
            // SAFETY: the panel has these features; the caller vouches for the rows.
            unsafe {
                unpack(panel, first, num_features, &mut self.block);
                for tile in 0..num_tiles {
                    let (begin, end) = (self.num_rows * tile / num_tiles, self.num_rows * (tile + 1) / num_tiles);
                    let input = self.input.below(begin);
                    let input = Input { rows: input.rows.wrapping_add(first), ..input };
                    let sums = &mut sums[begin..end];
                    with_constant!(
                        sums.len(),
                        [1, 2, 3, 4, 5, 6, 7; 8],
                        accumulate(sums, input, &self.block, num_features)
                    );
                }
            }
        }
    }
}

/// The weights of `num_features` features from `first` on, in float32 and then rounded.
///
/// # Safety
/// `first` must begin a unit; the panel must have the features, and its codes be floats.
unsafe fn unpack(panel: &Panel, first: usize, num_features: usize, block: &mut Block) {
    let format = panel.format;
    let float = format.float.expect("invariant: only panels of floats come here");
    for start in (0..num_features).step_by(HALF) {
        let (unit, half) = ((first + start) / UNIT, start % UNIT / HALF);
        if half == 0 {
            panel.prefetch(unit);
        }
        let base = panel.codes.wrapping_add(unit * format.unit_bytes());
        // SAFETY: the caller vouches for the features.
        let scales = unsafe { numbers(panel.scales, (first + start) / format.group, unit) };
        for (vector, &scale) in scales.iter().enumerate() {
            // SAFETY: the caller vouches for the features; a unit has whole vectors.
            unsafe {
                let scale = scale * F32::splat(1.0 / float.shrinkage());
                for quad in 0..HALF / 4 {
                    // Four features of each column.
                    let codes =
                        I32::load(base.add((half * 4 + quad) * VECTORS * 4 * LANES + vector * 4 * LANES).cast());
                    let weights = [
                        F32::from_float8::<0>(codes, float) * scale,
                        F32::from_float8::<1>(codes, float) * scale,
                        F32::from_float8::<2>(codes, float) * scale,
                        F32::from_float8::<3>(codes, float) * scale,
                    ];
                    for (operation, weights) in weights.as_chunks::<WIDTH>().0.iter().enumerate() {
                        block[(start + quad * 4) / WIDTH + operation][vector] = product::columns_of(*weights);
                    }
                }
            }
        }
    }
}

/// Adds the products of a block to the sums of R rows.
///
/// # Safety
/// The rows must have `num_features` features.
unsafe fn accumulate<const R: usize>(sums: &mut [Sums], input: Input, block: &Block, num_features: usize) {
    if const { R > TILE_ROWS } {
        return;
    }
    for first in (0..VECTORS).step_by(PASS) {
        let mut tile: epilogue::Sums<R, PASS> = from_fn(|row| from_fn(|vector| sums[row][first + vector]));
        let columns = |operation: usize| -> [Operand; PASS] { from_fn(|vector| block[operation][first + vector]) };
        let factors = |row: usize, operation: usize| input.rows.wrapping_add(row * input.stride + operation * WIDTH);
        // SAFETY: the caller vouches for the features.
        unsafe {
            for operation in 0..num_features / WIDTH {
                product::add(&mut tile, columns(operation), |row| product::splat(factors(row, operation)));
            }
            if !num_features.is_multiple_of(WIDTH) {
                let last = num_features / WIDTH;
                product::add(&mut tile, columns(last), |row| product::splat_last(factors(row, last)));
            }
        }
        for (sums, tile) in sums.iter_mut().zip(tile) {
            sums[first..first + PASS].copy_from_slice(&tile);
        }
    }
}
