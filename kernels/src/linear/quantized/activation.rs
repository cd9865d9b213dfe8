//! Inputs as integers: 32 consecutive features of a row share a scale, the greatest magnitude / 127, or / 32512 with 16 bits. An integer
//! of 16 bits is kept as high · 256 + low, two planes of 8 bits.

use super::{InputBits, UNIT};
use crate::element::Element;
use crate::linear::Rows;
use crate::pool::{Executor, Target};
use crate::simd::{F32, I32, LANES};

/// Where the parts of quantized rows are. Rows are in groups, padded to whole ones. First come planes i8 [groups][planes][units][rows of a
/// group][32], the high one first; then numbers of 4 bytes [groups][units][7][rows of a group]: the scale f32, the sums of the integers of
/// the unit's whole, its first half and its second, i32, and the sums of the inputs that they stand for, f32.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) num_units: usize,
    /// 1 for integers of 8 bits, 2 for 16.
    pub(super) num_planes: usize,
    /// Of a group.
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

    /// Of memory that begins anywhere: the rows begin at the next multiple of `ALIGNMENT`.
    pub(super) fn bytes(self) -> usize {
        self.num_rows() * (self.num_planes * UNIT + NUMBERS * 4) * self.num_units + ALIGNMENT
    }

    /// Of a row's unit in the high plane.
    pub(super) fn place(self, row: usize, unit: usize) -> usize {
        let (group, row) = (row / self.group_rows, row % self.group_rows);
        group * self.num_planes * self.plane_bytes() + unit * self.unit_bytes() + row * UNIT
    }

    /// From a row's unit to the same unit in the low plane.
    pub(super) fn plane_bytes(self) -> usize {
        self.num_units * self.unit_bytes()
    }

    /// From a row's unit to its next one.
    pub(super) fn unit_bytes(self) -> usize {
        self.group_rows * UNIT
    }

    pub(super) fn scale(self, row: usize, unit: usize) -> usize {
        self.number(row, unit, 0)
    }

    pub(super) fn sum(self, row: usize, unit: usize, part: Part) -> usize {
        self.number(row, unit, 1 + part as usize)
    }

    pub(super) fn total(self, row: usize, unit: usize, part: Part) -> usize {
        self.number(row, unit, 4 + part as usize)
    }

    fn number(self, row: usize, unit: usize, index: usize) -> usize {
        let (group, row) = (row / self.group_rows, row % self.group_rows);
        let before = ((group * self.num_units + unit) * NUMBERS + index) * self.group_rows + row;
        self.num_rows() * self.num_planes * self.num_units * UNIT + before * 4
    }

    /// Padded.
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

/// Quantizes rows to `target`, which has the layout's bytes, and clears the rows that pad the last group. A unit that contains NaN or an infinity has the scale NaN.
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
    executor.for_ranges(layout.num_rows(), 1, |range| {
        for row in range {
            // SAFETY: the caller vouches for the rows and their places.
            unsafe {
                if row < rows.num_rows {
                    quantize_row(rows.address.at(row * rows.stride), in_features, layout, row, target.at(0));
                } else {
                    clear_row(layout, row, target.at(0));
                }
            }
        }
    });
}

/// Writes the numbers of a row that pads a group. PERF: what the scratch held before may be subnormal, and each sum of subnormal numbers
/// takes a hundred cycles: 17 rows took twice as long as 32.
///
/// # Safety
/// As for `quantize`, for one row.
unsafe fn clear_row(layout: Layout, row: usize, target: *mut u8) {
    for unit in 0..layout.num_units {
        for index in 0..NUMBERS {
            // SAFETY: the target has room for the row's numbers.
            unsafe { target.add(layout.number(row, unit, index)).cast::<u32>().write_unaligned(0) };
        }
    }
}

/// # Safety
/// As for `quantize`, for one row.
unsafe fn quantize_row(x: *const Element, in_features: usize, layout: Layout, row: usize, target: *mut u8) {
    let magnitude = I32::splat(0x7fff_ffff);
    for unit in 0..layout.num_units {
        let first = unit * UNIT;
        let left = in_features - first;
        // SAFETY: the features are the row's; the target has room for the unit.
        unsafe {
            // The order of features inside a unit is that of the codes of a panel: the first 16, then the last 16.
            let halves =
                [0, LANES].map(|half| Element::load_first(x.wrapping_add(first + half), left.saturating_sub(half)));
            // As integers, magnitudes are ordered like the floats, and NaN is above infinity.
            let [greatest, other] = halves.map(|half| half.to_bits() & magnitude);
            let greatest = f32::from_bits(greatest.max(other).reduce_max() as u32);
            let most = layout.most();
            let scale = if greatest.is_finite() { greatest / most } else { f32::NAN };
            // Of a subnormal magnitude, the inverse may be infinite: such a unit counts as zeros.
            let inverse = if greatest > 0.0 && greatest.is_finite() { most / greatest } else { 0.0 };
            let inverse = F32::splat(if inverse.is_finite() { inverse } else { 0.0 });
            let mut sums = [0; 3];
            for (half, numbers) in halves.into_iter().enumerate() {
                let codes = (numbers * inverse).to_i32();
                let place = target.add(layout.place(row, unit) + half * LANES);
                if layout.num_planes == 1 {
                    codes.store_bytes(place);
                } else {
                    // high · 256 + low, where low is the lowest byte with its sign.
                    (codes + I32::splat(128)).shift_right(8).store_bytes(place);
                    codes.store_bytes(place.add(layout.plane_bytes()));
                }
                sums[1 + half] = codes.reduce_sum();
            }
            sums[0] = sums[1] + sums[2];
            target.add(layout.scale(row, unit)).cast::<f32>().write_unaligned(scale);
            for (part, sum) in [Part::Whole, Part::FirstHalf, Part::SecondHalf].into_iter().zip(sums) {
                target.add(layout.sum(row, unit, part)).cast::<i32>().write_unaligned(sum);
                target.add(layout.total(row, unit, part)).cast::<f32>().write_unaligned(scale * sum as f32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{Pool, Source};
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
            let numbers = [0, 1, 2, 3, 4, 5, 6].map(|index| scratch[layout.number(row, unit, index) / 4]);
            assert_eq!(numbers == [0; NUMBERS], row >= NUM_ROWS, "row {row}: {numbers:?}");
        }
    }
}
