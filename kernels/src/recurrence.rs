//! Layers that keep a state of each sequence between tokens: what they compute between their projections, row by row. The Python
//! module `device/state.py` says what a slot holds.
//!
//! INVARIANT: a row's arithmetic depends on its position and on the rows before it, which are in its sequence's slot; sums over the
//! rows of a chunk ascend.

mod convolution;
mod gated_delta;
mod mamba;
mod mamba2;
mod project;
mod short_conv;

pub(crate) use gated_delta::{GatedDelta, GatedDeltaParts};
pub(crate) use mamba::{MambaConv, MambaScan};
pub(crate) use mamba2::{Mamba2, Mamba2Parts};
pub(crate) use short_conv::ShortConv;

use crate::element::Element;
use crate::pool::{Executor, Source, Target};

/// Positions from one stored state to the next.
pub(crate) const CHUNK: usize = 16;
/// Rows in a slot.
const RING: usize = 2 * CHUNK;
/// The most inputs of a layer.
pub(crate) const MAX_INPUTS: usize = 4;

/// One layer on one rank, cut into parts that do not depend on each other, such as heads.
pub(crate) trait Recurrence: Send + Sync {
    fn num_parts(&self) -> usize;

    /// Columns of each input.
    fn input_widths(&self) -> &[usize];

    fn output_width(&self) -> usize;

    /// Numbers of a state.
    fn state_floats(&self) -> usize;

    /// Numbers of a row of the ring.
    fn row_floats(&self) -> usize;

    /// Numbers behind the ring, of what need not be computed from the chunk's start again. They may be of other rows.
    fn running_floats(&self) -> usize {
        0
    }

    /// Computes one part of a row.
    ///
    /// # Safety
    /// The pointers of the row must be valid for the widths above, and its slot must hold what `run` asks for.
    unsafe fn advance(&self, part: usize, row: &Row);
}

impl dyn Recurrence + '_ {
    /// Two states, the ring, and what runs.
    pub(crate) fn slot_floats(&self) -> usize {
        2 * self.state_floats() + RING * self.row_floats() + self.running_floats()
    }

    /// About how many numbers a step of one row reads.
    pub(crate) fn work(&self) -> usize {
        self.state_floats() + self.row_floats()
    }

    /// Advances the sequences by their rows, in order.
    ///
    /// # Safety
    /// The pointers must be valid for the rows and slots. Slots hold what the rows before have left there, from the chunk's first position on,
    /// and that many rows before as a convolution reads.
    pub(crate) unsafe fn run(&self, executor: &impl Executor, sequences: &Sequences, operands: &Operands) {
        let num_parts = self.num_parts();
        let widths = self.input_widths();
        executor.for_each(sequences.num_sequences * num_parts, |index| {
            let (sequence, part) = (index / num_parts, index % num_parts);
            // SAFETY: guaranteed by the caller; the pieces of work differ in the slot or in the part.
            unsafe {
                let [first, end] = [0, 1].map(|next| *sequences.query_starts.at(sequence + next) as usize);
                let before = *sequences.context_lens.at(sequence) as usize - (end - first);
                let slot = operands.slots.at(*sequences.slots.at(sequence) as usize * self.slot_floats());
                let mut row = Row {
                    position: before,
                    inputs: [std::ptr::null(); MAX_INPUTS],
                    states: slot,
                    ring: slot.add(2 * self.state_floats()),
                    running: slot.add(self.slot_floats() - self.running_floats()),
                    state_floats: self.state_floats(),
                    row_floats: self.row_floats(),
                    output: std::ptr::null_mut(),
                };
                for index in first..end {
                    for (place, (input, width)) in row.inputs.iter_mut().zip(operands.inputs.iter().zip(widths)) {
                        *place = input.at(index * width);
                    }
                    row.output = operands.output.at(index * self.output_width());
                    self.advance(part, &row);
                    row.position += 1;
                }
            }
        });
    }
}

/// The sequences of a step, which have different slots.
#[derive(Clone, Copy)]
pub(crate) struct Sequences {
    /// These two as in `attention::Batch`.
    pub(crate) query_starts: Source<i32>,
    pub(crate) context_lens: Source<i32>,
    pub(crate) slots: Source<i64>,
    pub(crate) num_sequences: usize,
}

/// Rows of inputs and outputs, and the slots.
pub(crate) struct Operands<'a> {
    /// One for each of `Recurrence::input_widths`.
    pub(crate) inputs: &'a [Source<Element>],
    pub(crate) slots: Target<f32>,
    pub(crate) output: Target<Element>,
}

/// A row that is computed, and its sequence's slot.
pub(crate) struct Row {
    position: usize,
    inputs: [*const Element; MAX_INPUTS],
    states: *mut f32,
    ring: *mut f32,
    running: *mut f32,
    state_floats: usize,
    row_floats: usize,
    output: *mut Element,
}

impl Row {
    /// Its place in its chunk.
    fn within(&self) -> usize {
        self.position % CHUNK
    }

    /// The first position of its chunk.
    fn first(&self) -> usize {
        self.position - self.within()
    }

    /// What the row of a position leaves in the ring.
    unsafe fn kept(&self, position: usize) -> *mut f32 {
        // SAFETY: the ring has RING rows.
        unsafe { self.ring.add(position % RING * self.row_floats) }
    }

    /// The state at the start of its chunk; None: the first chunk starts with zeros, which are not stored.
    unsafe fn state(&self) -> Option<*const f32> {
        let chunk = self.position / CHUNK;
        // SAFETY: the slot has two states.
        (chunk > 0).then(|| unsafe { self.states.add(chunk % 2 * self.state_floats).cast_const() })
    }

    /// The state at the start of the next chunk, which the last row of this chunk writes; None: it is another row.
    unsafe fn next_state(&self) -> Option<*mut f32> {
        let next = (self.position + 1) / CHUNK;
        // SAFETY: the slot has two states.
        (self.within() == CHUNK - 1).then(|| unsafe { self.states.add(next % 2 * self.state_floats) })
    }
}

/// ln(1 + e^x)
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}
