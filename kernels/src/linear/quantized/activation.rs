//! Inputs as integers: 32 consecutive features of a row share a scale, the greatest magnitude / 127, or / 32512 with 16 bits. An integer
//! of 16 bits is kept as high · 256 + low, two planes of 8 bits.

use super::{InputBits, UNIT};
use crate::element::Element;
use crate::linear::Rows;
use crate::pool::{Executor, Target};
use std::arch::x86_64::*;

/// Where the parts of a quantized row are: planes i8 [planes][units · 32], the high one first, scales f32 [units], and for each half of a
/// unit the sum of its integers, i32 [units][2].
#[derive(Clone, Copy)]
pub(super) struct Layout {
    pub(super) num_units: usize,
    /// 1 for integers of 8 bits, 2 for 16.
    pub(super) num_planes: usize,
}

impl Layout {
    pub(super) fn of(in_features: usize, bits: InputBits) -> Layout {
        let num_planes = match bits {
            InputBits::Eight => 1,
            InputBits::Sixteen => 2,
        };
        Layout { num_units: in_features.div_ceil(UNIT), num_planes }
    }

    /// The greatest integer.
    fn most(self) -> f32 {
        if self.num_planes == 1 { 127.0 } else { 127.0 * 256.0 }
    }

    pub(super) fn row_bytes(self) -> usize {
        self.sums() + self.num_units * 8
    }

    pub(super) fn plane(self, index: usize) -> usize {
        index * self.num_units * UNIT
    }

    pub(super) fn scales(self) -> usize {
        self.plane(self.num_planes)
    }

    pub(super) fn sums(self) -> usize {
        self.scales() + self.num_units * 4
    }
}

/// Quantizes rows to `target`, `row_bytes` for each. A unit that contains NaN or an infinity has the scale NaN.
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
    executor.for_ranges(rows.num_rows, 1, |range| {
        for row in range {
            // SAFETY: the caller vouches for the rows and their places.
            unsafe {
                quantize_row(
                    rows.address.at(row * rows.stride),
                    in_features,
                    layout,
                    target.at(row * layout.row_bytes()),
                );
            }
        }
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")]
unsafe fn quantize_row(x: *const Element, in_features: usize, layout: Layout, target: *mut u8) {
    let magnitude = _mm512_set1_epi32(0x7fff_ffff);
    for unit in 0..layout.num_units {
        let first = unit * UNIT;
        let left = in_features - first;
        let mask = if left >= UNIT { u32::MAX } else { (1u32 << left) - 1 };
        // SAFETY: the mask selects features of the row; the target has room for the unit.
        unsafe {
            let numbers = _mm512_maskz_loadu_epi16(mask, x.add(first).cast());
            // The order of features inside a unit is that of the codes of a panel: the first 16, then the last 16.
            let halves = [_mm512_castsi512_si256(numbers), _mm512_extracti64x4_epi64::<1>(numbers)]
                .map(|half| _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(half)));
            // As integers, magnitudes are ordered like the floats, and NaN is above infinity.
            let greatest = _mm512_reduce_max_epi32(_mm512_max_epi32(
                _mm512_and_si512(halves[0], magnitude),
                _mm512_and_si512(halves[1], magnitude),
            ));
            let greatest = f32::from_bits(greatest as u32);
            let most = layout.most();
            let scale = if greatest.is_finite() { greatest / most } else { f32::NAN };
            let inverse = _mm512_set1_ps(if greatest > 0.0 && greatest.is_finite() { most / greatest } else { 0.0 });
            for (half, bits) in halves.into_iter().enumerate() {
                let codes = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(bits), inverse));
                let place = target.add(first + half * UNIT / 2);
                if layout.num_planes == 1 {
                    _mm_storeu_si128(place.cast(), _mm512_cvtsepi32_epi8(codes));
                } else {
                    let high = _mm512_srai_epi32::<8>(_mm512_add_epi32(codes, _mm512_set1_epi32(128)));
                    let low = _mm512_sub_epi32(codes, _mm512_slli_epi32::<8>(high));
                    _mm_storeu_si128(place.cast(), _mm512_cvtepi32_epi8(high));
                    _mm_storeu_si128(place.add(layout.plane(1)).cast(), _mm512_cvtepi32_epi8(low));
                }
                let sum = target.add(layout.sums() + (2 * unit + half) * 4).cast::<i32>();
                sum.write_unaligned(_mm512_reduce_add_epi32(codes));
            }
            target.add(layout.scales() + unit * 4).cast::<f32>().write_unaligned(scale);
        }
    }
}
