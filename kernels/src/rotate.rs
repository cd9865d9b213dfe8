//! Rotary position embedding in place.

use crate::element::Element;
use crate::pool::{Executor, Source, Target};
use crate::simd::{F32, LANES};

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

/// The pairs of elements of a head that rotate together.
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
    pub(crate) address: Target<Element>,
    pub(crate) stride: usize,
    pub(crate) num_heads: usize,
    pub(crate) head_dim: usize,
}

const PART_NUMBERS: usize = 1 << 13;

/// Rotates queries and keys of `num_tokens` tokens.
///
/// # Safety
/// The pointers must be valid for the stated shapes, positions inside the tables.
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
pub(crate) unsafe fn rotate_token(angles: &Angles, heads: &Heads, token: usize) {
    // SAFETY: the caller vouches for all addresses.
    unsafe {
        let position = *angles.positions.at(token) as usize;
        for first in (0..angles.half).step_by(LANES) {
            let count = LANES.min(angles.half - first);
            let cos = F32::load_first(angles.cos.at(position * angles.half + first), count);
            let sin = F32::load_first(angles.sin.at(position * angles.half + first), count);
            for head in 0..heads.num_heads {
                let start = heads.address.at(token * heads.stride + head * heads.head_dim);
                match angles.pairs {
                    Pairs::Halves => turn_halves(start.add(first), angles.half, count, cos, sin),
                    Pairs::Neighbours => turn_neighbours(start.add(2 * first), count, cos, sin),
                }
            }
        }
    }
}

/// Rotates the first `count` of 16 elements with those `half` elements later.
#[inline(always)]
unsafe fn turn_halves(low: *mut Element, half: usize, count: usize, cos: F32, sin: F32) {
    // SAFETY: the caller vouches for the elements.
    unsafe {
        let high = low.add(half);
        let (x, y) = turned(Element::load_first(low, count), Element::load_first(high, count), cos, sin);
        Element::store_first(x, low, count);
        Element::store_first(y, high, count);
    }
}

/// Rotates the first `count` of 16 pairs of consecutive elements.
#[inline(always)]
unsafe fn turn_neighbours(first: *mut Element, count: usize, cos: F32, sin: F32) {
    // SAFETY: the caller vouches for the pairs.
    unsafe {
        let (x, y) = Element::load_first_pairs(first, count);
        let (x, y) = turned(x, y, cos, sin);
        Element::store_first_pairs(x, y, first, count);
    }
}

#[inline(always)]
fn turned(x: F32, y: F32, cos: F32, sin: F32) -> (F32, F32) {
    (x * cos - y * sin, y * cos + x * sin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, assert_close, spawning_pool};

    #[test]
    fn pairs_rotate_by_their_angle_and_other_dims_are_unchanged() {
        let shapes = [(2, 64, 32, 5), (3, 48, 8, 70), (1, 20, 10, 2), (2, 80, 20, 3)];
        for (pairs, shape) in
            [Pairs::Halves, Pairs::Neighbours].into_iter().flat_map(|pairs| shapes.map(|s| (pairs, s)))
        {
            let (num_heads, head_dim, half, num_tokens) = shape;
            let stride = num_heads * head_dim + 6;
            let before = Random::new(half as u64).elements(num_tokens * stride);
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
                    let x = Element::to_f32(before[at]);
                    let turned = if is_first {
                        x * angle.cos() - Element::to_f32(before[at + distance]) * angle.sin()
                    } else {
                        x * angle.cos() + Element::to_f32(before[at - distance]) * angle.sin()
                    };
                    assert_close(after[at], turned, 0.01, "turned");
                }
            }
        }
    }
}
