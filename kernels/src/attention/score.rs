//! Soft caps and biases of scores before the softmax.

use super::TILE;
use super::shape::{Alibi, Attention, DistanceBias};
use crate::simd::{F32, I32, LANES};
use std::array::from_fn;

impl Attention {
    /// Turns one row's q·k into scores, in place. The tile starts at position `start`; the query is at `position`. The keys are
    /// `key_scale` times those of the products.
    ///
    /// # Safety
    /// The bias table must be valid and have a row for the head.
    pub(super) unsafe fn to_scores(
        &self,
        products: &mut [f32; TILE],
        head: usize,
        start: usize,
        position: usize,
        key_scale: f32,
        bias: Option<DistanceBias>,
    ) {
        let scale = self.layout.scale;
        map(products, |x, _| x * F32::splat(scale * key_scale));
        if let Some(cap) = self.soft_cap {
            map(products, |x, _| F32::splat(cap) * (x * F32::splat(1.0 / cap)).tanh());
        }
        if let Some(Alibi { slopes, is_scaled, is_bfloat16 }) = &self.alibi {
            let slope = F32::splat(slopes[head]);
            let factor = F32::splat(if *is_scaled { scale } else { 1.0 });
            if *is_bfloat16 {
                let slope = slope.round_to_bf16();
                map(products, |x, place| {
                    (slope * positions(start + place).round_to_bf16()).round_to_bf16().mul_add(factor, x)
                });
            } else {
                let slope = slope * factor;
                map(products, |x, place| slope.mul_add(positions(start + place), x));
            }
        }
        if let Some(DistanceBias { table, reach }) = bias {
            let row = table.at(head * (2 * reach + 1));
            map(products, |x, place| {
                let index = |lane: usize| (start + place + lane + reach).saturating_sub(position).min(2 * reach);
                // SAFETY: the caller vouches for the table; every index is inside the head's row.
                let biases: [f32; LANES] = from_fn(|lane| unsafe { *row.add(index(lane)) });
                // SAFETY: the array has 16 floats.
                x + unsafe { F32::load(biases.as_ptr()) }
            });
        }
    }
}

/// Applies a function to each vector of a row, with the index of its first token.
#[inline(always)]
fn map(row: &mut [f32; TILE], change: impl Fn(F32, usize) -> F32) {
    for place in (0..TILE).step_by(LANES) {
        let address = row[place..].as_mut_ptr();
        // SAFETY: TILE is a multiple of LANES.
        unsafe { change(F32::load(address), place).store(address) };
    }
}

/// Consecutive positions, one per lane.
#[inline(always)]
fn positions(first: usize) -> F32 {
    (I32::lane_numbers() + I32::splat(first as i32)).to_f32()
}
