//! Quantized layers with AMX, for many rows: a block of a panel is unpacked to signed bytes once for all rows of a part. An instruction
//! then multiplies a unit of 16 rows by 16 columns; vectors scale the products and add them to the sums.
//!
//! INVARIANT: the integers are exact, and the chain of sums is that of `tile`, so the bits are the same. Which of the two computes a row
//! may depend on the number of rows.

use super::UNIT;
use super::activation::{Layout, Part};
use super::pack::Panel;
use super::tile::{self, Input, VECTORS};
use crate::cpu::Amx;
use crate::linear::PART_ROWS;
use crate::linear::epilogue::{self, Outcome};
use crate::registers::{REGISTER_BYTES, REGISTER_ROWS, Registers};
use crate::simd::{F32, I32, LANES, with_constant};
use std::arch::asm;
use std::ops::Range;

/// Most tiles of a part, whose rows begin and end with a tile.
const MOST_TILES: usize = PART_ROWS / REGISTER_ROWS + 1;
/// Groups of a unit or less that are unpacked at a time. PERF: their codes and the inputs of a tile stay in the first-level cache.
const BLOCK: usize = 24;
/// Rows that are added at a time.
const QUARTER: usize = 4;
/// Groups that the registers are ahead of the vectors. PERF: products go through memory. With 1, and with `Ahead` in the place where codes are
/// unpacked, 48 rows took 1.12 times as long (Emerald Rapids).
const LAG: usize = 3;
/// Rows of 64 bytes of a unit's codes in 16 columns.
const QUADS: usize = UNIT / 4;

/// The products of 16 rows by 16 columns with each plane of the inputs.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Products([[[i32; LANES]; REGISTER_ROWS]; 2]);

/// The signed codes of a panel's group in a unit as registers read them: 4 features of 16 columns in a row. Where a group is half a unit,
/// the other half is zero.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Codes([[[u8; REGISTER_BYTES]; QUADS]; VECTORS]);

/// The groups of a panel in consecutive units, unpacked, with the scales and mins of each.
struct Block {
    codes: [Codes; BLOCK],
    scales: [[F32; VECTORS]; BLOCK],
    mins: [[F32; VECTORS]; BLOCK],
}

/// The sums of a tile's rows, in quarters, in 16 columns.
type Sums = [[F32; QUARTER]; REGISTER_ROWS / QUARTER];

/// The tile registers, configured for the rows of a part, and what is computed with them.
pub(super) struct Tiles {
    _registers: Registers,
    num_rows: usize,
    block: Block,
    products: [Products; LAG + 1],
    /// Sums of a panel, or of a gate panel and the panel that it gates, by tile.
    sums: [[[Sums; VECTORS]; MOST_TILES]; 2],
}

impl Tiles {
    /// Configures the registers for a part of `num_rows` rows.
    pub(super) fn configure(amx: Amx, num_rows: usize) -> Tiles {
        debug_assert!(num_rows <= MOST_TILES * REGISTER_ROWS);
        // Products with one plane and with the other, codes, inputs of one plane and of the other.
        let mut shapes = [(REGISTER_ROWS, REGISTER_BYTES); 8];
        shapes[2] = (QUADS, REGISTER_BYTES);
        shapes[3..5].fill((REGISTER_ROWS, UNIT));
        let registers = Registers::configure(amx, shapes);
        // SAFETY: zeros are numbers.
        let (block, products, sums) = unsafe { std::mem::zeroed() };
        Tiles { _registers: registers, num_rows, block, products, sums }
    }

    /// Computes a panel, or a gate panel and the panel that it gates.
    ///
    /// # Safety
    /// The part's rows must be readable at `input`, `outcome` writable for them, and the panels made for as many units, with signed codes.
    pub(super) unsafe fn apply(&mut self, input: Input, panel: &Panel, up: Option<&Panel>, outcome: Outcome) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.multiply(0, input, panel);
            if let Some(up) = up {
                self.multiply(1, input, up);
            }
            self.store(panel.bias, up.map(|up| up.bias), outcome);
        }
    }

    /// Computes the sums with a panel, without its bias, as sums `place`.
    ///
    /// # Safety
    /// As for `apply`.
    unsafe fn multiply(&mut self, place: usize, input: Input, panel: &Panel) {
        let (num_units, splits) = (input.layout.num_units, if panel.format.group < UNIT { 2 } else { 1 });
        let num_blocks = (num_units * splits).div_ceil(BLOCK);
        let shift = signed_offset(panel) - panel.offset();
        let accumulate = match (input.layout.num_planes, panel.format.has_mins, shift != 0) {
            (1, false, false) => accumulate::<1, false, false>,
            (1, false, true) => accumulate::<1, false, true>,
            (1, true, false) => accumulate::<1, true, false>,
            (1, true, true) => accumulate::<1, true, true>,
            (_, false, false) => accumulate::<2, false, false>,
            (_, false, true) => accumulate::<2, false, true>,
            (_, true, false) => accumulate::<2, true, false>,
            (_, true, true) => accumulate::<2, true, true>,
        };
        for index in 0..num_blocks {
            let units = num_units * index / num_blocks..num_units * (index + 1) / num_blocks;
            let steps = Steps { first_unit: units.start, num_units: units.len(), splits, shift };
            // SAFETY: the panel has the units; the caller vouches for the rest.
            unsafe {
                with_constant!(panel.kind(), [0, 2, 3, 4, 5, 6; 8], unpack(&mut self.block, panel, units, splits));
                let num_tiles = self.num_rows.div_ceil(REGISTER_ROWS);
                for tile in 0..num_tiles {
                    for vector in 0..VECTORS {
                        let ahead = Ahead { panel, lines: panel.lines(tile * VECTORS + vector, num_tiles * VECTORS) };
                        let sums = &mut self.sums[place][tile][vector];
                        if index == 0 {
                            *sums = [[F32::splat(0.0); QUARTER]; REGISTER_ROWS / QUARTER];
                        }
                        let input = input.below(tile * REGISTER_ROWS);
                        accumulate(input, &self.block, steps, vector, &ahead, &mut self.products, sums);
                    }
                }
            }
        }
    }

    /// Stores the sums of a panel, or of a gate panel and the panel that it gates, with their biases.
    unsafe fn store(&self, bias: *const f32, up_bias: Option<*const f32>, outcome: Outcome) {
        let row = |place: usize, row: usize, bias: *const f32| {
            let tile = &self.sums[place][row / REGISTER_ROWS];
            let mut sums: epilogue::Sums<1, VECTORS> =
                [std::array::from_fn(|vector| tile[vector][row % REGISTER_ROWS / QUARTER][row % QUARTER])];
            // SAFETY: the caller of `apply` vouches for the bias.
            unsafe { epilogue::add_bias(&mut sums, bias) };
            sums
        };
        for index in 0..self.num_rows {
            // SAFETY: the caller of `apply` vouches for the outcome.
            unsafe {
                match up_bias {
                    Some(up_bias) => {
                        epilogue::store_gated(&row(0, index, bias), &row(1, index, up_bias), outcome.below(index));
                    }
                    None => epilogue::store(&row(0, index, bias), outcome.below(index)),
                }
            }
        }
    }
}

/// Number subtracted from codes to make them signed bytes: the offset if possible.
fn signed_offset(panel: &Panel) -> i32 {
    panel.offset().clamp((1 << panel.byte_bits()) - 128, 128)
}

/// Unpacks the groups of some units.
///
/// # Safety
/// The panel must have the units and codes of this kind.
unsafe fn unpack<const KIND: usize>(block: &mut Block, panel: &Panel, units: Range<usize>, splits: usize) {
    let format = panel.format;
    let offset = signed_offset(panel);
    for (index, unit) in units.enumerate() {
        let base = panel.codes.wrapping_add(unit * format.unit_bytes());
        for split in 0..splits {
            let place = index * splits + split;
            // SAFETY: the caller vouches for the unit; a row of codes is as long as a vector.
            unsafe {
                for (vector, rows) in block.codes[place].0.iter_mut().enumerate() {
                    for (row, bytes) in rows.iter_mut().enumerate() {
                        let half = row / (QUADS / 2);
                        let is_covered = splits == 1 || half == split;
                        let codes = if is_covered {
                            tile::codes::<KIND>(panel, base, half, row % (QUADS / 2), vector)
                                .subtract_bytes(offset as i8)
                        } else {
                            I32::splat(0)
                        };
                        codes.store(bytes.as_mut_ptr().cast());
                    }
                }
                let group = unit * UNIT / format.group + split;
                block.scales[place] = tile::numbers(panel.scales, group, unit);
                if format.has_mins {
                    block.mins[place] = tile::mins(panel, block.scales[place], group, unit);
                }
            }
        }
    }
}

/// Units and codes of a block, the same for all tiles of a panel.
#[derive(Clone, Copy)]
struct Steps {
    first_unit: usize,
    num_units: usize,
    /// Groups of a unit: 1 or 2.
    splits: usize,
    /// `signed_offset` less the offset: products add it for each code.
    shift: i32,
}

/// Lines of a later block that each unit of a block prefetches. PERF: otherwise unpacking would wait for memory.
struct Ahead<'a> {
    panel: &'a Panel,
    lines: Range<usize>,
}

/// Adds a block's products to the sums of a tile in one vector of columns. PERF: the registers multiply the next groups while vectors
/// add one.
///
/// # Safety
/// The inputs must be a whole tile with `PLANES` planes, and have the units of the block.
unsafe fn accumulate<const PLANES: usize, const HAS_MINS: bool, const IS_SHIFTED: bool>(
    input: Input,
    block: &Block,
    steps: Steps,
    vector: usize,
    ahead: &Ahead<'_>,
    products: &mut [Products; LAG + 1],
    sums: &mut Sums,
) {
    let (layout, num_steps) = (input.layout, steps.num_units * steps.splits);
    // `splits` is 1 or 2: a division in every step would cost as much as some rows.
    let (halvings, last_split) = (steps.splits - 1, steps.splits - 1);
    let mut results = *sums;
    for step in 0..num_steps + LAG {
        if step < num_steps {
            let unit = steps.first_unit + (step >> halvings);
            if step & last_split == 0 {
                ahead.panel.prefetch_lines(unit, ahead.lines.clone());
            }
            let inputs = input.row(unit);
            // SAFETY: the caller vouches for the rows.
            unsafe {
                multiply::<PLANES>(inputs, layout, &block.codes[step].0[vector], &mut products[step % (LAG + 1)]);
            }
        }
        let Some(step) = step.checked_sub(LAG) else { continue };
        let unit = steps.first_unit + (step >> halvings);
        let part = Part::of(step & last_split, steps.splits);
        let (input_scales, integers, totals) = (input.scale(unit), input.sum(unit, part), input.total(unit, part));
        let (scales, mins) = (block.scales[step][vector], block.mins[step][vector]);
        let Products(planes) = &products[step % (LAG + 1)];
        for quarter in 0..results.len() {
            for index in 0..QUARTER {
                let row = quarter * QUARTER + index;
                let result = &mut results[quarter][index];
                // SAFETY: the scratch has numbers for all rows of the tile.
                unsafe {
                    let mut product = I32::load(planes[0][row].as_ptr());
                    if PLANES == 2 {
                        product = product.shift_left(8) + I32::load(planes[1][row].as_ptr());
                    }
                    if IS_SHIFTED {
                        product = product + I32::splat(steps.shift * integers.add(row).read_unaligned());
                    }
                    let both = scales * F32::splat(input_scales.add(row).read_unaligned());
                    *result = product.to_f32().mul_add(both, *result);
                    if HAS_MINS {
                        *result = mins.mul_add(F32::splat(totals.add(row).read_unaligned()), *result);
                    }
                }
            }
        }
    }
    *sums = results;
}

/// Multiplies the planes of a unit of inputs with codes.
///
/// # Safety
/// As for `accumulate`.
#[inline]
unsafe fn multiply<const PLANES: usize>(
    inputs: *const u8,
    layout: Layout,
    codes: &[[u8; REGISTER_BYTES]; QUADS],
    products: &mut Products,
) {
    let Products(planes) = products;
    // SAFETY: the caller vouches for the inputs; codes and products are as large as the registers.
    unsafe {
        if PLANES == 1 {
            asm!(
                "tileloadd tmm2, [{codes} + {line}]",
                "tilezero tmm0",
                "tileloadd tmm3, [{inputs} + {row}]",
                "tdpbssd tmm0, tmm3, tmm2",
                "tilestored [{products} + {line}], tmm0",
                codes = in(reg) codes,
                line = in(reg) REGISTER_BYTES,
                inputs = in(reg) inputs,
                row = in(reg) UNIT,
                products = in(reg) planes,
                out("tmm0") _, out("tmm2") _, out("tmm3") _,
                options(nostack, preserves_flags),
            );
        } else {
            asm!(
                "tileloadd tmm2, [{codes} + {line}]",
                "tilezero tmm0",
                "tileloadd tmm3, [{high} + {row}]",
                "tdpbssd tmm0, tmm3, tmm2",
                "tilezero tmm1",
                "tileloadd tmm4, [{low} + {row}]",
                "tdpbssd tmm1, tmm4, tmm2",
                "tilestored [{products} + {line}], tmm0",
                "tilestored [{products} + {line} + 1024], tmm1",
                codes = in(reg) codes,
                line = in(reg) REGISTER_BYTES,
                high = in(reg) inputs,
                low = in(reg) inputs.wrapping_add(layout.plane_bytes()),
                row = in(reg) UNIT,
                products = in(reg) planes,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _,
                options(nostack, preserves_flags),
            );
        }
    }
}
