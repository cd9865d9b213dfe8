//! One unit of work: its rows' softmax state over their segments, then the result.

use super::cache::{BLOCK, Layout};
use super::plan::Unit;
use super::softmax::{State, TileRows, state_floats};
use super::tile::{self, BLOCKS, Blocks, ROWS, Weighted};
use super::{Attention, Batch, Operands, SEGMENT, TILE};
use crate::pool::Target;
use std::cell::RefCell;

thread_local! {
    /// Softmax states of the unit at hand: of all segments so far, and of the current one.
    static STATES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// What all units of a call share.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub attention: &'a Attention,
    pub batch: &'a Batch,
    pub operands: &'a Operands,
}

/// Compute a unit: its output rows, or its partial state.
///
/// # Safety
/// As for `Attention::attend`; `partials` must have the room that the plan asked for.
pub unsafe fn run<const PLAIN: bool>(call: &Call<'_>, unit: &Unit, following: &Unit, partials: Target<f32>) {
    let layout = &call.attention.layout;
    let rows = Rows::<PLAIN> { call, unit, following, count: unit.num_tokens * layout.group() };
    // SAFETY: passed on.
    unsafe {
        if let Some(offset) = unit.partial {
            rows.attend_segment(unit.first_segment, State::new(partials.at(offset), rows.count, layout.head_dim));
            return;
        }
        STATES.with_borrow_mut(|memory| {
            let size = state_floats(rows.count, layout.head_dim);
            if memory.len() < 2 * size {
                memory.resize(2 * size, 0.0);
            }
            let (first, second) = memory.split_at_mut(size);
            let total = State::new(first.as_mut_ptr(), rows.count, layout.head_dim);
            let segment_state = State::new(second.as_mut_ptr(), rows.count, layout.head_dim);
            rows.attend_segment(unit.first_segment, total);
            for segment in unit.first_segment + 1..unit.end_segment {
                rows.attend_segment(segment, segment_state);
                total.merge(segment_state, rows.first_that_reaches(segment));
            }
            rows.finish(total);
        });
    }
}

/// Merge what the segments' units left, beginning with `unit`, the first, and write the result.
///
/// # Safety
/// As for `run`; all segments must have been computed.
pub unsafe fn merge_partials<const PLAIN: bool>(call: &Call<'_>, unit: &Unit, partials: Target<f32>) {
    let Some(offset) = unit.partial else { return };
    let layout = &call.attention.layout;
    let rows = Rows::<PLAIN> { call, unit, following: unit, count: unit.num_tokens * layout.group() };
    let size = state_floats(rows.count, layout.head_dim);
    let total = State::new(partials.at(offset), rows.count, layout.head_dim);
    // SAFETY: passed on.
    unsafe {
        for segment in unit.segments(&call.attention.sight).skip(1) {
            let place = offset + (segment - unit.first_segment) * size;
            let state = State::new(partials.at(place), rows.count, layout.head_dim);
            total.merge(state, rows.first_that_reaches(segment));
        }
        rows.finish(total);
    }
}

/// Where the first tile of a segment begins that holds anything from `first` on.
fn first_tile(segment: usize, first: usize) -> usize {
    (segment * SEGMENT).max(first / TILE * TILE)
}

/// The query rows of a unit, token after token and within a token head after head.
struct Rows<'a, const PLAIN: bool> {
    call: &'a Call<'a>,
    unit: &'a Unit,
    /// What this thread probably does next.
    following: &'a Unit,
    count: usize,
}

impl<const PLAIN: bool> Rows<'_, PLAIN> {
    fn layout(&self) -> &Layout {
        &self.call.attention.layout
    }

    /// The first position that a row sees.
    fn first(&self, row: usize) -> usize {
        if PLAIN { 0 } else { self.call.attention.sight.first(self.context(row) - 1) }
    }

    /// The end of what a row sees: right behind its own position.
    fn context(&self, row: usize) -> usize {
        self.unit.first_position + row / self.layout().group() + 1
    }

    /// The first row whose context reaches into a segment.
    fn first_that_reaches(&self, segment: usize) -> usize {
        (segment * SEGMENT).saturating_sub(self.unit.first_position) * self.layout().group()
    }

    fn head(&self, row: usize) -> usize {
        let group = self.layout().group();
        self.unit.kv_head * group + row % group
    }

    /// Offset of a row's head inside its token.
    fn head_offset(&self, row: usize) -> usize {
        self.head(row) * self.layout().head_dim
    }

    fn query(&self, row: usize) -> *const u16 {
        let token = self.unit.first_token + row / self.layout().group();
        self.call.operands.queries.at(token * self.call.operands.stride + self.head_offset(row))
    }

    unsafe fn finish(&self, state: State) {
        let Operands { output, sinks, .. } = self.call.operands;
        let token_size = self.layout().num_heads * self.layout().head_dim;
        for row in 0..self.count {
            let token = self.unit.first_token + row / self.layout().group();
            // SAFETY: the caller of `run` vouches for sinks and output.
            unsafe {
                let sink = sinks.map(|sinks| f32::from_bits(u32::from(*sinks.at(self.head(row))) << 16));
                state.finish(row, sink, output.at(token * token_size + self.head_offset(row)));
            }
        }
    }

    /// The state over one segment, from nothing. Rows that see nothing of it are left with nothing.
    unsafe fn attend_segment(&self, segment: usize, state: State) {
        let last_context = self.context(self.count - 1);
        let begin = first_tile(segment, self.first(0));
        let end = last_context.min((segment + 1) * SEGMENT);
        // SAFETY: the caller of `run` vouches for all addresses; blocks from what the first row sees up to the last context exist.
        unsafe {
            state.clear();
            let mut tile_rows = TileRows::new(0, 0);
            let mut next = self.block_addresses(self.unit, begin);
            for start in (begin..end).step_by(TILE) {
                let keys = next;
                next = if start + TILE < end {
                    self.block_addresses(self.unit, start + TILE)
                } else if segment + 1 < self.unit.end_segment {
                    self.block_addresses(self.unit, end)
                } else {
                    let Unit { first_position, first_segment, .. } = *self.following;
                    let first = if PLAIN { 0 } else { self.call.attention.sight.first(first_position) };
                    self.block_addresses(self.following, first_tile(first_segment, first))
                };
                for first in (0..self.count).step_by(ROWS) {
                    let count = ROWS.min(self.count - first);
                    let (seen, context) = (self.first(first), self.context(first + count - 1));
                    if context > start && seen < start + TILE {
                        (tile_rows.first, tile_rows.count) = (first, count);
                        let passed = seen.saturating_sub(start) / BLOCK;
                        let blocks = Blocks {
                            keys: std::array::from_fn(|index| keys[(index + passed).min(BLOCKS - 1)]),
                            next,
                            num_tokens: TILE.min(context - start) - passed * BLOCK,
                            head_dim: self.layout().head_dim,
                        };
                        self.attend_tile(start, passed, &mut tile_rows, &blocks, state);
                    }
                }
            }
        }
    }

    /// Where the keys of a tile's blocks begin; past the context the last block is repeated and never looked at, no more than
    /// blocks before what rows see.
    unsafe fn block_addresses(&self, unit: &Unit, start: usize) -> [*const u16; BLOCKS] {
        let last_block = (unit.first_position + unit.num_tokens - 1) / BLOCK;
        std::array::from_fn(|index| {
            let column = (start / BLOCK + index).min(last_block);
            // SAFETY: the caller of `run` vouches for block tables that cover the context.
            let block =
                unsafe { *self.call.batch.block_tables.at(unit.sequence * self.call.batch.max_blocks + column) };
            self.call.operands.cache.at(self.layout().offset(block as usize, unit.kv_head))
        })
    }

    /// `blocks` are the tile's without the first `passed`, of which no row sees anything.
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
    unsafe fn attend_tile(&self, start: usize, passed: usize, rows: &mut TileRows, blocks: &Blocks, state: State) {
        let attention = self.call.attention;
        let mut queries = [std::ptr::null(); ROWS];
        for index in 0..rows.count {
            queries[index] = self.query(rows.first + index);
            rows.first_visible[index] = self.first(rows.first + index).saturating_sub(start);
            rows.end_visible[index] = self.context(rows.first + index).saturating_sub(start).min(TILE);
        }
        let mut scale = attention.layout.scale * std::f32::consts::LOG2_E;
        // SAFETY: the caller of `run` vouches for queries and cache; tiles have room for ROWS rows.
        unsafe {
            tile::score(&queries[..rows.count], blocks, rows.scores.as_mut_ptr().cast::<f32>().add(passed * BLOCK));
            if !PLAIN && !attention.has_plain_scores() {
                for index in 0..rows.count {
                    attention.to_scores(&mut rows.scores[index], self.head(rows.first + index), start);
                }
                scale = std::f32::consts::LOG2_E;
            }
            state.weigh::<PLAIN>(rows, scale);
            let mut weighted = [Weighted::default(); ROWS];
            for index in 0..rows.count {
                weighted[index] = Weighted {
                    sums: state.values(rows.first + index),
                    factor: rows.factors[index],
                    weights: rows.weights[index].as_ptr().add(passed * BLOCK / 2),
                };
            }
            tile::weigh(&weighted[..rows.count], blocks);
        }
    }
}
