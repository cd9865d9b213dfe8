//! Rotary position embedding in place, NeoX convention: element i rotates with element i + half.

use crate::attention::{Layout, NewTokens};
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

/// Like `rotate`, and stores the rotated keys and the values in the cache.
///
/// # Safety
/// As for `rotate` and `Layout::write`; `tokens.keys` must be the address of `heads[1]`.
pub(crate) unsafe fn rotate_and_write(
    executor: &impl Executor,
    angles: &Angles,
    heads: [Heads; 2],
    layout: &Layout,
    cache: Target<u16>,
    tokens: NewTokens,
) {
    let numbers = heads.iter().map(|heads| heads.num_heads * heads.head_dim).sum::<usize>();
    executor.for_ranges(tokens.num_tokens, PART_NUMBERS / numbers.max(1), |range| {
        for token in range {
            // SAFETY: guaranteed by the caller.
            unsafe {
                rotate_token(angles, &heads[0], token);
                rotate_token(angles, &heads[1], token);
                layout.write_token(cache, &tokens, token);
            }
        }
    });
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn rotate_token(angles: &Angles, heads: &Heads, token: usize) {
    // SAFETY: the caller vouches for all addresses.
    unsafe {
        let position = *angles.positions.at(token) as usize;
        for first in (0..angles.half).step_by(LANES) {
            let mask = simd::first_lanes(angles.half - first);
            let cos = _mm512_maskz_loadu_ps(mask, angles.cos.at(position * angles.half + first));
            let sin = _mm512_maskz_loadu_ps(mask, angles.sin.at(position * angles.half + first));
            for head in 0..heads.num_heads {
                let low = heads.address.at(token * heads.stride + head * heads.head_dim + first);
                let high = low.add(angles.half);
                let (x, y) = (simd::load_bf16_masked(low, mask), simd::load_bf16_masked(high, mask));
                let turned_x = _mm512_sub_ps(_mm512_mul_ps(x, cos), _mm512_mul_ps(y, sin));
                let turned_y = _mm512_add_ps(_mm512_mul_ps(y, cos), _mm512_mul_ps(x, sin));
                simd::store_bf16_masked(low, mask, turned_x);
                simd::store_bf16_masked(high, mask, turned_y);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, assert_close, spawning_pool, to_f32};

    #[test]
    #[cfg_attr(not(avx512_bf16), ignore = "needs AVX-512 BF16")]
    fn pairs_rotate_by_their_angle_and_other_dims_are_unchanged() {
        for (num_heads, head_dim, half, num_tokens) in [(2, 64, 32, 5), (3, 48, 8, 70), (1, 20, 10, 2)] {
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
                    let angle = table[positions[token] as usize * half + dim % half];
                    let x = to_f32(before[at]);
                    let turned = if dim < half {
                        x * angle.cos() - to_f32(before[at + half]) * angle.sin()
                    } else {
                        x * angle.cos() + to_f32(before[at - half]) * angle.sin()
                    };
                    assert_close(after[at], turned, 0.01, "turned");
                }
            }
        }
    }
}
