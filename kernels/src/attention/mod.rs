//! Attention of varlen queries over a paged cache, prefill chunks and decodes in one call.
//!
//! INVARIANT: a query row's arithmetic depends only on its own position: tiles of 64 context tokens and segments of 256 lie at
//! absolute places, tokens after the row and before what it sees count as exact zeros, and segments are merged in order. So a row
//! has the same bits alone or in a batch, chunked or not, and whether or not its segments were computed by different threads.
//!
//! INVARIANT: blocks before what the first query of a step sees are not read: they may be others' by now.

mod cache;
mod plan;
mod score;
mod shape;
mod softmax;
mod tile;
mod unit;

pub use cache::{BLOCK, Layout, NewTokens};
pub use shape::{Alibi, Attention, DistanceBias, MAX_DIM, Part, Sight};

use crate::pool::{Executor, Source, Target};
use plan::{Plan, Unit};
use unit::Call;

/// Context tokens that are scored before the softmax state is updated once.
const TILE: usize = 64;
/// Context tokens with a softmax state of their own.
const SEGMENT: usize = 256;

/// What the attention of one call looks at. Addresses as in `StepBatch`.
#[derive(Clone, Copy)]
pub struct Batch {
    pub query_starts: Source<i32>,
    pub context_lens: Source<i32>,
    pub block_tables: Source<i32>,
    /// Columns of the block tables.
    pub max_blocks: usize,
    pub num_sequences: usize,
    /// How many of each sequence's tokens are its source's; None: there are no sources.
    pub source_lens: Option<Source<i32>>,
}

/// The queries, [tokens, heads, head_dim] with tokens `stride` numbers apart, the layer's cache, and room for the result
/// [tokens, heads, value_dim], contiguous.
#[derive(Clone, Copy)]
pub struct Operands {
    pub queries: Source<u16>,
    pub stride: usize,
    pub cache: Source<u16>,
    pub output: Target<u16>,
    /// One for each head, bf16: a score that takes part in the softmax and has no value.
    pub sinks: Option<Source<u16>>,
    /// There exactly if the attention has one.
    pub bias: Option<DistanceBias>,
}

/// The units that a batch's attention is cut into, the same for every layer.
pub struct Work {
    plan: Plan,
    merges: Vec<Unit>,
}

impl Work {
    /// Floats that `Attention::attend` needs for states on their way.
    pub fn room_floats(&self) -> usize {
        self.plan.partial_floats
    }
}

impl Attention {
    /// Cut a batch into units for so many threads.
    ///
    /// # Safety
    /// The batch's arrays must be what it says.
    pub unsafe fn plan(&self, batch: &Batch, num_threads: usize) -> Work {
        // SAFETY: the caller's word.
        let plan = unsafe { Plan::make(self, batch, num_threads) };
        let is_merge = |unit: &&Unit| unit.partial.is_some() && unit.first_segment == unit.segments(&self.sight).start;
        let merges = plan.units.iter().filter(is_merge).copied().collect();
        Work { plan, merges }
    }

    /// Attend all queries of a batch. `room` has `work.room_floats()` floats.
    ///
    /// # Safety
    /// The batch's arrays must be consistent with each other and the operands: every block named lies inside the cache, every token of a
    /// context was written. The CPU must be `supported()`.
    pub unsafe fn attend(
        &self,
        executor: &impl Executor,
        work: &Work,
        batch: &Batch,
        operands: &Operands,
        room: Target<f32>,
    ) {
        let call = Call { attention: self, batch, operands };
        // SAFETY: the caller's word.
        unsafe {
            if self.is_plain() {
                call.run::<true>(executor, work, room);
            } else {
                call.run::<false>(executor, work, room);
            }
        }
    }
}

impl Call<'_> {
    /// `PLAIN`: causal attention and nothing else, compiled without what the rest needs.
    unsafe fn run<const PLAIN: bool>(&self, executor: &impl Executor, work: &Work, room: Target<f32>) {
        let (units, num_threads) = (&work.plan.units, executor.num_threads());
        executor.for_each(units.len(), |index| {
            let following = &units[(index + num_threads).min(units.len() - 1)];
            // SAFETY: the caller's word; units are disjoint in output rows or in their partial results.
            unsafe { unit::run::<PLAIN>(self, &units[index], following, room) };
        });
        if !work.merges.is_empty() {
            executor.for_each(work.merges.len(), |index| {
                // SAFETY: all partial results of the unit's rows were written by the work above.
                unsafe { unit::merge_partials::<PLAIN>(self, &work.merges[index], room) };
            });
        }
    }
}

#[cfg(test)]
mod tests;
