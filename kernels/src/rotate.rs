//! Rotary position embedding in place.

use crate::pool::{Executor, Source, Target};
use crate::simd::{self, LANES};
use std::arch::x86_64::*;

/// The angles: cosines and sines [positions, half] in float32, and the position of each token.
#[derive(Clone, Copy)]
pub(crate) struct Angles {
    pub(crate) cos: Source<f32>,
    pub(crate) sin: Source<f32>,
    pub(crate) positions: Source<i64>,
    /// Half of the rotated dims; later dims are unchanged.
    pub(crate) half: usize,
    pub(crate) pairs: Pairs,
}

/// Which elements of a head rotate together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pairs {
    /// i and i + half (GPT-NeoX)
    Halves,
    /// 2i and 2i + 1 (GPT-J)
    Neighbours,
}

/// Heads to rotate: [tokens, heads, head_dim], `stride` elements from token to token.
#[derive(Clone, Copy)]
pub(crate) struct Heads {
    pub(crate) address: Target<u16>,
    pub(crate) stride: usize,
    pub(crate) num_heads: usize,
    pub(crate) head_dim: usize,
}

const PART_NUMBERS: usize = 1 << 13;

/// Rotates queries and keys of `num_tokens` tokens.
///
/// # Safety
/// The pointers must be valid for the stated shapes, positions inside the tables. The CPU must be `supported()`.
pub(crate) unsafe fn rotate(executor: &impl Executor, angles: &Angles, heads: [Heads; 2], num_tokens: usize) {
    let numbers = heads.iter().map(|heads| heads.num_heads * heads.head_dim).sum::<usize>();
    executor.for_ranges(num_tokens, PART_NUMBERS / numbers.max(1), |range| {
        for token in range {
            // SAFETY: guaranteed by the caller.
            unsafe {
                rotate_token(angles, &heads[0], token);
                rotate_token(angles, &heads[1], token);
            }
        }
    });
}

/// Rotates the heads of one token.
///
/// # Safety
/// As for `rotate`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn rotate_token(angles: &Angles, heads: &Heads, token: usize) {
    // SAFETY: the caller vouches for all addresses.
    unsafe {
        let position = *angles.positions.at(token) as usize;
        for first in (0..angles.half).step_by(LANES) {
            let mask = simd::first_lanes(angles.half - first);
            let cos = _mm512_maskz_loadu_ps(mask, angles.cos.at(position * angles.half + first));
            let sin = _mm512_maskz_loadu_ps(mask, angles.sin.at(position * angles.half + first));
            for head in 0..heads.num_heads {
                let start = heads.address.at(token * heads.stride + head * heads.head_dim);
                match angles.pairs {
                    Pairs::Halves => turn_halves(start.add(first), angles.half, mask, cos, sin),
                    Pairs::Neighbours => turn_neighbours(start.add(2 * first), mask, cos, sin),
                }
            }
        }
    }
}

/// Rotates the selected ones of 16 elements with those `half` elements later.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn turn_halves(low: *mut u16, half: usize, mask: __mmask16, cos: __m512, sin: __m512) {
    // SAFETY: the caller vouches for the selected elements.
    unsafe {
        let high = low.add(half);
        let (x, y) = turned(simd::load_bf16_masked(low, mask), simd::load_bf16_masked(high, mask), cos, sin);
        simd::store_bf16_masked(low, mask, x);
        simd::store_bf16_masked(high, mask, y);
    }
}

/// Rotates the selected ones of 16 pairs of consecutive elements.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn turn_neighbours(first: *mut u16, mask: __mmask16, cos: __m512, sin: __m512) {
    // SAFETY: the caller vouches for the selected pairs.
    unsafe {
        let pairs = _mm512_maskz_loadu_epi32(mask, first.cast());
        let x = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs));
        let y = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32 as i32)));
        let (x, y) = turned(x, y, cos, sin);
        let (x, y) = (_mm512_cvtepu16_epi32(simd::narrow(x)), _mm512_cvtepu16_epi32(simd::narrow(y)));
        _mm512_mask_storeu_epi32(first.cast(), mask, _mm512_or_si512(x, _mm512_slli_epi32::<16>(y)));
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn turned(x: __m512, y: __m512, cos: __m512, sin: __m512) -> (__m512, __m512) {
    let turned_x = _mm512_sub_ps(_mm512_mul_ps(x, cos), _mm512_mul_ps(y, sin));
    let turned_y = _mm512_add_ps(_mm512_mul_ps(y, cos), _mm512_mul_ps(x, sin));
    (turned_x, turned_y)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, assert_close, spawning_pool, to_f32};

    #[test]
    #[cfg_attr(not(avx512_bf16), ignore = "needs AVX-512 BF16")]
    fn pairs_rotate_by_their_angle_and_other_dims_are_unchanged() {
        let shapes = [(2, 64, 32, 5), (3, 48, 8, 70), (1, 20, 10, 2), (2, 80, 20, 3)];
        for (pairs, shape) in
            [Pairs::Halves, Pairs::Neighbours].into_iter().flat_map(|pairs| shapes.map(|s| (pairs, s)))
        {
            let (num_heads, head_dim, half, num_tokens) = shape;
            let stride = num_heads * head_dim + 6;
            let before = Random::new(half as u64).bf16s(num_tokens * stride);
            let mut after = before.clone();
            let table: Vec<f32> = (0..100 * half).map(|index| index as f32 * 0.37).collect();
            let (cos, sin): (Vec<f32>, Vec<f32>) = table.iter().map(|angle| (angle.cos(), angle.sin())).unzip();
            let positions: Vec<i64> = (0..num_tokens as i64).map(|token| (token * 7) % 100).collect();
            let angles = Angles {
                cos: Source::new(cos.as_ptr()),
                sin: Source::new(sin.as_ptr()),
                positions: Source::new(positions.as_ptr()),
                half,
                pairs,
            };
            let heads = Heads { address: Target::new(after.as_mut_ptr()), stride, num_heads, head_dim };
            // SAFETY: sizes as made; the second heads are none.
            unsafe { rotate(&spawning_pool(2), &angles, [heads, Heads { num_heads: 0, ..heads }], num_tokens) };
            for token in 0..num_tokens {
                for index in 0..stride {
                    let at = token * stride + index;
                    let dim = index % head_dim;
                    if index >= num_heads * head_dim || dim >= 2 * half {
                        assert_eq!(after[at], before[at]);
                        continue;
                    }
                    let (pair, is_first, distance) = match pairs {
                        Pairs::Halves => (dim % half, dim < half, half),
                        Pairs::Neighbours => (dim / 2, dim % 2 == 0, 1),
                    };
                    let angle = table[positions[token] as usize * half + pair];
                    let x = to_f32(before[at]);
                    let turned = if is_first {
                        x * angle.cos() - to_f32(before[at + distance]) * angle.sin()
                    } else {
                        x * angle.cos() + to_f32(before[at - distance]) * angle.sin()
                    };
                    assert_close(after[at], turned, 0.01, "turned");
                }
            }
        }
    }
}
