//! Greedy sampling: the highest logit of each row and its log probability, in one pass over chunks of the vocabulary, optionally
//! among the tokens that a row's mask allows.
//!
//! INVARIANT: chunks have fixed positions and are merged in order, so the result does not depend on threads or other rows.

use crate::element::Element;
use crate::pool::{Executor, Source, Target};
use crate::simd::{F32, I32, LANES, Mask};

/// Logits per part of the work: 8 KiB, which stay in the first-level cache for the second pass. A multiple of `LANES`.
const CHUNK: usize = 4096;

/// The summary of one chunk.
#[derive(Clone, Copy)]
struct Summary {
    maximum: f32,
    /// The lowest index of the maximum.
    index: usize,
    /// Sum of exp(logit - maximum).
    sum: f32,
    is_broken: bool,
}

const NOTHING: Summary = Summary { maximum: f32::NEG_INFINITY, index: 0, sum: 0.0, is_broken: false };

/// Contiguous logits, and the tokens that may be chosen.
pub(crate) struct Logits {
    /// [num_rows, vocab]
    pub(crate) address: Source<Element>,
    pub(crate) num_rows: usize,
    pub(crate) vocab: usize,
    /// `[num_rows]`: address of each row's mask (32-bit words, one bit per token, lowest bit first), where 0 allows every token. Null
    /// when no row has a mask.
    pub(crate) masks: Source<usize>,
}

impl Logits {
    /// A row's mask from token `first` on, which is a multiple of `LANES`; null without a mask.
    unsafe fn mask(&self, row: usize, first: usize) -> *const u16 {
        if self.masks.at(0).is_null() {
            return std::ptr::null();
        }
        // SAFETY: the caller vouches for an address of each row.
        let mask = unsafe { self.masks.at(row).read() } as *const u16;
        if mask.is_null() { mask } else { mask.wrapping_add(first / LANES) }
    }
}

/// Writes the index of each row's highest allowed logit (the lowest index of equals) and its log probability among the allowed
/// tokens. A row with a NaN or +infinity anywhere, or without an allowed token, gets the index -1 and NaN.
///
/// # Safety
/// The pointers must be valid for `num_rows` rows.
pub(crate) unsafe fn argmax_logprob(
    executor: &impl Executor,
    logits: &Logits,
    ids: Target<i64>,
    logprobs: Target<f32>,
) {
    let &Logits { address, num_rows, vocab, .. } = logits;
    let num_chunks = vocab.div_ceil(CHUNK);
    let mut summaries = vec![NOTHING; num_rows * num_chunks];
    let room = Target::new(summaries.as_mut_ptr());
    executor.for_each(num_rows * num_chunks, |part| {
        let (row, chunk) = (part / num_chunks, part % num_chunks);
        let first = chunk * CHUNK;
        let count = CHUNK.min(vocab - first);
        // SAFETY: the chunk is inside the row; each part writes its own summary.
        unsafe {
            room.at(part).write(summarize(address.at(row * vocab + first), logits.mask(row, first), first, count));
        }
    });
    for row in 0..num_rows {
        let parts = &summaries[row * num_chunks..(row + 1) * num_chunks];
        let total = parts.iter().fold(NOTHING, |total, part| if part.maximum > total.maximum { *part } else { total });
        let sum: f32 = parts.iter().map(|part| part.sum * (part.maximum - total.maximum).exp()).sum();
        let is_broken = parts.iter().any(|part| part.is_broken) || total.maximum == f32::NEG_INFINITY;
        // SAFETY: there is room for `num_rows` results.
        unsafe {
            ids.at(row).write(if is_broken { -1 } else { total.index as i64 });
            logprobs.at(row).write(if is_broken { f32::NAN } else { -sum.ln() });
        }
    }
}

unsafe fn summarize(logits: *const Element, mask: *const u16, offset: usize, count: usize) -> Summary {
    // SAFETY: the mask has a bit for every token, in whole 32-bit words.
    let allowed = |first: usize| if mask.is_null() { 0xffff } else { unsafe { mask.add(first / LANES).read() } };
    let mut best = F32::splat(f32::NEG_INFINITY);
    let mut best_at = I32::splat(0);
    let mut are_below_infinity = Mask::first(LANES);
    for first in (0..count).step_by(LANES) {
        // SAFETY: the lanes do not exceed the chunk.
        let x = unsafe { Element::load_first(logits.add(first), count - first) };
        let higher = x.greater(best) & Mask::first(count - first) & Mask::from_bits(allowed(first));
        are_below_infinity = are_below_infinity & F32::splat(f32::INFINITY).greater(x); // also of masked tokens
        best = x.select(higher, best);
        best_at = I32::splat(first as i32).select(higher, best_at);
    }
    let maximum = best.reduce_max();
    let is_broken = are_below_infinity.bits() != 0xffff;
    if is_broken || maximum == f32::NEG_INFINITY {
        return Summary { is_broken, ..NOTHING };
    }
    let places = (best_at + I32::lane_numbers()).to_array();
    let holders = places.iter().zip(best.to_array()).filter(|&(_, best)| best == maximum);
    let index = holders.map(|(&place, _)| place as usize).min().unwrap_or(0);
    let (shift, scale) = (F32::splat(maximum), F32::splat(std::f32::consts::LOG2_E));
    let mut sum = F32::splat(0.0);
    for first in (0..count).step_by(LANES) {
        let lanes = Mask::first(count - first) & Mask::from_bits(allowed(first));
        if lanes.bits() == 0 {
            continue; // common where a grammar allows few tokens
        }
        // SAFETY: as above.
        let x = unsafe { Element::load_first(logits.add(first), count - first) };
        sum = (sum + ((x - shift) * scale).exp2()).select(lanes, sum);
    }
    Summary { maximum, index: offset + index, sum: sum.reduce_sum(), is_broken: false }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, spawning_pool};

    fn run(logits: &[Element], vocab: usize) -> Vec<(i64, f32)> {
        run_masked(logits, vocab, &[])
    }

    fn run_masked(logits: &[Element], vocab: usize, masks: &[Option<Vec<u32>>]) -> Vec<(i64, f32)> {
        let num_rows = logits.len() / vocab;
        let (mut ids, mut logprobs) = (vec![0; num_rows], vec![0.0; num_rows]);
        let (ids_at, logprobs_at) = (Target::new(ids.as_mut_ptr()), Target::new(logprobs.as_mut_ptr()));
        let masks: Vec<usize> =
            masks.iter().map(|mask| mask.as_ref().map_or(0, |words| words.as_ptr() as usize)).collect();
        let masks = Source::new(if masks.is_empty() { std::ptr::null() } else { masks.as_ptr() });
        let logits = Logits { address: Source::new(logits.as_ptr()), num_rows, vocab, masks };
        // SAFETY: sizes as made.
        unsafe { argmax_logprob(&spawning_pool(2), &logits, ids_at, logprobs_at) };
        ids.into_iter().zip(logprobs).collect()
    }

    fn is_allowed(words: &[u32], id: usize) -> bool {
        words[id / 32] >> (id % 32) & 1 == 1
    }

    #[test]
    fn the_lowest_index_of_the_maximum_wins() {
        for vocab in [1, 5, 16, 4096, 4097, 10_000] {
            let logits = Random::new(vocab as u64).elements(vocab * 3);
            for (row, (id, logprob)) in logits.chunks(vocab).zip(run(&logits, vocab)) {
                let maximum = row.iter().map(|&x| Element::to_f32(x)).fold(f32::MIN, f32::max);
                assert_eq!(id as usize, row.iter().position(|&x| Element::to_f32(x) == maximum).unwrap());
                let sum: f64 = row.iter().map(|&x| f64::from(Element::to_f32(x) - maximum).exp()).sum();
                assert!((f64::from(logprob) + sum.ln()).abs() < 1e-5, "{logprob} is not {}", -sum.ln());
            }
        }
    }

    #[test]
    fn nan_is_flagged_and_hidden_logits_have_no_probability() {
        let vocab = 9000;
        let mut logits = vec![Element::from_f32(f32::NEG_INFINITY); 3 * vocab];
        logits[7000] = Element::from_f32(2.0);
        logits[vocab + 3] = Element::from_f32(f32::NAN);
        logits[2 * vocab + 8999] = Element::from_f32(-1.0);
        logits[2 * vocab + 1] = Element::from_f32(-1.0);
        let results = run(&logits, vocab);
        assert_eq!(results[0], (7000, 0.0));
        assert_eq!(results[1].0, -1);
        assert!(results[1].1.is_nan());
        assert_eq!(results[2].0, 1);
        assert!((results[2].1 + 2f32.ln()).abs() < 1e-6);
    }

    #[test]
    fn a_mask_counts_as_logits_of_minus_infinity_bit_for_bit() {
        for vocab in [1, 5, 31, 33, 4096, 4097, 10_000] {
            let mut random = Random::new(vocab as u64);
            let logits = random.elements(vocab * 4);
            // dense, sparse, only the last token, and no mask
            let mut masks: Vec<Option<Vec<u32>>> = [0xffff_ffff_u32, 0x8100_0001]
                .iter()
                .map(|bits| Some((0..vocab.div_ceil(32)).map(|_| random.next() as u32 & bits).collect()))
                .collect();
            let mut last = vec![0; vocab.div_ceil(32)];
            last[(vocab - 1) / 32] = 1 << ((vocab - 1) % 32);
            masks.extend([Some(last), None]);
            let mut hidden = logits.clone();
            for (row, mask) in masks.iter().enumerate() {
                for id in 0..vocab {
                    if mask.as_ref().is_some_and(|words| !is_allowed(words, id)) {
                        hidden[row * vocab + id] = Element::from_f32(f32::NEG_INFINITY);
                    }
                }
            }
            let bits = |results: Vec<(i64, f32)>| -> Vec<(i64, u32)> {
                results.into_iter().map(|(id, logprob)| (id, logprob.to_bits())).collect()
            };
            let masked = run_masked(&logits, vocab, &masks);
            assert_eq!(masked[2], (vocab as i64 - 1, 0.0));
            assert_eq!(bits(masked), bits(run(&hidden, vocab)), "{vocab}");
        }
    }

    #[test]
    fn a_row_without_an_allowed_token_and_nan_behind_a_mask_are_flagged() {
        let vocab = 5000;
        let mut logits = Random::new(1).elements(4 * vocab);
        logits[vocab + 4999] = Element::from_f32(f32::NAN);
        logits[2 * vocab + 40] = Element::from_f32(f32::INFINITY);
        let words = |allowed: u32| {
            let mut words = vec![0; vocab.div_ceil(32)];
            words[0] = allowed;
            Some(words)
        };
        let results = run_masked(&logits, vocab, &[words(0), words(1), words(1), words(1 << 7)]);
        for result in &results[..3] {
            assert_eq!(result.0, -1);
            assert!(result.1.is_nan());
        }
        assert_eq!(results[3], (7, 0.0));
    }
}
