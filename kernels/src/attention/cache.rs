//! The layout of one layer's KV cache, and writes to it.
//!
//! [block][KV head][keys, values]. The keys of a block are [dim group][token][GROUP], so that a vector holds one group of dims of 16
//! tokens and scores need no horizontal sums. The values are [token group][dim][GROUP], so that a vector holds 16 dims of a group of
//! tokens. Values that are a prefix of their keys (latent attention) are not stored; readers reorder the keys instead. A cache in
//! fp8 has the same order of numbers; readers turn a tile's blocks into elements.

use super::shape::MAX_DIM;
use crate::element::{Element, FLOAT8S, GROUP};
use crate::pool::{Executor, Source, Target};
use crate::product::STEP;
use crate::simd::{F32, Float8, I32, LANES, U16, prefetch};
use std::array::from_fn;

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
    /// How the cache stores numbers; `None`: as elements.
    pub(crate) fp8: Option<Float8>,
}

/// Scales of a layer's keys and values, which are divided by them when they are stored; 1 unless the cache is in fp8.
/// Values in keys have the scale of the keys.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub(crate) struct KvScales {
    pub(crate) keys: f64,
    pub(crate) values: f64,
}

impl Default for KvScales {
    fn default() -> KvScales {
        KvScales { keys: 1.0, values: 1.0 }
    }
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
    pub(crate) scales: KvScales,
}

impl Layout {
    /// Query heads per KV head.
    pub(crate) fn group(&self) -> usize {
        self.num_heads / self.num_kv_heads
    }

    /// Bytes of a stored number.
    pub(crate) fn number_bytes(&self) -> usize {
        if self.fp8.is_some() { 1 } else { size_of::<Element>() }
    }

    /// Numbers of one block's keys for one KV head.
    pub(crate) fn block_keys(&self) -> usize {
        BLOCK * self.head_dim
    }

    /// Offset of a block's keys for a KV head, in numbers; stored values follow them.
    pub(crate) fn offset(&self, block: usize, kv_head: usize) -> usize {
        let values = if self.values_in_keys { 0 } else { BLOCK * self.value_dim };
        (block * self.num_kv_heads + kv_head) * (self.block_keys() + values)
    }

    /// Stores new keys and values in their slots.
    ///
    /// # Safety
    /// All pointers must be valid for the stated shapes. Slots must be distinct and inside the cache.
    pub(crate) unsafe fn write(&self, executor: &impl Executor, cache: Target<u8>, tokens: NewTokens) {
        // Two threads may write to the same group of values, but each writes its own elements only.
        executor.for_ranges(tokens.num_tokens, 64, |range| {
            for token in range {
                // SAFETY: the caller vouches for the addresses.
                unsafe { self.write_token(cache, &tokens, token) };
            }
        });
    }

    /// # Safety
    /// As for `write`.
    pub(crate) unsafe fn write_token(&self, cache: Target<u8>, tokens: &NewTokens, token: usize) {
        // SAFETY: the caller of `write` vouches for all addresses.
        unsafe {
            let slot = *tokens.slots.at(token) as usize;
            let (block, place) = (slot / BLOCK, slot % BLOCK);
            for kv_head in 0..self.num_kv_heads {
                let key = tokens.keys.at(token * tokens.keys_stride + kv_head * self.head_dim);
                let value = tokens.values.at(token * tokens.values_stride + kv_head * self.value_dim);
                let keys = cache.at(self.offset(block, kv_head) * self.number_bytes());
                if let Some(format) = self.fp8 {
                    let mut bytes = [0; MAX_DIM];
                    encode(format, tokens.scales.keys, key, &mut bytes[..self.head_dim]);
                    place_key(bytes.as_ptr(), self.head_dim, keys, place);
                    if !self.values_in_keys {
                        let values = keys.add(self.block_keys() + self.value_place(place));
                        encode(format, tokens.scales.values, value, &mut bytes[..self.value_dim]);
                        for (dim, byte) in bytes[..self.value_dim].iter().enumerate() {
                            values.add(dim * GROUP).write(*byte);
                        }
                    }
                    continue;
                }
                let keys = keys.cast::<Element>();
                place_key(key, self.head_dim, keys, place);
                if self.values_in_keys {
                    continue;
                }
                let values = keys.add(self.block_keys() + self.value_place(place));
                if GROUP == 1 {
                    values.copy_from_nonoverlapping(value, self.value_dim);
                    continue;
                }
                for dim in (0..self.value_dim).step_by(LANES) {
                    U16::load(value.add(dim).cast()).store_apart(values.add(dim * GROUP).cast());
                }
            }
        }
    }

    /// Offset of the first dim of a token's value, in numbers from the start of its block's values. `place`: index of
    /// the token in the block.
    fn value_place(&self, place: usize) -> usize {
        place / GROUP * GROUP * self.value_dim + place % GROUP
    }

    /// Turns a block's keys and its values, if they are stored, from fp8 into elements, in the same order. `next` is what will be
    /// read next; it may be any address.
    ///
    /// # Safety
    /// `block` must point to a KV head's part of a block, `elements` to as many writable elements.
    pub(super) unsafe fn widen(&self, format: Float8, block: *const u8, next: *const u8, elements: *mut Element) {
        let count = self.offset(1, 0) / self.num_kv_heads;
        // SAFETY: guaranteed by the caller; a block has a multiple of 256 numbers.
        unsafe {
            // PERF: a loop for each format, with its shifts and tables as constants.
            match format {
                Float8::E4m3fn => widen(Float8::E4m3fn, count, block, next, elements),
                Float8::E5m2 => widen(Float8::E5m2, count, block, next, elements),
            }
        }
    }
}

/// Like `Layout::widen`, for `count` numbers.
///
/// # Safety
/// As for `Layout::widen`.
#[inline(always)]
unsafe fn widen(format: Float8, count: usize, block: *const u8, next: *const u8, elements: *mut Element) {
    for first in (0..count).step_by(FLOAT8S) {
        prefetch(next.wrapping_add(first));
        // SAFETY: guaranteed by the caller.
        unsafe { Element::store_float8(format, block.add(first), elements.add(first)) };
    }
}

/// Turns a head's elements, divided by the scale, into fp8.
///
/// # Safety
/// There must be as many elements as bytes, a multiple of LANES.
unsafe fn encode(format: Float8, scale: f64, elements: *const Element, bytes: &mut [u8]) {
    let factor = F32::splat((1.0 / scale) as f32);
    for (index, bytes) in bytes.chunks_exact_mut(LANES).enumerate() {
        // SAFETY: guaranteed by the caller.
        unsafe { format.store(Element::load(elements.add(index * LANES)) * factor, bytes.as_mut_ptr()) };
    }
}

/// Copies a token's key to its place among the keys of a block.
///
/// # Safety
/// The addresses must be those of a key and of a block's keys.
unsafe fn place_key<T>(key: *const T, head_dim: usize, keys: *mut T, place: usize) {
    for group in 0..head_dim / GROUP {
        // SAFETY: guaranteed by the caller.
        unsafe {
            keys.add((group * BLOCK + place) * GROUP).copy_from_nonoverlapping(key.add(group * GROUP), GROUP);
        }
    }
}

/// Copies the values at the start of a block's keys, in value order.
///
/// # Safety
/// `keys` must point to a block's keys, `values` to BLOCK · `value_dim` writable elements.
pub(super) unsafe fn reorder_values(keys: *const Element, value_dim: usize, values: *mut Element) {
    // SAFETY: guaranteed by the caller; `value_dim` is a multiple of LANES.
    unsafe {
        if GROUP == 1 {
            for first in (0..value_dim).step_by(LANES * STEP) {
                // A vector may have twice the dims that are left.
                let rows = from_fn(|index| dims_of_tokens(keys, (first + index * STEP).min(value_dim - STEP)));
                for (token, dims) in I32::transpose(rows).into_iter().enumerate() {
                    let (dims, target) = (dims.to_array(), values.add(token * value_dim + first));
                    target.copy_from_nonoverlapping(dims.as_ptr().cast(), (LANES * STEP).min(value_dim - first));
                }
            }
        } else {
            for first in (0..value_dim).step_by(LANES) {
                // Pairs of dims of two tokens become pairs of tokens of two dims.
                let rows = from_fn(|index| dims_of_tokens(keys, first + index * STEP).swap_inner_words());
                for (pair, dims) in I32::transpose_pairs(rows).into_iter().enumerate() {
                    dims.store(values.add(pair * GROUP * value_dim + first * GROUP).cast());
                }
            }
        }
    }
}

/// `STEP` dims of a block's 16 tokens, side by side for each token.
///
/// # Safety
/// The dims must be readable.
#[inline(always)]
unsafe fn dims_of_tokens(keys: *const Element, dim: usize) -> I32 {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let keys = keys.add(dim * BLOCK);
        if STEP == GROUP {
            return I32::load(keys.cast());
        }
        U16::load(keys.cast()).widen() | U16::load(keys.add(BLOCK).cast()).widen().shift_left(16)
    }
}
