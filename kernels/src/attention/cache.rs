//! The layout of one layer's KV cache, and writes to it.
//!
//! [block][KV head][keys, values]. The keys of a block are [dim pair][token][2], so that a vector holds one pair of dims of 16 tokens
//! and scores need no horizontal sums. The values are [token pair][dim][2], so that a vector holds 16 dims of two tokens. Values that
//! are a prefix of their keys (latent attention) are not stored; readers reorder the keys instead.

use crate::element::Element;
use crate::pool::{Executor, Source, Target};
use crate::simd::LANES;
use std::arch::x86_64::*;

/// Tokens per block.
pub(crate) const BLOCK: usize = 16;

/// The attention heads on this rank.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    /// Elements per query and key head; a multiple of 16.
    pub(crate) head_dim: usize,
    /// Elements per value and output head; a multiple of 16.
    pub(crate) value_dim: usize,
    /// Whether values are the first `value_dim` elements of keys.
    pub(crate) values_in_keys: bool,
    /// Factor of q·k.
    pub(crate) scale: f32,
}

/// Keys [tokens, KV heads, head_dim] and values [tokens, KV heads, value_dim] to store, and a slot per token. Strides are in
/// elements, from token to token. The values are ignored when `Layout::values_in_keys`.
#[derive(Clone, Copy)]
pub(crate) struct NewTokens {
    pub(crate) keys: Source<Element>,
    pub(crate) keys_stride: usize,
    pub(crate) values: Source<Element>,
    pub(crate) values_stride: usize,
    pub(crate) slots: Source<i64>,
    pub(crate) num_tokens: usize,
}

impl Layout {
    /// Query heads per KV head.
    pub(crate) fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Elements of one block's keys for one KV head.
    pub(crate) fn block_keys(&self) -> usize {
        BLOCK * self.head_dim
    }

    /// Offset of a block's keys for a KV head, in elements; stored values follow them.
    pub(crate) fn offset(&self, block: usize, kv_head: usize) -> usize {
        let values = if self.values_in_keys { 0 } else { BLOCK * self.value_dim };
        (block * self.num_kv_heads + kv_head) * (self.block_keys() + values)
    }

    /// Stores new keys and values in their slots.
    ///
    /// # Safety
    /// All pointers must be valid for the stated shapes. Slots must be distinct and inside the cache.
    pub(crate) unsafe fn write(&self, executor: &impl Executor, cache: Target<Element>, tokens: NewTokens) {
        // Two threads may write to the same vector of values; masked stores touch only their own elements.
        executor.for_ranges(tokens.num_tokens, 64, |range| {
            for token in range {
                // SAFETY: the caller vouches for the addresses.
                unsafe { self.write_token(cache, &tokens, token) };
            }
        });
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    pub(crate) unsafe fn write_token(&self, cache: Target<Element>, tokens: &NewTokens, token: usize) {
        // SAFETY: the caller of `write` vouches for all addresses.
        unsafe {
            let slot = *tokens.slots.at(token) as usize;
            let (block, place) = (slot / BLOCK, slot % BLOCK);
            for kv_head in 0..self.num_kv_heads {
                let key = tokens.keys.at(token * tokens.keys_stride + kv_head * self.head_dim);
                let keys = cache.at(self.offset(block, kv_head));
                for pair in 0..self.head_dim / 2 {
                    let both = key.add(pair * 2).cast::<u32>().read_unaligned();
                    keys.add((pair * BLOCK + place) * 2).cast::<u32>().write_unaligned(both);
                }
                if self.values_in_keys {
                    continue;
                }
                let value = tokens.values.at(token * tokens.values_stride + kv_head * self.value_dim);
                let values = keys.add(self.block_keys() + place / 2 * self.value_dim * 2);
                for dim in (0..self.value_dim).step_by(LANES) {
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

/// Copies the values at the start of a block's keys, in value order.
///
/// # Safety
/// `keys` must point to a block's keys, `values` to BLOCK · `value_dim` writable elements.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn reorder_values(keys: *const Element, value_dim: usize, values: *mut Element) {
    /// Shuffle of two dims of two tokens: the first dim of both tokens, then the second dim of both.
    const BY_DIM: i64 = 0x0706_0302_0504_0100;
    let by_dim = _mm512_add_epi64(_mm512_set1_epi64(BY_DIM), _mm512_setr_epi64(0, EIGHT, 0, EIGHT, 0, EIGHT, 0, EIGHT));
    // Eight dim pairs at a time: [dim pair][token pair] of 64 bits, transposed.
    for first in (0..value_dim / 2).step_by(8) {
        // SAFETY: guaranteed by the caller; `value_dim` is a multiple of 16.
        unsafe {
            let rows: [__m512i; 8] = std::array::from_fn(|index| {
                _mm512_shuffle_epi8(load_pairs(keys.add((first + index) * BLOCK * 2)), by_dim)
            });
            for (token_pair, column) in transpose(rows).into_iter().enumerate() {
                _mm512_storeu_si512(values.add((token_pair * value_dim + first * 2) * 2).cast(), column);
            }
        }
    }
}

/// Added to each byte of the second half of a shuffle's lane, so that it selects from that half.
const EIGHT: i64 = 0x0808_0808_0808_0808;

/// Transposes 8 × 8 elements of 64 bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn transpose(rows: [__m512i; 8]) -> [__m512i; 8] {
    let mut columns = rows;
    for odd in 0..2 {
        // For each two rows: every second element, side by side.
        let [a, b, c, d]: [__m512i; 4] = std::array::from_fn(|index| {
            let (upper, lower) = (rows[2 * index], rows[2 * index + 1]);
            if odd == 0 { _mm512_unpacklo_epi64(upper, lower) } else { _mm512_unpackhi_epi64(upper, lower) }
        });
        let (ab_low, cd_low) = (_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0x44>(c, d));
        let (ab_high, cd_high) = (_mm512_shuffle_i64x2::<0xee>(a, b), _mm512_shuffle_i64x2::<0xee>(c, d));
        columns[odd] = _mm512_shuffle_i64x2::<0x88>(ab_low, cd_low);
        columns[odd + 2] = _mm512_shuffle_i64x2::<0xdd>(ab_low, cd_low);
        columns[odd + 4] = _mm512_shuffle_i64x2::<0x88>(ab_high, cd_high);
        columns[odd + 6] = _mm512_shuffle_i64x2::<0xdd>(ab_high, cd_high);
    }
    columns
}

/// Loads a vector: one dim pair of 16 tokens' keys, or 16 dims of two tokens' values.
///
/// # Safety
/// 64 bytes must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn load_pairs(address: *const Element) -> __m512i {
    // SAFETY: guaranteed by the caller.
    unsafe { _mm512_loadu_si512(address.cast()) }
}

/// Like `load_pairs`, with the second element of each pair replaced by zero, because its token does not exist.
///
/// # Safety
/// As for `load_pairs`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(super) unsafe fn load_first_of_pairs(address: *const Element) -> __m512i {
    // SAFETY: guaranteed by the caller.
    unsafe { _mm512_maskz_loadu_epi16(0x5555_5555, address.cast()) }
}
