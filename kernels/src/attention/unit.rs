//! One unit of work: its rows' softmax state over their segments, then the result.

use super::cache::BLOCK;
use super::plan::{Unit, state_floats};
use super::softmax::State;
use super::tile::{self, BLOCKS, Blocks, ROWS, Weighted};
use super::{Batch, Layout, Operands, SEGMENT, TILE};
use crate::pool::Target;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::cell::RefCell;

thread_local! {
    /// Softmax states of the unit at hand: of all segments so far, and of the current one.
    static STATES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Compute a unit: its output rows, or its partial state.
///
/// # Safety
/// As for `Layout::attend`; `partials` must have the room that the plan asked for.
pub unsafe fn run(layout: &Layout, batch: &Batch, operands: &Operands, unit: &Unit, partials: Target<f32>) {
    let rows = Rows { layout, batch, operands, unit, count: unit.num_tokens * layout.group() };
    // SAFETY: passed on.
    unsafe {
        if let Some(offset) = unit.partial {
            rows.attend_segment(unit.first_segment, State::new(partials.at(offset), rows.count, layout.head_dim));
            return;
        }
        STATES.with_borrow_mut(|memory| {
            let size = state_floats(layout, rows.count);
            if memory.len() < 2 * size {
                memory.resize(2 * size, 0.0);
            }
            let (first, second) = memory.split_at_mut(size);
            let total = State::new(first.as_mut_ptr(), rows.count, layout.head_dim);
            let segment_state = State::new(second.as_mut_ptr(), rows.count, layout.head_dim);
            rows.attend_segment(0, total);
            for segment in 1..unit.end_segment {
                rows.attend_segment(segment, segment_state);
                total.merge(segment_state);
            }
            rows.finish(total);
        });
    }
}

/// Merge what the segments' units left, beginning with `unit`, the first, and write the result.
///
/// # Safety
/// As for `run`; all segments must have been computed.
pub unsafe fn merge_partials(layout: &Layout, batch: &Batch, operands: &Operands, unit: &Unit, partials: Target<f32>) {
    let Some(offset) = unit.partial else { return };
    let rows = Rows { layout, batch, operands, unit, count: unit.num_tokens * layout.group() };
    let size = state_floats(layout, rows.count);
    let total = State::new(partials.at(offset), rows.count, layout.head_dim);
    // SAFETY: passed on.
    unsafe {
        for segment in 1..unit.num_segments() {
            total.merge(State::new(partials.at(offset + segment * size), rows.count, layout.head_dim));
        }
        rows.finish(total);
    }
}

/// The query rows of a unit, token after token and within a token head after head.
struct Rows<'a> {
    layout: &'a Layout,
    batch: &'a Batch,
    operands: &'a Operands,
    unit: &'a Unit,
    count: usize,
}

impl Rows<'_> {
    /// Tokens that a row sees.
    fn context(&self, row: usize) -> usize {
        self.unit.first_position + row / self.layout.group() + 1
    }

    /// Offset of a row's head inside its token.
    fn head_offset(&self, row: usize) -> usize {
        let group = self.layout.group();
        (self.unit.kv_head * group + row % group) * self.layout.head_dim
    }

    fn query(&self, row: usize) -> *const u16 {
        let token = self.unit.first_token + row / self.layout.group();
        self.operands.queries.at(token * self.operands.stride + self.head_offset(row))
    }

    unsafe fn finish(&self, state: State) {
        let token_size = self.layout.num_heads * self.layout.head_dim;
        for row in 0..self.count {
            let token = self.unit.first_token + row / self.layout.group();
            // SAFETY: the caller of `run` vouches for the output.
            unsafe { state.finish(row, self.operands.output.at(token * token_size + self.head_offset(row))) };
        }
    }

    /// The state over one segment, from nothing.
    unsafe fn attend_segment(&self, segment: usize, state: State) {
        let last_context = self.context(self.count - 1);
        let end = last_context.min((segment + 1) * SEGMENT);
        // SAFETY: the caller of `run` vouches for all addresses; blocks up to the last context exist.
        unsafe {
            state.clear();
            let mut next = self.block_addresses(segment * SEGMENT, last_context);
            for start in (segment * SEGMENT..end).step_by(TILE) {
                let keys = next;
                if start + TILE < last_context {
                    next = self.block_addresses(start + TILE, last_context);
                    self.prefetch(&next);
                }
                for first in (0..self.count).step_by(ROWS) {
                    let count = ROWS.min(self.count - first);
                    let context = self.context(first + count - 1);
                    if context > start {
                        let num_tokens = TILE.min(context - start);
                        let blocks = Blocks { keys, num_tokens, head_dim: self.layout.head_dim };
                        self.attend_tile(start, first..first + count, &blocks, state);
                    }
                }
            }
        }
    }

    /// Where the keys of a tile's blocks begin; past the context the last block is repeated and never looked at.
    unsafe fn block_addresses(&self, start: usize, context: usize) -> [*const u16; BLOCKS] {
        let last_block = (context - 1) / BLOCK;
        std::array::from_fn(|index| {
            let column = (start / BLOCK + index).min(last_block);
            // SAFETY: the caller of `run` vouches for block tables that cover the context.
            let block = unsafe { *self.batch.block_tables.at(self.unit.sequence * self.batch.max_blocks + column) };
            self.operands.cache.at(self.layout.offset(block as usize, self.unit.kv_head))
        })
    }

    /// PERF: blocks lie apart, too short for the hardware's stream detection.
    fn prefetch(&self, keys: &[*const u16; BLOCKS]) {
        let lines = self.layout.block_half() * 2 * 2 / 64;
        for block in keys {
            for line in 0..lines {
                // SAFETY: prefetching touches nothing.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(block.cast::<i8>().wrapping_add(line * 64)) };
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn attend_tile(&self, start: usize, rows: std::ops::Range<usize>, blocks: &Blocks, state: State) {
        let mut scores = [0.0f32; ROWS * TILE];
        let mut weights = [0u32; ROWS * TILE / 2];
        let mut queries = [std::ptr::null(); ROWS];
        let mut weighted = [Weighted { sums: std::ptr::null_mut(), factor: 0.0, weights: weights.as_ptr() }; ROWS];
        for (index, row) in rows.clone().enumerate() {
            queries[index] = self.query(row);
        }
        let scale = self.layout.scale * std::f32::consts::LOG2_E;
        // SAFETY: the caller of `run` vouches for queries and cache; the arrays have room for ROWS rows.
        unsafe {
            tile::score(&queries[..rows.len()], blocks, scores.as_mut_ptr());
            for (index, row) in rows.clone().enumerate() {
                let num_visible = self.context(row).saturating_sub(start).min(TILE);
                let row_weights = weights.as_mut_ptr().add(index * TILE / 2);
                let factor = state.weigh(row, scores.as_ptr().add(index * TILE), num_visible, scale, row_weights);
                weighted[index] = Weighted { sums: state.values(row), factor, weights: row_weights };
            }
            tile::weigh(&weighted[..rows.len()], blocks);
        }
    }
}
