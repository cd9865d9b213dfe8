//! Vectors: the rows of a tile by a panel of 32 columns. A unit's codes are unpacked into registers once for all rows of the tile, whose
//! sums over all input features stay in the first-level cache.

use super::PANEL;
use super::UNIT;
use super::activation::{Layout, Part};
use super::format::{Number, SUPER_GROUP};
use super::pack::{Numbers, Panel, TABLE};
use crate::linear::epilogue::{self, Outcome};
use crate::simd::{Bytes, F32, I32, LANES, U16, with_constant};
use std::array::from_fn;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Vectors per row of a panel.
pub(super) const VECTORS: usize = PANEL / LANES;
/// Most rows of a tile, whole groups of the layout. PERF: unpacking costs as much as some rows.
pub(super) const TILE_ROWS: usize = 64;
/// Vectors of 4 features in a unit.
pub(super) const QUADS: usize = UNIT / 4;
/// The bits of every byte.
const BYTES: i32 = 0x0101_0101;

/// The sums of a row with a panel.
type Sums = [F32; VECTORS];

/// Quantized rows, from a group of them on.
#[derive(Clone, Copy)]
pub(super) struct Input {
    pub(super) address: *const u8,
    pub(super) layout: Layout,
    pub(super) group: usize,
}

impl Input {
    /// The rows from a later one on, the first one of a group.
    pub(super) fn below(self, num_rows: usize) -> Input {
        debug_assert!(num_rows.is_multiple_of(self.layout.group_rows));
        self.below_groups(num_rows / self.layout.group_rows)
    }

    pub(super) fn below_groups(self, num_groups: usize) -> Input {
        Input { group: self.group + num_groups, ..self }
    }

    /// A unit of the first row in the high plane.
    pub(super) fn row(self, unit: usize) -> *const u8 {
        self.address.wrapping_add(self.layout.place(self.group, unit))
    }

    /// The first row's scale for a unit. The next row of a group has its numbers next to these.
    pub(super) fn scale(self, unit: usize) -> *const f32 {
        self.address.wrapping_add(self.layout.scale(self.group, unit)).cast()
    }

    /// The sum of the first row's integers in a part of a unit.
    pub(super) fn sum(self, unit: usize, part: Part) -> *const i32 {
        self.address.wrapping_add(self.layout.sum(self.group, unit, part)).cast()
    }

    /// The sum of the first row's inputs in a part of a unit, as their integers and the scale give them.
    pub(super) fn total(self, unit: usize, part: Part) -> *const f32 {
        self.address.wrapping_add(self.layout.total(self.group, unit, part)).cast()
    }
}

/// Computes a panel, or a gate panel and the panel that it gates, for at most `TILE_ROWS` rows.
///
/// # Safety
/// The rows must be readable at `input`, from the first one of a group on, `outcome` writable for them, and the panels made for as many units.
pub(super) unsafe fn apply(num_rows: usize, input: Input, panel: &Panel, up: Option<&Panel>, outcome: Outcome) {
    let mut buffers = [const { MaybeUninit::uninit() }; 2];
    let [buffer, up_buffer] = &mut buffers;
    // SAFETY: guaranteed by the caller.
    unsafe {
        let sums = product(num_rows, input, panel, buffer);
        let up_sums = up.map(|up| product(num_rows, input, up, up_buffer));
        for (row, &mut sums) in sums.iter_mut().enumerate() {
            match &up_sums {
                Some(up_sums) => epilogue::store_gated(&[sums], &[up_sums[row]], outcome.below(row)),
                None => epilogue::store(&[sums], outcome.below(row)),
            }
        }
    }
}

/// The sums of rows with a panel, bias included.
///
/// # Safety
/// As for `apply`.
unsafe fn product<'a>(
    num_rows: usize,
    input: Input,
    panel: &Panel,
    buffer: &'a mut MaybeUninit<[Sums; TILE_ROWS]>,
) -> &'a mut [Sums] {
    // SAFETY: the sums are initialized here; the caller vouches for the rest.
    unsafe {
        let sums = std::slice::from_raw_parts_mut(buffer.as_mut_ptr().cast::<Sums>(), num_rows);
        sums.fill([F32::splat(0.0); VECTORS]);
        with_constant!(panel.kind(), [0, 2, 3, 4, 5, 6; 8], accumulate_kind(input, panel, sums));
        for sums in &mut *sums {
            epilogue::add_bias(std::array::from_mut(sums), panel.bias);
        }
        sums
    }
}

/// `KIND`: bits of a code, or `TABLE`.
unsafe fn accumulate_kind<const KIND: usize>(input: Input, panel: &Panel, sums: &mut [Sums]) {
    let splits_units = panel.format.group < UNIT;
    let accumulate = match (splits_units, input.layout.num_planes, panel.format.has_mins) {
        (false, 1, false) => accumulate::<KIND, QUADS, 1, false>,
        (false, 1, true) => accumulate::<KIND, QUADS, 1, true>,
        (false, _, false) => accumulate::<KIND, QUADS, 2, false>,
        (false, _, true) => accumulate::<KIND, QUADS, 2, true>,
        (true, 1, false) => accumulate::<KIND, { QUADS / 2 }, 1, false>,
        (true, 1, true) => accumulate::<KIND, { QUADS / 2 }, 1, true>,
        (true, _, false) => accumulate::<KIND, { QUADS / 2 }, 2, false>,
        (true, _, true) => accumulate::<KIND, { QUADS / 2 }, 2, true>,
    };
    // SAFETY: the caller of `apply` vouches for all addresses.
    unsafe { accumulate(input, panel, sums) }
}

/// Adds the products of all units. `COUNT`: vectors of 4 features of a group in a unit, all or half.
unsafe fn accumulate<const KIND: usize, const COUNT: usize, const PLANES: usize, const HAS_MINS: bool>(
    input: Input,
    panel: &Panel,
    sums: &mut [Sums],
) {
    let units_per_group = (panel.format.group / UNIT).max(1);
    let (mut group, mut units_left) = (0, units_per_group);
    for unit in 0..input.layout.num_units {
        panel.prefetch(unit);
        // SAFETY: the caller of `apply` vouches for the rows and a panel of as many units.
        unsafe {
            if COUNT == QUADS {
                add_group::<KIND, COUNT, PLANES, HAS_MINS, 0>(input, panel, unit, group, sums);
            } else {
                add_group::<KIND, COUNT, PLANES, HAS_MINS, 0>(input, panel, unit, 2 * unit, sums);
                add_group::<KIND, COUNT, PLANES, HAS_MINS, 1>(input, panel, unit, 2 * unit + 1, sums);
            }
        }
        units_left -= 1;
        if units_left == 0 {
            (group, units_left) = (group + 1, units_per_group);
        }
    }
}

/// Adds the products of a unit, or of its half `SPLIT`.
#[inline(always)]
unsafe fn add_group<
    const KIND: usize,
    const COUNT: usize,
    const PLANES: usize,
    const HAS_MINS: bool,
    const SPLIT: usize,
>(
    input: Input,
    panel: &Panel,
    unit: usize,
    group: usize,
    sums: &mut [Sums],
) {
    // SAFETY: the caller of `apply` vouches for the rows and the panel.
    unsafe {
        let unpacked = Group::<COUNT>::unpack::<KIND, PLANES, HAS_MINS, SPLIT>(panel, unit, group);
        for (group, rows) in sums.chunks_mut(input.layout.group_rows).enumerate() {
            let operands = Operands::of(input.below_groups(group), unit, SPLIT, QUADS / COUNT);
            for (row, sums) in rows.iter_mut().enumerate() {
                unpacked.add::<KIND, PLANES, HAS_MINS>(&operands, row, panel.format.offset, sums);
            }
        }
    }
}

/// Addresses of a unit's inputs for the first row of a group.
struct Operands {
    high: *const u8,
    low: *const u8,
    scales: *const f32,
    integers: *const i32,
    totals: *const f32,
}

impl Operands {
    #[inline(always)]
    fn of(input: Input, unit: usize, split: usize, splits: usize) -> Operands {
        let (layout, part) = (input.layout, Part::of(split, splits));
        let high = input.row(unit).wrapping_add(split * UNIT / 2);
        Operands {
            high,
            low: high.wrapping_add((layout.num_planes - 1) * layout.plane_bytes()),
            scales: input.scale(unit),
            integers: input.sum(unit, part),
            totals: input.total(unit, part),
        }
    }
}

/// A panel's codes by 4 features, scales and mins, in a unit or in one half of it.
struct Group<const COUNT: usize> {
    codes: [[I32; COUNT]; VECTORS],
    /// The codes, in the place of `codes`, where they have 8 bits and so do the inputs.
    bytes: [[Bytes; COUNT]; VECTORS],
    scales: [F32; VECTORS],
    mins: [F32; VECTORS],
}

/// Whether products are those of `Group::bytes`.
const fn are_bytes(kind: usize, planes: usize) -> bool {
    matches!(kind, TABLE | 8) && planes == 1
}

impl<const COUNT: usize> Group<COUNT> {
    #[inline(always)]
    unsafe fn unpack<const KIND: usize, const PLANES: usize, const HAS_MINS: bool, const SPLIT: usize>(
        panel: &Panel,
        unit: usize,
        group: usize,
    ) -> Group<COUNT> {
        let format = panel.format;
        let base = panel.codes.wrapping_add(unit * format.unit_bytes());
        let zero = I32::splat(0);
        let mut unpacked = Group {
            codes: [[zero; COUNT]; VECTORS],
            bytes: [[Bytes::of(zero); COUNT]; VECTORS],
            scales: [F32::splat(0.0); VECTORS],
            mins: [F32::splat(0.0); VECTORS],
        };
        for vector in 0..VECTORS {
            for index in 0..COUNT {
                let quad = SPLIT * COUNT + index;
                // SAFETY: the caller of `apply` vouches for the panel.
                let codes = unsafe { codes::<KIND>(panel, base, quad / (QUADS / 2), quad % (QUADS / 2), vector) };
                if are_bytes(KIND, PLANES) {
                    unpacked.bytes[vector][index] = Bytes::of(codes);
                } else {
                    unpacked.codes[vector][index] = codes;
                }
            }
        }
        // SAFETY: as above.
        unsafe {
            unpacked.scales = numbers(panel.scales, group, unit);
            if HAS_MINS {
                unpacked.mins = mins(panel, unpacked.scales, group, unit);
            }
        }
        unpacked
    }

    /// Adds the products with a row.
    #[inline(always)]
    unsafe fn add<const KIND: usize, const PLANES: usize, const HAS_MINS: bool>(
        &self,
        inputs: &Operands,
        row: usize,
        offset: i32,
        sums: &mut Sums,
    ) {
        // SAFETY: the caller of `apply` vouches for the row.
        unsafe {
            let lost = if are_bytes(KIND, PLANES) { Bytes::OFFSET } else { 0 };
            let offset = if HAS_MINS { 0 } else { offset };
            let shift = I32::splat((lost - offset) * inputs.integers.add(row).read_unaligned());
            let low: *const i32 = inputs.low.add(row * UNIT).cast();
            let high: *const i32 = inputs.high.add(row * UNIT).cast();
            let scale = F32::splat(inputs.scales.add(row).read_unaligned());
            for vector in 0..VECTORS {
                let dot = |quads, inputs, sum| self.dot::<KIND, PLANES>(vector, quads, inputs, sum);
                // Two chains of instructions run at the same time.
                let product = if PLANES == 2 {
                    dot(0..COUNT, low, shift) + dot(0..COUNT, high, I32::splat(0)).shift_left(8)
                } else {
                    dot(0..COUNT / 2, low, shift) + dot(COUNT / 2..COUNT, low, I32::splat(0))
                };
                let mut sum = product.to_f32().mul_add(self.scales[vector] * scale, sums[vector]);
                if HAS_MINS {
                    sum = self.mins[vector].mul_add(F32::splat(inputs.totals.add(row).read_unaligned()), sum);
                }
                sums[vector] = sum;
            }
        }
    }

    /// sum + the products of some vectors of codes with the inputs of a row.
    ///
    /// # Safety
    /// The inputs of all vectors must be readable.
    #[inline(always)]
    unsafe fn dot<const KIND: usize, const PLANES: usize>(
        &self,
        vector: usize,
        quads: Range<usize>,
        inputs: *const i32,
        sum: I32,
    ) -> I32 {
        let greatest = if matches!(KIND, TABLE | 8) { 255 } else { (1 << KIND) - 1 };
        // SAFETY: guaranteed by the caller; inputs of one plane are between -127 and 127.
        unsafe {
            let inputs = inputs.add(quads.start);
            if are_bytes(KIND, PLANES) {
                Bytes::dot(&self.bytes[vector][quads], inputs, sum)
            } else {
                sum.dot_codes(&self.codes[vector][quads], inputs, greatest)
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

/// The scales of a group, or its mins or zero points, which starts in this unit, for each vector of columns.
///
/// # Safety
/// The panel must have the group.
#[inline(always)]
pub(super) unsafe fn numbers(of: Numbers, group: usize, unit: usize) -> [F32; VECTORS] {
    let first = group * PANEL;
    // SAFETY: the caller vouches for the group.
    unsafe {
        let bytes = |first: usize, vector: usize| I32::load_bytes(of.numbers.add(first + vector * LANES).cast());
        let words = |vector: usize| U16::load(of.numbers.cast::<u16>().add(first + vector * LANES));
        let factors = |vector: usize| {
            F32::from_f16(U16::load(of.factors.add(unit / (SUPER_GROUP / UNIT) * PANEL + vector * LANES)))
        };
        let nibbles = |vector: usize| {
            let both = bytes(group / 2 * PANEL, vector);
            (both.shift_right(group as i32 % 2 * 4) & I32::splat(15)).to_f32()
        };
        // PERF: one branch for all vectors.
        match of.number {
            Number::F16 => from_fn(|vector| F32::from_f16(words(vector))),
            Number::Bf16 => from_fn(|vector| F32::from_bf16(words(vector))),
            Number::F32 => from_fn(|vector| F32::load(of.numbers.cast::<f32>().add(first + vector * LANES))),
            Number::I8 => from_fn(|vector| bytes(first, vector).to_f32() * factors(vector)),
            Number::U4 if of.factors.is_null() => from_fn(nibbles),
            Number::U4 => from_fn(|vector| nibbles(vector) * factors(vector)),
            Number::U8 => from_fn(|vector| (bytes(first, vector) & I32::splat(0xff)).to_f32()),
            Number::Power => from_fn(|vector| power_of_two(bytes(first, vector))),
        }
    }
}

/// The mins of a group, as `numbers`, from its scales.
///
/// # Safety
/// As for `numbers`.
#[inline(always)]
pub(super) unsafe fn mins(panel: &Panel, scales: [F32; VECTORS], group: usize, unit: usize) -> [F32; VECTORS] {
    // SAFETY: guaranteed by the caller.
    let numbers = unsafe { numbers(panel.mins, group, unit) };
    from_fn(|vector| panel.format.min_of(numbers[vector], scales[vector]))
}

/// Exponents with a bias of 128 as powers of two. 2^-127, twice the least one, is a subnormal number.
#[inline(always)]
fn power_of_two(exponents: I32) -> F32 {
    F32::from_bits((exponents & I32::splat(0xff)).shift_left(23).max(I32::splat(1 << 22))) * F32::splat(0.5)
}
