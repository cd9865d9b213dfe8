//! Divides a batch's attention into units of work.

use super::softmax::state_floats;
use super::{Attention, AttentionMask, Batch, Layout, SEGMENT};
use std::ops::Range;

/// Query rows (token and head) that share the loads of keys and values.
const UNIT_ROWS: usize = 48;

/// Consecutive tokens of one sequence, for one KV head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unit {
    pub(crate) sequence: usize,
    pub(crate) kv_head: usize,
    /// Batch row of the first query token.
    pub(crate) first_token: usize,
    pub(crate) num_tokens: usize,
    /// Position of the first query token in its sequence.
    pub(crate) first_position: usize,
    /// Source length of its sequence; 0 without an encoder.
    pub(crate) source_len: usize,
    /// End of the interval that its last token sees, exclusive.
    pub(crate) end: usize,
    pub(crate) first_segment: usize,
    pub(crate) end_segment: usize,
    /// Offset in floats of the unit's partial states, one per segment, when its segments are separate units.
    pub(crate) partial: Option<usize>,
}

impl Unit {
    /// The interval of positions that the unit's tokens see.
    pub(crate) fn sees(&self, mask: &AttentionMask) -> Range<usize> {
        mask.first(self.first_position, self.source_len)..self.end
    }

    /// The segments that the unit's tokens see.
    pub(crate) fn segments(&self, mask: &AttentionMask) -> Range<usize> {
        let Range { start, end } = self.sees(mask);
        start / SEGMENT..end.div_ceil(SEGMENT)
    }
}

pub(crate) struct Plan {
    pub(crate) units: Vec<Unit>,
    pub(crate) partial_floats: usize,
}

impl Plan {
    /// # Safety
    /// The batch's arrays must have `num_sequences` entries, and `ends` one for each token.
    pub(crate) unsafe fn make(attention: &Attention, batch: &Batch, num_threads: usize) -> Plan {
        let layout = &attention.layout;
        let unit_tokens = (UNIT_ROWS / layout.group()).max(1);
        let mut prefills = Vec::new();
        let mut decodes = Vec::new();
        for sequence in 0..batch.num_sequences {
            // SAFETY: the caller vouches for the arrays.
            let (start, end, context, source_len) = unsafe {
                (
                    *batch.query_starts.at(sequence) as usize,
                    *batch.query_starts.at(sequence + 1) as usize,
                    *batch.context_lens.at(sequence) as usize,
                    batch.source_lens.map_or(0, |lens| *lens.at(sequence) as usize),
                )
            };
            let num_tokens = end - start;
            let units = if num_tokens > 1 { &mut prefills } else { &mut decodes };
            // The last tokens see the most; computing them first lets the threads finish together.
            for index in (0..num_tokens.div_ceil(unit_tokens)).rev() {
                let first = index * unit_tokens;
                let last = (first + unit_tokens).min(num_tokens) - 1;
                // SAFETY: the caller vouches for the arrays.
                let end = match unsafe { batch.ends.map(|ends| *ends.at(start + last)) } {
                    Some(end) => end as usize,
                    None => attention.mask.end(context - num_tokens + last, source_len),
                };
                for kv_head in 0..layout.num_kv_heads {
                    let mut unit = Unit {
                        sequence,
                        kv_head,
                        first_token: start + first,
                        num_tokens: last + 1 - first,
                        first_position: context - num_tokens + first,
                        source_len,
                        end,
                        first_segment: 0,
                        end_segment: 0,
                        partial: None,
                    };
                    let Range { start, end } = unit.segments(&attention.mask);
                    (unit.first_segment, unit.end_segment) = (start, end);
                    units.push(unit);
                }
            }
        }
        prefills.append(&mut decodes);
        let mut plan = Plan { units: prefills, partial_floats: 0 };
        if num_threads > 1 && plan.units.len() < num_threads * 4 {
            plan.split_segments(layout);
        }
        plan
    }

    /// Makes each segment a unit, when there are too few units for all threads.
    fn split_segments(&mut self, layout: &Layout) {
        let mut split = Vec::new();
        for &unit in &self.units {
            if unit.end_segment - unit.first_segment <= 1 {
                split.push(unit);
                continue;
            }
            for segment in unit.first_segment..unit.end_segment {
                split.push(Unit {
                    first_segment: segment,
                    end_segment: segment + 1,
                    partial: Some(self.partial_floats),
                    ..unit
                });
                self.partial_floats += state_floats(unit.num_tokens * layout.group(), layout.value_dim);
            }
        }
        self.units = split;
    }
}
