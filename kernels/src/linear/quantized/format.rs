//! How rows of a weight are quantized, and where a panel of them has its codes, scales and mins.

use super::{PANEL, UNIT};
use crate::simd::{self, F32, Float8};

/// Input features that share one factor of scales and one of mins, if scales and mins are integers (GGUF's K types).
pub(crate) const SUPER_GROUP: usize = 256;

/// How scales, mins and zero points are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Number {
    F16,
    Bf16,
    F32,
    /// Scales and mins only: an integer, times a float16 factor for each super-group.
    I8,
    /// 0 to 15: a zero point, or a scale or min with a factor, like `I8`.
    U4,
    /// Zero points only.
    U8,
    /// A power of two, stored as its exponent + 128 in a byte: half the value of that byte in e8m0.
    Power,
}

/// How the rows of a segment are quantized.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Format {
    /// 2, 3, 4, 5, 6 or 8 bits of a code.
    pub(crate) bits: usize,
    /// Input features that share a scale: 16, or a multiple of 32.
    pub(crate) group: usize,
    /// Code, or its byte in the table, of the value zero (or of the group's min); unused with zero points.
    pub(crate) offset: i32,
    /// Values of 4-bit codes; `None`: codes are their own values.
    pub(crate) table: Option<[u8; 16]>,
    /// Type of 8-bit codes that are finite floats, without offset or min; `None`: codes are integers.
    pub(crate) float: Option<Float8>,
    pub(crate) has_mins: bool,
    /// Type of scales, and of mins.
    pub(crate) number: Number,
    /// Type of zero points, for formats that have them instead of mins. Neither they nor the scales have factors then.
    pub(crate) zeros: Option<Number>,
}

/// Offsets of a panel's scales (0), its mins or zero points (1), and their factors, in bytes from its codes.
#[derive(Clone, Copy)]
pub(super) struct Offsets {
    pub(super) numbers: [usize; 2],
    pub(super) factors: [usize; 2],
    pub(super) end: usize,
}

impl Number {
    fn bits(self) -> usize {
        match self {
            Number::F32 => 32,
            Number::F16 | Number::Bf16 => 16,
            Number::I8 | Number::U8 | Number::Power => 8,
            Number::U4 => 4,
        }
    }

    /// Offset in bytes of the number of a group and a column, from the panel's first one. Two groups of U4 share their
    /// bytes; no two columns share a byte.
    fn place(self, group: usize, column: usize) -> usize {
        match self {
            Number::U4 => group / 2 * PANEL + column,
            _ => (group * PANEL + column) * (self.bits() / 8),
        }
    }

    /// Writes a number to a panel of zeros.
    ///
    /// # Safety
    /// `base` must have the group and the column.
    pub(super) unsafe fn write(self, base: *mut u8, group: usize, column: usize, number: f32) {
        // SAFETY: the caller vouches for the place.
        unsafe {
            let base = base.add(self.place(group, column));
            match self {
                Number::F16 => base.cast::<u16>().write(simd::to_f16(number)),
                Number::Bf16 => base.cast::<u16>().write(simd::to_bf16(number)),
                Number::F32 => base.cast::<f32>().write(number),
                Number::I8 => base.cast::<i8>().write(number as i8),
                Number::U4 => *base |= (number as u8 & 15) << (4 * (group % 2)),
                Number::U8 => base.write(number as u8),
                Number::Power => base.write(((number * 2.0).to_bits() >> 23) as u8),
            }
        }
    }

    /// Reads a number from a panel.
    ///
    /// # Safety
    /// As for `write`.
    pub(super) unsafe fn read(self, base: *const u8, group: usize, column: usize) -> f32 {
        // SAFETY: the caller vouches for the place.
        unsafe {
            let base = base.add(self.place(group, column));
            match self {
                Number::F16 => simd::from_f16(base.cast::<u16>().read()),
                Number::Bf16 => simd::from_bf16(base.cast::<u16>().read()),
                Number::F32 => base.cast::<f32>().read(),
                Number::I8 => base.cast::<i8>().read().into(),
                Number::U4 => (base.read() >> (4 * (group % 2)) & 15).into(),
                Number::U8 => base.read().into(),
                Number::Power => f32::from_bits((u32::from(base.read()) << 23).max(1 << 22)) * 0.5,
            }
        }
    }
}

impl Format {
    /// Min that is added to scale · code, from mins or zero points as they are stored.
    #[inline(always)]
    pub(super) fn min_of(self, numbers: F32, scales: F32) -> F32 {
        if self.zeros.is_some() {
            return numbers * scales * F32::splat(-1.0);
        }
        if self.offset == 0 { numbers } else { numbers - scales * F32::splat(self.offset as f32) }
    }

    pub(super) fn num_groups(self, in_features: usize) -> usize {
        in_features.div_ceil(self.group)
    }

    /// Whether scales and mins are integers.
    pub(crate) fn has_factors(self) -> bool {
        matches!(self.number, Number::I8 | Number::U4)
    }

    pub(super) fn num_super_groups(self, in_features: usize) -> usize {
        if self.has_factors() { in_features.div_ceil(SUPER_GROUP) } else { 0 }
    }

    /// How scales (0), or mins or zero points (1), are stored.
    pub(super) fn number(self, kind: usize) -> Number {
        if kind == 1 { self.zeros.unwrap_or(self.number) } else { self.number }
    }

    /// Bytes of a unit of a panel's codes.
    pub(super) fn unit_bytes(self) -> usize {
        self.bits * PANEL * UNIT / 8
    }

    /// 1, or 2 with mins or zero points.
    pub(crate) fn num_kinds(self) -> usize {
        if self.has_mins { 2 } else { 1 }
    }

    pub(super) fn offsets(self, in_features: usize) -> Offsets {
        // Groups of whole units, because products read all groups of the last one.
        let num_groups = self.num_groups(in_features).next_multiple_of(UNIT.div_ceil(self.group));
        let end = in_features.div_ceil(UNIT) * self.unit_bytes();
        let mut offsets = Offsets { numbers: [end; 2], factors: [end; 2], end };
        for kind in 0..self.num_kinds() {
            offsets.numbers[kind] = offsets.end;
            // A whole number of cache lines, so that whatever follows is aligned.
            offsets.end += (num_groups * PANEL * self.number(kind).bits() / 8).next_multiple_of(64);
            offsets.factors[kind] = offsets.end;
            offsets.end += self.num_super_groups(in_features) * PANEL * 2;
        }
        offsets
    }

    /// The planes of bits: for each, its bits and where it starts in a unit. A code has the first plane's bits lowest.
    pub(super) fn planes(self) -> impl Iterator<Item = (usize, usize)> {
        let mut offset = 0;
        [8, 4, 2, 1].into_iter().filter(move |bits| self.bits & bits != 0).map(move |bits| {
            let place = (bits, offset);
            offset += bits * PANEL * UNIT / 8;
            place
        })
    }
}
