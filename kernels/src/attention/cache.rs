//! The layout of a layer's cache, and writing to it.
//!
//! [block][kv head][keys, values]; keys of a block are [dim pair][token][2], so that a vector holds one pair of dims of 16 tokens and
//! scores need no horizontal sums; values are [token pair][dim][2], so that a vector holds 16 dims of two tokens.

use crate::pool::{Executor, Source, Target};
use crate::simd::LANES;
use std::arch::x86_64::*;

/// Tokens in a block.
pub const BLOCK: usize = 16;

/// The heads of a model on this rank.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub num_heads: usize,
    pub num_kv_heads: usize,
    /// A multiple of 16, at most 256.
    pub head_dim: usize,
    /// Applied to q·k.
    pub scale: f32,
}

/// Keys and values to store: [tokens, kv heads, head_dim], tokens `stride` numbers apart, and a slot for each.
#[derive(Clone, Copy)]
pub struct NewTokens {
    pub keys: Source<u16>,
    pub keys_stride: usize,
    pub values: Source<u16>,
    pub values_stride: usize,
    pub slots: Source<i64>,
    pub num_tokens: usize,
}

impl Layout {
    /// Query heads that share a kv head.
    pub fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Numbers of the keys (and as many of the values) of a block of one kv head.
    pub fn block_half(&self) -> usize {
        BLOCK * self.head_dim
    }

    /// Where a block's keys of a kv head begin; its values follow them.
    pub fn offset(&self, block: usize, kv_head: usize) -> usize {
        (block * self.num_kv_heads + kv_head) * 2 * self.block_half()
    }

    /// Store new keys and values at their slots.
    ///
    /// # Safety
    /// The addresses must hold what they say, and every slot must lie inside the cache. Slots must differ from each other.
    /// The CPU must be `supported()`.
    pub unsafe fn write(&self, executor: &impl Executor, cache: Target<u16>, tokens: NewTokens) {
        // Two threads may write to one vector of values: masked stores touch only their own numbers.
        executor.for_ranges(tokens.num_tokens, 64, |range| {
            for token in range {
                // SAFETY: the caller vouches for the addresses.
                unsafe { self.write_token(cache, &tokens, token) };
            }
        });
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(crate) unsafe fn write_token(&self, cache: Target<u16>, tokens: &NewTokens, token: usize) {
        // SAFETY: the caller of `write` vouches for all addresses.
        unsafe {
            let slot = *tokens.slots.at(token) as usize;
            let (block, place) = (slot / BLOCK, slot % BLOCK);
            for kv_head in 0..self.num_kv_heads {
                let key = tokens.keys.at(token * tokens.keys_stride + kv_head * self.head_dim);
                let value = tokens.values.at(token * tokens.values_stride + kv_head * self.head_dim);
                let keys = cache.at(self.offset(block, kv_head));
                for pair in 0..self.head_dim / 2 {
                    let both = key.add(pair * 2).cast::<u32>().read_unaligned();
                    keys.add((pair * BLOCK + place) * 2).cast::<u32>().write_unaligned(both);
                }
                let values = keys.add(self.block_half() + place / 2 * self.head_dim * 2);
                for dim in (0..self.head_dim).step_by(LANES) {
                    let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(value.add(dim).cast()));
                    let target = values.add(dim * 2).cast();
                    if place % 2 == 0 {
                        _mm512_mask_storeu_epi16(target, 0x5555_5555, wide);
                    } else {
                        _mm512_mask_storeu_epi16(target, 0xaaaa_aaaa, _mm512_slli_epi32::<16>(wide));
                    }
                }
            }
        }
    }
}

/// A vector of 16 scores' worth of keys, or 16 dims' worth of value pairs.
///
/// # Safety
/// 64 bytes must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn load_pairs(address: *const u16) -> __m512i {
    // SAFETY: the caller's word.
    unsafe { _mm512_loadu_si512(address.cast()) }
}

/// The same, with the second number of each pair taken as zero: it belongs to a token that does not exist, and may be anything.
///
/// # Safety
/// As for `load_pairs`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn load_first_of_pairs(address: *const u16) -> __m512i {
    // SAFETY: the caller's word.
    unsafe { _mm512_maskz_loadu_epi16(0x5555_5555, address.cast()) }
}
