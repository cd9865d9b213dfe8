//! Greedy sampling: the highest logit of each row and its log probability, in one pass over chunks of the vocabulary.
//!
//! INVARIANT: chunks lie at fixed places and are merged in order, so the result does not depend on threads or other rows.

use crate::pool::{Executor, Source, Target};
use crate::simd::{self, LANES};
use std::arch::x86_64::*;

/// Logits of one part of the work: 8 KiB, which stay in the first-level cache for the second look.
const CHUNK: usize = 4096;

/// What a chunk says about its logits.
#[derive(Clone, Copy)]
struct Summary {
    maximum: f32,
    /// The lowest index of the maximum.
    index: usize,
    /// Of e to the power of each logit's distance to the maximum.
    sum: f32,
    has_nan: bool,
}

const NOTHING: Summary = Summary { maximum: f32::NEG_INFINITY, index: 0, sum: 0.0, has_nan: false };

/// Logits [num_rows, vocab] in bf16, contiguous, to the index of each row's maximum (the lowest of equals) and its log probability.
/// A row that contains NaN gets the index -1 and the log probability NaN.
///
/// # Safety
/// The addresses must have `num_rows` rows, and the CPU be `supported()`.
pub unsafe fn argmax_logprob(
    executor: &impl Executor,
    logits: Source<u16>,
    num_rows: usize,
    vocab: usize,
    ids: Target<i64>,
    logprobs: Target<f32>,
) {
    let num_chunks = vocab.div_ceil(CHUNK);
    let mut summaries = vec![NOTHING; num_rows * num_chunks];
    let room = Target::new(summaries.as_mut_ptr());
    executor.for_each(num_rows * num_chunks, |part| {
        let (row, chunk) = (part / num_chunks, part % num_chunks);
        let first = chunk * CHUNK;
        // SAFETY: the chunk lies inside the row; each part writes its own summary.
        unsafe { room.at(part).write(summarize(logits.at(row * vocab + first), first, CHUNK.min(vocab - first))) };
    });
    for row in 0..num_rows {
        let parts = &summaries[row * num_chunks..(row + 1) * num_chunks];
        let total = parts.iter().fold(NOTHING, |total, part| if part.maximum > total.maximum { *part } else { total });
        let sum: f32 = parts.iter().map(|part| part.sum * (part.maximum - total.maximum).exp()).sum();
        let has_nan = parts.iter().any(|part| part.has_nan);
        // SAFETY: there is room for `num_rows` results.
        unsafe {
            ids.at(row).write(if has_nan { -1 } else { total.index as i64 });
            logprobs.at(row).write(if has_nan { f32::NAN } else { -sum.ln() });
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn summarize(logits: *const u16, offset: usize, count: usize) -> Summary {
    let lowest = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut best = lowest;
    let mut best_at = _mm512_setzero_si512();
    let mut nans: __mmask16 = 0;
    for first in (0..count).step_by(LANES) {
        let mask = simd::first_lanes(count - first);
        // SAFETY: the mask ends with the chunk.
        let x = unsafe { simd::load_bf16_masked(logits.add(first), mask) };
        let higher = _mm512_mask_cmp_ps_mask::<_CMP_GT_OQ>(mask, x, best);
        nans |= _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
        best = _mm512_mask_mov_ps(best, higher, x);
        best_at = _mm512_mask_mov_epi32(best_at, higher, _mm512_set1_epi32(first as i32));
    }
    let maximum = _mm512_reduce_max_ps(best);
    let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    let holders = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(best, _mm512_set1_ps(maximum));
    let index = _mm512_mask_reduce_min_epi32(holders, _mm512_add_epi32(best_at, lanes)) as usize;
    let scale = _mm512_set1_ps(std::f32::consts::LOG2_E);
    let mut sum = _mm512_setzero_ps();
    for first in (0..count).step_by(LANES) {
        let mask = simd::first_lanes(count - first);
        // SAFETY: as above.
        let x = unsafe { simd::load_bf16_masked(logits.add(first), mask) };
        let distance = _mm512_mul_ps(_mm512_sub_ps(x, _mm512_set1_ps(maximum)), scale);
        sum = _mm512_mask_add_ps(sum, mask, sum, simd::exp2(distance));
    }
    let sum = if maximum == f32::NEG_INFINITY { 0.0 } else { _mm512_reduce_add_ps(sum) };
    Summary { maximum, index: offset + index, sum, has_nan: nans != 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Random, spawning_pool, to_bf16, to_f32};

    fn run(logits: &[u16], vocab: usize) -> Vec<(i64, f32)> {
        let num_rows = logits.len() / vocab;
        let (mut ids, mut logprobs) = (vec![0; num_rows], vec![0.0; num_rows]);
        let (ids_at, logprobs_at) = (Target::new(ids.as_mut_ptr()), Target::new(logprobs.as_mut_ptr()));
        // SAFETY: sizes as made.
        unsafe {
            argmax_logprob(&spawning_pool(2), Source::new(logits.as_ptr()), num_rows, vocab, ids_at, logprobs_at);
        }
        ids.into_iter().zip(logprobs).collect()
    }

    #[test]
    fn the_lowest_index_of_the_maximum_wins() {
        if !crate::supported() {
            return;
        }
        for vocab in [1, 5, 16, 4096, 4097, 10_000] {
            let logits = Random::new(vocab as u64).bf16s(vocab * 3);
            for (row, (id, logprob)) in logits.chunks(vocab).zip(run(&logits, vocab)) {
                let maximum = row.iter().map(|&x| to_f32(x)).fold(f32::MIN, f32::max);
                assert_eq!(id as usize, row.iter().position(|&x| to_f32(x) == maximum).unwrap());
                let sum: f64 = row.iter().map(|&x| f64::from(to_f32(x) - maximum).exp()).sum();
                assert!((f64::from(logprob) + sum.ln()).abs() < 1e-5, "{logprob} is not {}", -sum.ln());
            }
        }
    }

    #[test]
    fn nan_is_flagged_and_hidden_logits_have_no_probability() {
        if !crate::supported() {
            return;
        }
        let vocab = 9000;
        let mut logits = vec![to_bf16(f32::NEG_INFINITY); 3 * vocab];
        logits[7000] = to_bf16(2.0);
        logits[vocab + 3] = to_bf16(f32::NAN);
        logits[2 * vocab + 8999] = to_bf16(-1.0);
        logits[2 * vocab + 1] = to_bf16(-1.0);
        let results = run(&logits, vocab);
        assert_eq!(results[0], (7000, 0.0));
        assert_eq!(results[1].0, -1);
        assert!(results[1].1.is_nan());
        assert_eq!(results[2].0, 1);
        assert!((results[2].1 + 2f32.ln()).abs() < 1e-6);
    }
}
