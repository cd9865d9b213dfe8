//! The register tile: some rows by a panel of 32 columns, in one or two passes of columns, with the sums over all input features in
//! registers.

use super::UNIT;
use super::activation::{Layout, Part};
use super::pack::{Number, Numbers, PANEL, Panel, SUPER_GROUP, TABLE};
use crate::linear::epilogue::{self, Outcome};
use crate::simd::{F32, I32, LANES, SUMS, U16, with_constant};

/// Vectors per row of a panel.
pub(super) const VECTORS: usize = PANEL / LANES;
/// Vectors per row of a pass: all of a panel where there are registers for several rows.
const PASS: usize = if SUMS >= 24 { VECTORS } else { 1 };
/// Rows per tile. Each has its vectors of integers and of floats in registers.
pub(super) const TILE_ROWS: usize = if SUMS > 2 * PASS { SUMS / (2 * PASS) } else { 1 };
/// The bits of every byte.
const BYTES: i32 = 0x0101_0101;

type Sums<const R: usize> = epilogue::Sums<R, PASS>;

/// Calls `function::<height>`; `TILE_ROWS` is 6, 3 or 1.
macro_rules! with_rows {
    ($height:expr, $function:ident$arguments:tt) => {
        with_constant!($height.min(TILE_ROWS), [1, 2, 3, 4, 5; 6], $function$arguments)
    };
}

/// Quantized rows, from one of them on.
#[derive(Clone, Copy)]
pub(super) struct Input {
    pub(super) address: *const u8,
    pub(super) layout: Layout,
    pub(super) first: usize,
}

impl Input {
    /// The rows from a later one on.
    pub(super) fn below(self, num_rows: usize) -> Input {
        Input { first: self.first + num_rows, ..self }
    }

    /// The first unit of a row in the high plane.
    pub(super) fn row(self, index: usize) -> *const u8 {
        self.address.wrapping_add(self.layout.place(self.first + index, 0))
    }

    /// A row's scale for a unit. The next row of a group has its numbers next to these.
    pub(super) fn scale(self, row: usize, unit: usize) -> *const f32 {
        self.address.wrapping_add(self.layout.scale(self.first + row, unit)).cast()
    }

    /// The sum of a row's integers in a part of a unit.
    pub(super) fn sum(self, row: usize, unit: usize, part: Part) -> *const i32 {
        self.address.wrapping_add(self.layout.sum(self.first + row, unit, part)).cast()
    }

    /// The sum of what they stand for.
    pub(super) fn total(self, row: usize, unit: usize, part: Part) -> *const f32 {
        self.address.wrapping_add(self.layout.total(self.first + row, unit, part)).cast()
    }
}

/// Computes a tile of `height` (1 to `TILE_ROWS`) rows.
///
/// # Safety
/// `height` rows must be readable at `input`, `outcome` writable for them, and the panel made for as many units.
pub(super) unsafe fn apply(height: usize, input: Input, panel: Panel, outcome: Outcome) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_rows!(height, plain(input, panel, outcome)) }
}

/// Like `apply`, for a gate panel and the panel that it gates.
///
/// # Safety
/// As for `apply`.
pub(super) unsafe fn apply_gated(height: usize, input: Input, panels: [Panel; 2], outcome: Outcome) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_rows!(height, gated(input, panels, outcome)) }
}

unsafe fn plain<const R: usize>(input: Input, panel: Panel, outcome: Outcome) {
    for vector in (0..VECTORS).step_by(PASS) {
        // SAFETY: the caller of `apply` vouches for all addresses.
        unsafe { epilogue::store(&product::<R>(input, &panel, vector), outcome.right_of(vector * LANES)) }
    }
}

unsafe fn gated<const R: usize>(input: Input, panels: [Panel; 2], outcome: Outcome) {
    for vector in (0..VECTORS).step_by(PASS) {
        // SAFETY: the caller of `apply_gated` vouches for all addresses.
        unsafe {
            let [gates, ups] = panels.each_ref().map(|panel| product::<R>(input, panel, vector));
            epilogue::store_gated(&gates, &ups, outcome.right_of(vector * LANES));
        }
    }
}

/// The sums of R rows with a pass of a panel from vector `first` on, bias included.
unsafe fn product<const R: usize>(input: Input, panel: &Panel, first: usize) -> Sums<R> {
    let splits_units = panel.format.group < UNIT;
    // SAFETY: the caller of `apply` vouches for all addresses.
    unsafe {
        let mut sums = match (panel.kind(), splits_units) {
            (TABLE, false) => accumulate::<R, TABLE, 1>(input, panel, first),
            (TABLE, true) => accumulate::<R, TABLE, 2>(input, panel, first),
            (2, false) => accumulate::<R, 2, 1>(input, panel, first),
            (2, true) => accumulate::<R, 2, 2>(input, panel, first),
            (3, false) => accumulate::<R, 3, 1>(input, panel, first),
            (3, true) => accumulate::<R, 3, 2>(input, panel, first),
            (4, false) => accumulate::<R, 4, 1>(input, panel, first),
            (4, true) => accumulate::<R, 4, 2>(input, panel, first),
            (5, false) => accumulate::<R, 5, 1>(input, panel, first),
            (5, true) => accumulate::<R, 5, 2>(input, panel, first),
            (6, false) => accumulate::<R, 6, 1>(input, panel, first),
            (6, true) => accumulate::<R, 6, 2>(input, panel, first),
            (_, false) => accumulate::<R, 8, 1>(input, panel, first),
            (_, true) => accumulate::<R, 8, 2>(input, panel, first),
        };
        let bias = if panel.bias.is_null() { panel.bias } else { panel.bias.add(first * LANES) };
        epilogue::add_bias(&mut sums, bias);
        sums
    }
}

/// `KIND`: bits of a code, or `TABLE`. `SPLIT`: integer products per unit, 2 if a group is half a unit.
unsafe fn accumulate<const R: usize, const KIND: usize, const SPLIT: usize>(
    input: Input,
    panel: &Panel,
    first: usize,
) -> Sums<R> {
    let (format, layout) = (panel.format, input.layout);
    let unit_bytes = panel.format.unit_bytes();
    let units_per_group = (format.group / UNIT).max(1);
    let rows: [_; R] = std::array::from_fn(|index| input.row(index));
    let mut sums = [[F32::splat(0.0); PASS]; R];
    let mut scales = [F32::splat(0.0); PASS];
    let mut mins = [F32::splat(0.0); PASS];
    for unit in 0..layout.num_units {
        let base = panel.codes.wrapping_add(unit * unit_bytes);
        for split in 0..SPLIT {
            let part = Part::of(split, SPLIT);
            // SAFETY: the caller of `apply` vouches for R rows and a panel of as many units.
            unsafe {
                if unit % units_per_group == 0 {
                    let group = unit / units_per_group * SPLIT + split;
                    for vector in 0..PASS {
                        scales[vector] = numbers(panel.scales, format.number, group, unit, first + vector);
                        if format.has_mins {
                            mins[vector] = numbers(panel.mins, format.number, group, unit, first + vector);
                        }
                    }
                }
                let mut products = [[I32::splat(0); PASS]; R];
                if layout.num_planes == 2 {
                    let high = rows.map(|row| row.add(unit * layout.unit_bytes()));
                    add_products::<R, KIND, SPLIT>(&mut products, panel, base, high, first, split);
                    products = products.map(|row| row.map(|product| product.shift_left(8)));
                }
                if !format.has_mins {
                    for index in 0..R {
                        let sum = input.sum(index, unit, part).read_unaligned();
                        let shift = I32::splat(-format.offset * sum);
                        products[index] = products[index].map(|product| product + shift);
                    }
                }
                let low = (layout.num_planes - 1) * layout.plane_bytes() + unit * layout.unit_bytes();
                let low = rows.map(|row| row.add(low));
                add_products::<R, KIND, SPLIT>(&mut products, panel, base, low, first, split);
                for index in 0..R {
                    let input_scale = F32::splat(input.scale(index, unit).read_unaligned());
                    let total = F32::splat(input.total(index, unit, part).read_unaligned());
                    for vector in 0..PASS {
                        let sum = &mut sums[index][vector];
                        *sum = products[index][vector].to_f32().mul_add(scales[vector] * input_scale, *sum);
                        if format.has_mins {
                            *sum = mins[vector].mul_add(total, *sum);
                        }
                    }
                }
            }
        }
    }
    sums
}

/// Adds the products of a unit, or of one half of it, with its features in a plane of each row.
///
/// # Safety
/// As for `apply`.
#[inline(always)]
unsafe fn add_products<const R: usize, const KIND: usize, const SPLIT: usize>(
    products: &mut [[I32; PASS]; R],
    panel: &Panel,
    base: *const u8,
    rows: [*const u8; R],
    first: usize,
    split: usize,
) {
    for quad in 0..4 {
        for half in if SPLIT == 2 { split..split + 1 } else { 0..2 } {
            // SAFETY: the caller vouches for the unit and the rows.
            unsafe {
                let mut weights = [I32::splat(0); PASS];
                for vector in 0..PASS {
                    weights[vector] = codes::<KIND>(panel, base, half, quad, first + vector);
                }
                for index in 0..R {
                    let features = rows[index].add(half * 16 + quad * 4).cast::<i32>();
                    let features = I32::splat(features.read_unaligned());
                    for vector in 0..PASS {
                        let product = &mut products[index][vector];
                        *product = if matches!(KIND, TABLE | 8) {
                            product.dot_bytes(weights[vector], features)
                        } else {
                            product.dot_small_bytes(weights[vector], features)
                        };
                    }
                }
            }
        }
    }
}

/// 4 features of 16 columns, as unsigned bytes.
///
/// # Safety
/// `base` must be a unit of the panel, whose codes must be of this kind.
#[inline(always)]
pub(super) unsafe fn codes<const KIND: usize>(
    panel: &Panel,
    base: *const u8,
    half: usize,
    quad: usize,
    vector: usize,
) -> I32 {
    // SAFETY: the caller vouches for the unit.
    let line = |index: usize| unsafe { I32::load(base.add(index * 64).cast()) };
    let bits = if KIND == TABLE { 4 } else { KIND };
    if bits == 8 {
        return line((half * 4 + quad) * 2 + vector);
    }
    let mut codes = I32::splat(0);
    if bits & 4 != 0 {
        codes = line(quad * 2 + vector).shift_right(half as i32 * 4) & I32::splat(15 * BYTES);
    }
    let lines_before = if bits & 4 != 0 { 8 } else { 0 };
    if bits & 2 != 0 {
        let pairs = line(lines_before + half * 2 + vector).shift_right(quad as i32 * 2) & I32::splat(3 * BYTES);
        codes = if bits & 4 != 0 { codes | pairs.shift_left(4) } else { pairs };
    }
    if bits & 1 != 0 {
        let lines_before = lines_before + if bits & 2 != 0 { 4 } else { 0 };
        // SAFETY: as above.
        let mask =
            unsafe { base.add(lines_before * 64).cast::<u64>().add((half * 4 + quad) * 2 + vector).read_unaligned() };
        codes = codes | I32::bytes_where(mask) & I32::splat(if bits & 4 != 0 { 16 } else { 4 } * BYTES);
    }
    if KIND == TABLE { codes.look_up(&panel.table) } else { codes }
}

/// The scales or mins of a group, which starts in this unit, for a vector of columns.
///
/// # Safety
/// The panel must have the group.
#[inline(always)]
pub(super) unsafe fn numbers(of: Numbers, kind: Number, group: usize, unit: usize, vector: usize) -> F32 {
    let index = group * PANEL + vector * LANES;
    // SAFETY: the caller vouches for the group.
    unsafe {
        match kind {
            Number::F16 => F32::from_f16(U16::load(of.numbers.cast::<u16>().add(index))),
            Number::F32 => F32::load(of.numbers.cast::<f32>().add(index)),
            Number::I8 => {
                let factors = of.factors.add(unit / (SUPER_GROUP / UNIT) * PANEL + vector * LANES);
                I32::load_bytes(of.numbers.add(index).cast()).to_f32() * F32::from_f16(U16::load(factors))
            }
            Number::Power => power_of_two(I32::load_bytes(of.numbers.add(index).cast())),
        }
    }
}

/// Exponents with a bias of 128 as powers of two. 2^-127, twice the least one, is a subnormal number.
#[inline(always)]
fn power_of_two(exponents: I32) -> F32 {
    F32::from_bits((exponents & I32::splat(0xff)).shift_left(23).max(I32::splat(1 << 22))) * F32::splat(0.5)
}
