//! Causal attention of varlen queries over a paged cache, prefill chunks and decodes in one call.
//!
//! INVARIANT: a query row's arithmetic depends only on its own position: tiles of 64 context tokens and segments of 256 lie at
//! absolute places, tokens after the row count as exact zeros, and segments are merged in order. So a row has the same bits
//! alone or in a batch, chunked or not, and whether or not its segments were computed by different threads.

mod cache;
mod plan;
mod softmax;
mod tile;
mod unit;

pub use cache::{BLOCK, Layout, NewTokens};

use crate::pool::{Pool, Source, Target};
use plan::Unit;

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
}

/// The queries, [tokens, heads, head_dim] with tokens `stride` numbers apart, the layer's cache, and room for the result
/// [tokens, heads, head_dim], contiguous.
#[derive(Clone, Copy)]
pub struct Operands {
    pub queries: Source<u16>,
    pub stride: usize,
    pub cache: Source<u16>,
    pub output: Target<u16>,
}

impl Layout {
    /// Attend all queries of a batch.
    ///
    /// # Safety
    /// The batch's arrays must be consistent with each other and the operands: every block named lies inside the cache, every token of a
    /// context was written. The CPU must be `supported()`.
    pub unsafe fn attend(&self, pool: &Pool, batch: &Batch, operands: &Operands) {
        // SAFETY: the caller vouches for the batch.
        let plan = unsafe { plan::Plan::make(self, batch, pool.num_threads()) };
        let mut partials = vec![0.0f32; plan.partial_floats];
        let room = Target::new(partials.as_mut_ptr());
        pool.for_each(plan.units.len(), |index| {
            let unit = &plan.units[index];
            // SAFETY: the caller's word; units are disjoint in output rows or in their partial results.
            unsafe { unit::run(self, batch, operands, unit, room) };
        });
        let merged: Vec<&Unit> =
            plan.units.iter().filter(|unit| unit.partial.is_some() && unit.first_segment == 0).collect();
        for unit in merged {
            // SAFETY: all partial results of the unit's rows were written by the section above.
            unsafe { unit::merge_partials(self, batch, operands, unit, room) };
        }
    }
}

#[cfg(test)]
mod tests;
