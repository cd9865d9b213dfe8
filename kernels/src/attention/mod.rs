//! Variable-length attention over a paged KV cache: prefill chunks and decodes in one call.
//!
//! INVARIANT: a query row's arithmetic depends only on its own position. Tiles of 64 context tokens and segments of 256 have
//! absolute positions, invisible tokens contribute exact zeros, and segments are merged in order. A row therefore has the same bits
//! alone or in a batch, chunked or not, and however its segments were distributed over threads.
//!
//! INVARIANT: blocks before the first visible position of a step's queries are not read, because they may belong to another
//! sequence by now.

#[cfg_attr(not(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32")))), path = "no_amx.rs")]
mod amx;
mod buffer;
mod cache;
mod plan;
mod score;
mod shape;
mod softmax;
mod tile;
mod unit;

pub(crate) use cache::{BLOCK, KvScales, Layout, NewTokens};
pub(crate) use shape::{Alibi, Attention, AttentionMask, DistanceBias, MAX_DIM, Part};

use crate::element::Element;
use crate::pool::{Executor, Source, Target};
use plan::{Plan, Unit};
use unit::Call;

/// Context tokens per softmax update.
const TILE: usize = 64;
/// Context tokens per separate softmax state.
const SEGMENT: usize = 256;

/// The sequences of one call, as in Python's `StepBatch`.
#[derive(Clone, Copy)]
pub(crate) struct Batch {
    pub(crate) query_starts: Source<i32>,
    pub(crate) context_lens: Source<i32>,
    pub(crate) block_tables: Source<i32>,
    /// Columns of `block_tables`.
    pub(crate) max_blocks: usize,
    pub(crate) num_sequences: usize,
    /// Number of source tokens of each sequence; `None` for models without an encoder.
    pub(crate) source_lens: Option<Source<i32>>,
    /// The end of the interval that each token sees, instead of its own position. Ascends within a sequence, up to its
    /// context; with `Part::Context` only.
    pub(crate) ends: Option<Source<i32>>,
}

/// Queries [tokens, heads, head_dim], `stride` elements from token to token, the layer's cache, and the contiguous output
/// [tokens, heads, value_dim].
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) queries: Source<Element>,
    pub(crate) stride: usize,
    pub(crate) cache: Source<u8>,
    pub(crate) output: Target<Element>,
    /// One score per head that joins the softmax without a value.
    pub(crate) sinks: Option<Source<Element>>,
    /// Present exactly when `Attention::has_relative_bias`.
    pub(crate) bias: Option<DistanceBias>,
    /// The scales that keys and values were written with.
    pub(crate) scales: KvScales,
}

/// The work units of a batch's attention; the same for every layer.
pub(crate) struct Work {
    plan: Plan,
    merges: Vec<Unit>,
}

impl Work {
    /// Floats that `Attention::attend` needs for partial states.
    pub(crate) fn room_floats(&self) -> usize {
        self.plan.partial_floats
    }
}

impl Attention {
    /// Divides a batch into units for `num_threads` threads.
    ///
    /// # Safety
    /// The batch's pointers must be valid for the stated sizes.
    pub(crate) unsafe fn plan(&self, batch: &Batch, num_threads: usize) -> Work {
        // SAFETY: guaranteed by the caller.
        let plan = unsafe { Plan::make(self, batch, num_threads) };
        let is_merge = |unit: &&Unit| unit.partial.is_some() && unit.first_segment == unit.segments(&self.mask).start;
        let merges = plan.units.iter().filter(is_merge).copied().collect();
        Work { plan, merges }
    }

    /// Computes the attention of all queries of a batch. `room` points to `work.room_floats()` floats.
    ///
    /// # Safety
    /// The batch and the operands must be consistent: every block id is inside the cache, every visible token was written.
    pub(crate) unsafe fn attend(
        &self,
        executor: &impl Executor,
        work: &Work,
        batch: &Batch,
        operands: &Operands,
        room: Target<f32>,
    ) {
        let call = Call { attention: self, batch, operands };
        // SAFETY: guaranteed by the caller.
        unsafe {
            if self.is_plain() && batch.ends.is_none() {
                call.run::<true>(executor, work, room);
            } else {
                call.run::<false>(executor, work, room);
            }
        }
    }
}

impl Call<'_> {
    /// `PLAIN` is an instantiation for causal attention without any other feature.
    unsafe fn run<const PLAIN: bool>(&self, executor: &impl Executor, work: &Work, room: Target<f32>) {
        let (units, num_threads) = (&work.plan.units, executor.num_threads());
        executor.for_each(units.len(), |index| {
            let following = &units[(index + num_threads).min(units.len() - 1)];
            // SAFETY: the caller vouches for the operands; units are disjoint in output rows or in their partial results.
            unsafe { unit::run::<PLAIN>(self, &units[index], following, room) };
        });
        if !work.merges.is_empty() {
            executor.for_each(work.merges.len(), |index| {
                // SAFETY: the loop above wrote all partial results of the unit's rows.
                unsafe { unit::merge_partials::<PLAIN>(self, &work.merges[index], room) };
            });
        }
    }
}

#[cfg(test)]
mod tests;
