//! Inputs as integers: 32 consecutive features of a row share a scale, the greatest magnitude / 127, or / 32512 with 16 bits. An integer
//! of 16 bits is kept as high · 256 + low, two planes of 8 bits.

use super::{InputBits, UNIT};
use crate::element::Element;
use crate::linear::Rows;
use crate::pool::{Executor, Pool, Target};
use crate::simd::{F32, I32, LANES};
use std::array::from_fn;
use std::mem::MaybeUninit;

/// Memory layout of quantized rows. Rows are in groups; the last group is padded. First come planes i8
/// [groups][planes][units][rows of a group][32], the high one first; then numbers of 4 bytes
/// [groups][units][7][rows of a group]: the scale f32, the sums of the integers of the unit's whole, its first half and
/// its second, i32, and the sums of the inputs that they stand for, f32.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) num_units: usize,
    /// 1 for integers of 8 bits, 2 for 16.
    pub(super) num_planes: usize,
    /// Rows of a group, at most `GROUP_ROWS`.
    pub(super) group_rows: usize,
    num_groups: usize,
}

/// Most rows of a group: those of a register of AMX. PERF: without AMX, consecutive rows of a unit are next to each other too.
const GROUP_ROWS: usize = 16;
/// PERF: registers of AMX read a row of a unit at a time, which should not be in two cache lines.
pub(super) const ALIGNMENT: usize = 64;
/// Numbers of each row for each unit.
const NUMBERS: usize = 7;

impl Layout {
    pub(super) fn of(in_features: usize, bits: InputBits, num_rows: usize) -> Layout {
        let num_planes = match bits {
            InputBits::Eight => 1,
            InputBits::Sixteen => 2,
        };
        let group_rows = num_rows.clamp(1, GROUP_ROWS);
        let num_groups = num_rows.div_ceil(group_rows);
        Layout { num_units: in_features.div_ceil(UNIT), num_planes, group_rows, num_groups }
    }

    /// The greatest integer.
    fn most(self) -> f32 {
        if self.num_planes == 1 { 127.0 } else { 127.0 * 256.0 }
    }

    /// Bytes of the rows and of the gap before them: they begin at the next multiple of `ALIGNMENT`.
    pub(super) fn bytes(self) -> usize {
        self.num_rows() * (self.num_planes * UNIT + NUMBERS * 4) * self.num_units + ALIGNMENT
    }

    /// Offset in bytes of a unit of a group's first row in the high plane; the units of its next rows follow.
    pub(super) fn place(self, group: usize, unit: usize) -> usize {
        group * self.num_planes * self.plane_bytes() + unit * self.unit_bytes()
    }

    /// Bytes from a row's unit to the same unit in the low plane.
    pub(super) fn plane_bytes(self) -> usize {
        self.num_units * self.unit_bytes()
    }

    /// Bytes from a row's unit to its next one.
    pub(super) fn unit_bytes(self) -> usize {
        self.group_rows * UNIT
    }

    /// Offset in bytes of the scale of a group's first row; the scales of its next rows follow.
    pub(super) fn scale(self, group: usize, unit: usize) -> usize {
        self.number(group, unit, 0)
    }

    pub(super) fn sum(self, group: usize, unit: usize, part: Part) -> usize {
        self.number(group, unit, 1 + part as usize)
    }

    pub(super) fn total(self, group: usize, unit: usize, part: Part) -> usize {
        self.number(group, unit, 4 + part as usize)
    }

    fn number(self, group: usize, unit: usize, index: usize) -> usize {
        let before = (group * self.num_units + unit) * NUMBERS + index;
        self.num_rows() * self.num_planes * self.num_units * UNIT + before * self.group_rows * 4
    }

    /// Rows with padding.
    fn num_rows(self) -> usize {
        self.num_groups * self.group_rows
    }
}

/// The part of a unit that a group of the weight covers.
#[derive(Clone, Copy)]
pub(super) enum Part {
    Whole,
    FirstHalf,
    SecondHalf,
}

impl Part {
    /// Part `index` of `count`, which is 1 or 2.
    pub(super) fn of(index: usize, count: usize) -> Part {
        match (index, count) {
            (_, 1) => Part::Whole,
            (0, _) => Part::FirstHalf,
            _ => Part::SecondHalf,
        }
    }
}

/// Quantizes rows to `target`, which has the layout's bytes. A unit that contains NaN or an infinity has the scale NaN.
///
/// PERF: threads share the units of a group of rows, not its rows, whose numbers are in the same cache lines.
///
/// # Safety
/// The rows must be readable, and the target have room for them.
pub(super) unsafe fn quantize(
    executor: &impl Executor,
    rows: Rows,
    in_features: usize,
    layout: Layout,
    target: Target<u8>,
) {
    let least = PART_UNITS.div_ceil(layout.group_rows);
    executor.for_ranges(layout.num_groups * layout.num_units, least, |range| {
        for index in range {
            let (group, unit) = (index / layout.num_units, index % layout.num_units);
            // SAFETY: the caller vouches for the rows and their places.
            unsafe {
                if layout.group_rows == 1 {
                    quantize_unit::<1>(rows, in_features, layout, group, unit, target);
                } else {
                    quantize_unit::<GROUP_ROWS>(rows, in_features, layout, group, unit, target);
                }
            }
        }
    });
}

/// Units of rows that are worth another thread.
const PART_UNITS: usize = 64;

/// A few quantized rows, of one thread. PERF: where one thread quantizes and the others wait, they can as well do the same, and then there
/// is nothing to wait for.
#[repr(align(64))]
pub(super) struct Local([MaybeUninit<u8>; PART_UNITS * (2 * UNIT + NUMBERS * 4)]);

impl Local {
    pub(super) fn has_room_for(layout: Layout) -> bool {
        layout.num_rows() * layout.num_units <= PART_UNITS
    }

    /// Quantizes rows for which there is room.
    ///
    /// # Safety
    /// The rows must be readable.
    pub(super) unsafe fn quantize(rows: Rows, in_features: usize, layout: Layout) -> Local {
        let mut local = Local([const { MaybeUninit::uninit() }; _]);
        // SAFETY: the caller vouches for the rows.
        unsafe { quantize(&Pool::single(), rows, in_features, layout, Target::new(local.0.as_mut_ptr().cast())) };
        local
    }

    pub(super) fn address(&self) -> *const u8 {
        self.0.as_ptr().cast()
    }
}

/// Quantizes a unit of the rows of a group, at most N. Rows that pad the group have numbers 0. PERF: without them the scratch would hold
/// what was there before, which may be subnormal, and each sum of subnormal numbers takes a hundred cycles: 17 rows took twice as long as 32.
///
/// # Safety
/// As for `quantize`.
unsafe fn quantize_unit<const N: usize>(
    rows: Rows,
    in_features: usize,
    layout: Layout,
    group: usize,
    unit: usize,
    target: Target<u8>,
) {
    let first_row = group * layout.group_rows;
    let group_rows = layout.group_rows.min(rows.num_rows - first_row);
    let left = in_features - unit * UNIT;
    // The order of features inside a unit is that of the codes of a panel: the first 16, then the last 16.
    let halves = |row: usize| {
        let x = rows.address.at((first_row + row) * rows.stride + unit * UNIT);
        // SAFETY: the features are the row's.
        [0, LANES].map(|half| unsafe { Element::load_first(x.wrapping_add(half), left.saturating_sub(half)) })
    };
    let (magnitude, most) = (I32::splat(0x7fff_ffff), layout.most());
    let mut greatest = [0.0; N];
    for (row, greatest) in greatest[..group_rows].iter_mut().enumerate() {
        // As integers, magnitudes are ordered like the floats, and NaN is above infinity.
        let [first, second] = halves(row).map(|half| half.to_bits() & magnitude);
        *greatest = f32::from_bits(first.max(second).reduce_max() as u32);
    }
    let scales = greatest.map(|greatest| if greatest.is_finite() { greatest / most } else { f32::NAN });
    let inverses = greatest.map(|greatest: f32| {
        let inverse = if greatest > 0.0 && greatest.is_finite() { most / greatest } else { 0.0 };
        // The inverse of a subnormal magnitude may be infinite: such a unit counts as zeros.
        if inverse.is_finite() { inverse } else { 0.0 }
    });
    let mut sums = [[0; N]; 3];
    for row in 0..group_rows {
        let place = target.at(layout.place(group, unit) + row * UNIT);
        for (half, numbers) in halves(row).into_iter().enumerate() {
            let codes = (numbers * F32::splat(inverses[row])).to_i32();
            // SAFETY: the target has room for the unit.
            unsafe {
                let place = place.add(half * LANES);
                if layout.num_planes == 1 {
                    codes.store_bytes(place);
                } else {
                    // high · 256 + low, where low is the lowest byte with its sign.
                    (codes + I32::splat(128)).shift_right(8).store_bytes(place);
                    codes.store_bytes(place.add(layout.plane_bytes()));
                }
            }
            sums[1 + half][row] = codes.reduce_sum();
        }
        sums[0][row] = sums[1][row] + sums[2][row];
    }
    let totals = sums.map(|sums| from_fn(|row| scales[row] * sums[row] as f32));
    // SAFETY: the target has room for the numbers of the group.
    unsafe {
        let store = |place: usize, numbers: [u32; N]| store(target.at(place), numbers, layout.group_rows);
        store(layout.scale(group, unit), scales.map(f32::to_bits));
        for (index, part) in [Part::Whole, Part::FirstHalf, Part::SecondHalf].into_iter().enumerate() {
            store(layout.sum(group, unit, part), sums[index].map(i32::cast_unsigned));
            store(layout.total(group, unit, part), totals[index].map(f32::to_bits));
        }
    }
}

/// Stores the first `count` of `numbers`.
///
/// # Safety
/// `target` must have room for them.
#[inline(always)]
unsafe fn store<const N: usize>(target: *mut u8, numbers: [u32; N], count: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if count == N {
            target.cast::<[u32; N]>().write_unaligned(numbers);
        } else {
            numbers[..count].iter().enumerate().for_each(|(row, number)| {
                target.cast::<u32>().add(row).write_unaligned(*number);
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::Source;
    use crate::testing::Random;

    #[test]
    fn rows_that_pad_the_last_group_have_no_subnormal_numbers() {
        const NUM_ROWS: usize = 17;
        let (x, in_features) = (Random::new(3).elements(NUM_ROWS * 2 * UNIT), 2 * UNIT);
        let rows = Rows { address: Source::new(x.as_ptr()), stride: in_features, num_rows: NUM_ROWS };
        let layout = Layout::of(in_features, InputBits::Sixteen, NUM_ROWS);
        let mut scratch = vec![1u32; layout.bytes() / 4];
        // SAFETY: the vectors have the sizes of the layout.
        unsafe { quantize(&Pool::single(), rows, in_features, layout, Target::new(scratch.as_mut_ptr().cast())) };
        for (row, unit) in (0..layout.num_rows()).flat_map(|row| [(row, 0), (row, 1)]) {
            let (group, row_of_group) = (row / layout.group_rows, row % layout.group_rows);
            let numbers = [0, 1, 2, 3, 4, 5, 6];
            let numbers = numbers.map(|index| scratch[layout.number(group, unit, index) / 4 + row_of_group]);
            assert_eq!(numbers == [0; NUMBERS], row >= NUM_ROWS, "row {row}: {numbers:?}");
        }
    }
}
