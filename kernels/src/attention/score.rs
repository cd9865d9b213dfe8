//! Soft caps and biases of scores before the softmax.

use super::TILE;
use super::shape::{Alibi, Attention, DistanceBias};
use crate::simd::{self, LANES};
use std::arch::x86_64::*;

impl Attention {
    /// Turns one row's q·k into scores, in place. The tile starts at position `start`; the query is at `position`.
    ///
    /// # Safety
    /// The bias table must be valid and have a row for the head.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(super) unsafe fn to_scores(
        &self,
        products: &mut [f32; TILE],
        head: usize,
        start: usize,
        position: usize,
        bias: Option<DistanceBias>,
    ) {
        let scale = self.layout.scale;
        map(products, |x, _| _mm512_mul_ps(x, _mm512_set1_ps(scale)));
        if let Some(cap) = self.soft_cap {
            let (cap, inverse) = (_mm512_set1_ps(cap), _mm512_set1_ps(1.0 / cap));
            map(products, |x, _| _mm512_mul_ps(cap, simd::tanh(_mm512_mul_ps(x, inverse))));
        }
        if let Some(Alibi { slopes, is_scaled, is_bfloat16 }) = &self.alibi {
            let slope = _mm512_set1_ps(slopes[head]);
            let factor = _mm512_set1_ps(if *is_scaled { scale } else { 1.0 });
            if *is_bfloat16 {
                let slope = simd::round_bf16(slope);
                map(products, |x, place| {
                    let bias = simd::round_bf16(_mm512_mul_ps(slope, simd::round_bf16(positions(start + place))));
                    _mm512_fmadd_ps(bias, factor, x)
                });
            } else {
                let slope = _mm512_mul_ps(slope, factor);
                map(products, |x, place| _mm512_fmadd_ps(slope, positions(start + place), x));
            }
        }
        if let Some(DistanceBias { table, reach }) = bias {
            let row = table.at(head * (2 * reach + 1));
            let (least, most) = (_mm512_setzero_si512(), _mm512_set1_epi32(2 * reach as i32));
            map(products, |x, place| {
                let first = (start + place) as i32 - position as i32 + reach as i32;
                let index = _mm512_min_epi32(_mm512_max_epi32(neighbours(first), least), most);
                // SAFETY: the caller vouches for the table; every index is inside the head's row.
                _mm512_add_ps(x, unsafe { _mm512_i32gather_ps::<4>(index, row) })
            });
        }
    }
}

/// Applies a function to each vector of a row, with the index of its first token.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn map(row: &mut [f32; TILE], change: impl Fn(__m512, usize) -> __m512) {
    for place in (0..TILE).step_by(LANES) {
        let address = row[place..].as_mut_ptr();
        // SAFETY: TILE is a multiple of LANES.
        unsafe { _mm512_storeu_ps(address, change(_mm512_loadu_ps(address), place)) };
    }
}

/// Consecutive positions, one per lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn positions(first: usize) -> __m512 {
    _mm512_cvtepi32_ps(neighbours(first as i32))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn neighbours(first: i32) -> __m512i {
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    _mm512_add_epi32(lanes, _mm512_set1_epi32(first))
}
