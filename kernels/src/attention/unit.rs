//! One unit of work: computes its rows' softmax states over their segments, then the result.

use super::amx::Tiles;
use super::buffer::{Line, room};
use super::cache::{BLOCK, Layout, reorder_values};
use super::plan::Unit;
use super::shape::Part;
use super::softmax::{State, TileRows, state_floats};
use super::tile::{self, Addresses, BLOCKS, Blocks, ROWS, Weighted};
use super::{Attention, Batch, Operands, SEGMENT, TILE};
use crate::element::Element;
use crate::pool::Target;
use crate::product::{self, Factor};
use std::cell::RefCell;

thread_local! {
    /// Softmax states of the current unit: of all segments so far, and of the current segment.
    static STATES: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// The current tile's values when they are stored in the keys: [block][token group][dim][GROUP].
    static VALUES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    /// The current tile's blocks when they are stored in fp8.
    static BLOCKS_OF_TILE: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// The arguments that all units of a call share.
#[derive(Clone, Copy)]
pub(crate) struct Call<'a> {
    pub(crate) attention: &'a Attention,
    pub(crate) batch: &'a Batch,
    pub(crate) operands: &'a Operands,
}

/// Computes a unit: its output rows, or its partial state.
///
/// # Safety
/// As for `Attention::attend`; `partials` must have `Work::room_floats` floats.
pub(crate) unsafe fn run<const PLAIN: bool>(call: &Call<'_>, unit: &Unit, following: &Unit, partials: Target<f32>) {
    let (layout, operands) = (&call.attention.layout, call.operands);
    let dim = layout.group() * layout.head_dim;
    let first = operands.queries.at(unit.first_token * operands.stride + unit.kv_head * dim);
    // SAFETY: guaranteed by the caller.
    unsafe {
        product::with_factors(first, operands.stride, unit.num_tokens, dim, |mut queries, mut stride| {
            let count = unit.num_tokens * layout.group();
            let mut tiles = Tiles::configure(call.attention.amx, count);
            if tiles.is_some() {
                queries = Tiles::gather(queries, stride, unit.num_tokens, dim, layout.head_dim);
                stride = dim;
            }
            Rows::<PLAIN> { call, unit, following, count, queries, stride }.attend(partials, &mut tiles);
        });
    }
}

/// Merges the partial states of consecutive segments, starting with `unit`, and writes the result.
///
/// # Safety
/// As for `run`; all segments must have been computed.
pub(crate) unsafe fn merge_partials<const PLAIN: bool>(call: &Call<'_>, unit: &Unit, partials: Target<f32>) {
    let Some(offset) = unit.partial else { return };
    let layout = &call.attention.layout;
    let count = unit.num_tokens * layout.group();
    let rows = Rows::<PLAIN> { call, unit, following: unit, count, queries: std::ptr::null(), stride: 0 };
    let size = state_floats(rows.count, layout.value_dim);
    let total = State::new(partials.at(offset), rows.count, layout.value_dim);
    // SAFETY: guaranteed by the caller.
    unsafe {
        for segment in unit.segments(&call.attention.mask).skip(1) {
            let place = offset + (segment - unit.first_segment) * size;
            let state = State::new(partials.at(place), rows.count, layout.value_dim);
            total.merge(state, rows.first_that_reaches(segment));
        }
        rows.finish(total);
    }
}

/// Start of the segment's first tile that contains a position from `first` on.
fn first_tile(segment: usize, first: usize) -> usize {
    (segment * SEGMENT).max(first / TILE * TILE)
}

/// The query rows of a unit, ordered by token, then head.
struct Rows<'a, const PLAIN: bool> {
    call: &'a Call<'a>,
    unit: &'a Unit,
    /// The unit that this thread probably computes next; its first blocks are prefetched.
    following: &'a Unit,
    count: usize,
    /// The queries of the unit's heads, and their distance from token to token.
    queries: *const Factor,
    stride: usize,
}

impl<const PLAIN: bool> Rows<'_, PLAIN> {
    fn layout(&self) -> &Layout {
        &self.call.attention.layout
    }

    fn position(&self, row: usize) -> usize {
        self.unit.first_position + row / self.layout().group()
    }

    /// The first position that a row sees.
    fn first(&self, row: usize) -> usize {
        if PLAIN { 0 } else { self.call.attention.mask.first(self.position(row), self.unit.source_len) }
    }

    /// The end of the interval that a row sees, exclusive.
    fn end(&self, row: usize) -> usize {
        let position = self.position(row);
        if PLAIN {
            return position + 1;
        }
        match self.call.batch.ends {
            // SAFETY: the caller of `run` vouches for an entry for each token.
            Some(ends) => unsafe { *ends.at(self.unit.first_token + row / self.layout().group()) as usize },
            None => self.call.attention.mask.end(position, self.unit.source_len),
        }
    }

    /// The first row that sees a part of a segment. At least one row does.
    fn first_that_reaches(&self, segment: usize) -> usize {
        if !PLAIN && self.call.attention.mask.part == Part::Source {
            return 0;
        }
        if !PLAIN && self.call.batch.ends.is_some() {
            let mut rows = (0..self.count).step_by(self.layout().group());
            return rows.find(|row| self.end(*row) > segment * SEGMENT).unwrap_or(self.count);
        }
        (segment * SEGMENT).saturating_sub(self.unit.first_position) * self.layout().group()
    }

    fn head(&self, row: usize) -> usize {
        let group = self.layout().group();
        self.unit.kv_head * group + row % group
    }

    fn query(&self, row: usize) -> *const Factor {
        let Layout { head_dim, .. } = *self.layout();
        let group = self.layout().group();
        self.queries.wrapping_add(row / group * self.stride + row % group * head_dim)
    }

    /// Computes the rows' results, or the partial state of the unit's segment.
    unsafe fn attend(&self, partials: Target<f32>, tiles: &mut Option<Tiles>) {
        let (unit, value_dim) = (self.unit, self.layout().value_dim);
        // SAFETY: guaranteed by the caller of `run`.
        unsafe {
            if let Some(offset) = unit.partial {
                let state = State::new(partials.at(offset), self.count, value_dim);
                self.attend_segment(unit.first_segment, state, tiles);
                return;
            }
            STATES.with_borrow_mut(|memory| {
                let size = state_floats(self.count, value_dim);
                if memory.len() < 2 * size {
                    memory.resize(2 * size, 0.0);
                }
                let (first, second) = memory.split_at_mut(size);
                let total = State::new(first.as_mut_ptr(), self.count, value_dim);
                let segment_state = State::new(second.as_mut_ptr(), self.count, value_dim);
                self.attend_segment(unit.first_segment, total, tiles);
                for segment in unit.first_segment + 1..unit.end_segment {
                    self.attend_segment(segment, segment_state, tiles);
                    total.merge(segment_state, self.first_that_reaches(segment));
                }
                self.finish(total);
            });
        }
    }

    unsafe fn finish(&self, state: State) {
        let Operands { output, sinks, scales, .. } = self.call.operands;
        let Layout { num_heads, value_dim, values_in_keys, .. } = *self.layout();
        let scale = if values_in_keys { scales.keys } else { scales.values } as f32;
        for row in 0..self.count {
            let token = self.unit.first_token + row / self.layout().group();
            // SAFETY: the caller of `run` vouches for sinks and output.
            unsafe {
                let sink = sinks.map(|sinks| (*sinks.at(self.head(row))).to_f32());
                state.finish(row, sink, scale, output.at((token * num_heads + self.head(row)) * value_dim));
            }
        }
    }

    /// Computes the state over one segment. Rows that do not see it keep the empty state.
    unsafe fn attend_segment(&self, segment: usize, state: State, tiles: &mut Option<Tiles>) {
        let begin = first_tile(segment, self.first(0));
        let end = self.end(self.count - 1).min((segment + 1) * SEGMENT);
        let (layout, group_rows) = (self.layout(), if tiles.is_some() { Tiles::ROWS } else { ROWS });
        // SAFETY: the caller of `run` vouches for all addresses; blocks from what the first row sees up to the last context exist.
        unsafe {
            state.clear();
            let mut tile_rows = TileRows::new(0, 0);
            let mut next = self.block_addresses(self.unit, begin);
            for start in (begin..end).step_by(TILE) {
                let stored = next;
                next = if start + TILE < end {
                    self.block_addresses(self.unit, start + TILE)
                } else if segment + 1 < self.unit.end_segment {
                    self.block_addresses(self.unit, end)
                } else {
                    let first = if PLAIN { 0 } else { self.following.sees(&self.call.attention.mask).start };
                    self.block_addresses(self.following, first_tile(self.following.first_segment, first))
                };
                let (here, ahead) = self.tile_addresses(&stored, &next, start, end);
                for first in (0..self.count).step_by(group_rows) {
                    let count = group_rows.min(self.count - first);
                    let (seen, end) = (self.first(first), self.end(first + count - 1));
                    if end > start && seen < start + TILE {
                        (tile_rows.first, tile_rows.count) = (first, count);
                        let passed = seen.saturating_sub(start) / BLOCK;
                        let left =
                            |all: &[_; BLOCKS]| std::array::from_fn(|index| all[(index + passed).min(BLOCKS - 1)]);
                        let blocks = Blocks {
                            here: Addresses { keys: left(&here.keys), values: left(&here.values) },
                            next: ahead,
                            num_tokens: TILE.min(end - start) - passed * BLOCK,
                            head_dim: layout.head_dim,
                            value_dim: layout.value_dim,
                        };
                        self.attend_tile(start, passed, &mut tile_rows, &blocks, state, tiles);
                    }
                }
            }
        }
    }

    /// Addresses of a tile's keys and values, and of what is prefetched meanwhile. `stored` and `next` are where the blocks of this tile
    /// and of the next one are in the cache.
    unsafe fn tile_addresses(
        &self,
        stored: &[*const u8; BLOCKS],
        next: &[*const u8; BLOCKS],
        start: usize,
        end: usize,
    ) -> (Addresses, Addresses) {
        let layout = self.layout();
        let seen = self.first(0).saturating_sub(start) / BLOCK..(end - start).div_ceil(BLOCK).min(BLOCKS);
        let (keys, next_keys) = match layout.fp8 {
            None => (stored.map(<*const u8>::cast), next.map(<*const u8>::cast)),
            Some(format) => {
                let size = layout.offset(1, 0) / layout.num_kv_heads;
                let blocks = room(&BLOCKS_OF_TILE, BLOCKS * size);
                for block in seen.clone() {
                    // SAFETY: the buffer belongs to this thread and is not moved before the next tile; visible blocks were written.
                    unsafe { layout.widen(format, stored[block], next[block], blocks.add(block * size)) };
                }
                let keys = std::array::from_fn(|block| blocks.wrapping_add(block * size).cast_const());
                // PERF: the next blocks are prefetched above, and these are in the cache already.
                (keys, keys)
            }
        };
        if !layout.values_in_keys {
            let at = |keys| Addresses { keys, values: self.behind(&keys) };
            return (at(keys), at(next_keys));
        }
        let size = BLOCK * layout.value_dim;
        let values = room(&VALUES, BLOCKS * size);
        for block in seen {
            // SAFETY: as above.
            unsafe { reorder_values(keys[block], layout.value_dim, values.add(block * size)) };
        }
        let values = std::array::from_fn(|block| values.wrapping_add(block * size).cast_const());
        // PERF: reordered values are in the cache already.
        (Addresses { keys, values }, Addresses { keys: next_keys, values })
    }

    /// Addresses of values that are stored after their keys.
    fn behind(&self, keys: &[*const Element; BLOCKS]) -> [*const Element; BLOCKS] {
        keys.map(|keys| keys.wrapping_add(self.layout().block_keys()))
    }

    /// Addresses of the blocks of a tile, which begins at position `start`. An invisible block has the address of the
    /// last visible one and is not read.
    unsafe fn block_addresses(&self, unit: &Unit, start: usize) -> [*const u8; BLOCKS] {
        let end = if PLAIN { unit.first_position + unit.num_tokens } else { unit.sees(&self.call.attention.mask).end };
        let last_block = end.saturating_sub(1) / BLOCK;
        std::array::from_fn(|index| {
            let column = (start / BLOCK + index).min(last_block);
            // SAFETY: the caller of `run` vouches for block tables that cover the context.
            let block =
                unsafe { *self.call.batch.block_tables.at(unit.sequence * self.call.batch.max_blocks + column) };
            let layout = self.layout();
            self.call.operands.cache.at(layout.offset(block as usize, unit.kv_head) * layout.number_bytes())
        })
    }

    /// `blocks` are the tile's blocks without the first `passed`, which no row sees.
    unsafe fn attend_tile(
        &self,
        start: usize,
        passed: usize,
        rows: &mut TileRows,
        blocks: &Blocks,
        state: State,
        tiles: &mut Option<Tiles>,
    ) {
        let attention = self.call.attention;
        for index in 0..rows.count {
            rows.first_visible[index] = self.first(rows.first + index).saturating_sub(start);
            rows.end_visible[index] = self.end(rows.first + index).saturating_sub(start).min(TILE);
        }
        let key_scale = self.call.operands.scales.keys as f32;
        let mut scale = attention.layout.scale * key_scale * std::f32::consts::LOG2_E;
        // SAFETY: the caller of `run` vouches for queries and cache; tiles have room for a group of rows.
        unsafe {
            let scores = rows.scores.as_mut_ptr().cast::<f32>().add(passed * BLOCK);
            match tiles {
                Some(tiles) => tiles.score(self.query(rows.first), blocks, scores),
                None => {
                    let queries: [_; ROWS] = std::array::from_fn(|index| self.query(rows.first + index));
                    tile::score(&queries[..rows.count], blocks, scores);
                }
            }
            if !PLAIN && !attention.has_plain_scores() {
                for index in 0..rows.count {
                    let row = rows.first + index;
                    let (head, position, bias) = (self.head(row), self.position(row), self.call.operands.bias);
                    attention.to_scores(&mut rows.scores[index], head, start, position, key_scale, bias);
                }
                scale = std::f32::consts::LOG2_E;
            }
            state.weigh::<PLAIN>(rows, scale);
            if let Some(tiles) = tiles {
                return tiles.weigh(rows, passed * BLOCK, blocks, state);
            }
            let mut weighted = [Weighted::default(); ROWS];
            for index in 0..rows.count {
                weighted[index] = Weighted {
                    sums: state.values(rows.first + index),
                    factor: rows.factors[index],
                    weights: rows.weights[index].as_ptr().add(passed * BLOCK),
                };
            }
            tile::weigh(&weighted[..rows.count], blocks);
        }
    }
}
