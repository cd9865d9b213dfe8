//! All layers of a decoder in one call and one parallel section per step. In small batches a layer's kernels take about ten
//! microseconds each, as long as a call from Python and the start of a section.
//!
//! A stack is a list of operations on registers, which a `Program` checks while it is written: no architecture is known here.
//!
//! INVARIANT: bit-equal to the single kernels called one after the other.

mod experts;
mod operation;
mod program;
mod register;
#[cfg(test)]
mod tests;

pub(crate) use experts::{Exchange, Expert, Experts, Shared};
pub(crate) use program::{Program, Rotation};
pub(crate) use register::Register;

use crate::attention::{Attention, Batch, KvScales, Operands, Work};
use crate::collective::{Collective, Failure, Part};
use crate::element::Element;
use crate::linear::{Combine, Linear, Output, Rows};
use crate::low_rank::{self, Adapted, Adapter, Product, Run};
use crate::pool::{Executor, Pool, Source, Target, Walker};
use crate::recurrence::{self, MAX_INPUTS, Recurrence, Sequences};
use experts::{RoutePlaces, Routes};
use operation::{Operation, RowOperation, TokenContext};
use register::PerRegister;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// The operations of all layers. The caller owns tables and keeps them alive.
pub(crate) struct Stack {
    operations: Vec<Operation>,
    /// The largest width of each register.
    widths: PerRegister<usize>,
    /// The different attentions.
    attentions: Vec<Arc<Attention>>,
    caches: Vec<Cache>,
    /// The most experts of a row, the most logits of a row in float32, and the number of experts in all layers.
    max_top_k: usize,
    max_wide_logits: usize,
    num_experts: usize,
    /// The most rows of a product for a token that adapters change: its experts, or itself.
    max_adapted_rows: usize,
    /// The sites of adapters, with their input features and output columns.
    sites: Vec<(usize, [usize; 2])>,
    /// Rows of the shortest table of cosines and sines.
    pub(crate) num_positions: usize,
    buffers: Mutex<Buffers>,
}

/// What a cache holds.
pub(crate) enum Cache {
    /// Keys and values of an attention, which is one of `Stack::attentions`.
    Kv { attention: usize, scales: KvScales },
    /// States of sequences.
    States(Arc<dyn Recurrence>),
}

/// One step: its tokens, their sequences, and the rows to output.
pub(crate) struct Step<'a> {
    /// [tokens, hidden]: the embeddings; overwritten.
    pub(crate) residual: Target<Element>,
    pub(crate) num_tokens: usize,
    pub(crate) positions: Source<i64>,
    pub(crate) slots: Source<i64>,
    pub(crate) batch: Batch,
    /// One per layer.
    pub(crate) caches: &'a [Target<u8>],
    /// The slot of each sequence's states, if there are any.
    pub(crate) state_slots: Source<i64>,
    pub(crate) sample_rows: Source<i64>,
    pub(crate) num_samples: usize,
    /// [samples, hidden]: the normalized output of the last layer.
    pub(crate) output: Target<Element>,
    pub(crate) adapters: StepAdapters<'a>,
}

/// The adapters of a step's rows.
#[derive(Default)]
pub(crate) struct StepAdapters<'a> {
    /// They fit the stack.
    pub(crate) adapters: &'a [&'a Adapter],
    /// Runs of all tokens. `sampled_runs` are the runs of the sampled rows.
    pub(crate) runs: Vec<Run>,
    pub(crate) sampled_runs: Vec<Run>,
}

/// Intermediate results, reused from step to step; they grow to the largest step's size.
#[derive(Default)]
struct Buffers {
    numbers: Vec<Element>,
    states: Vec<f32>,
    scratch: Vec<u8>,
    /// Products with the A matrices of adapters.
    inner: Vec<f32>,
    routes: Routes,
}

/// Addresses of a step's intermediate results.
struct Places {
    /// Each register for all tokens. `sampled` has them for the sampled rows.
    registers: PerRegister<Target<Element>>,
    sampled: PerRegister<Target<Element>>,
    /// Partial states of attention.
    states: Target<f32>,
    /// Scratch of linear layers.
    scratch: Target<u8>,
    /// Products with the A matrices of adapters: [tokens, max_rank], or a row for each expert of a token.
    inner: Target<f32>,
    max_rank: usize,
    /// Assignment of rows to experts.
    routes: RoutePlaces,
}

/// Row elements from which a parallel section pays off.
const PART_NUMBERS: usize = 1 << 14;

impl Buffers {
    fn places(&mut self, stack: &Stack, step: &Step<'_>, states: usize, scratch: usize) -> Places {
        let mut widths = stack.widths;
        widths[Register::Output as usize] = 0; // the caller's, as are the residuals of all tokens
        let residual_width = std::mem::take(&mut widths[Register::Residual as usize]);
        let width = widths.iter().sum::<usize>();
        let total = width * step.num_tokens + (width + residual_width) * step.num_samples;
        if self.numbers.len() < total {
            self.numbers.resize(total, Element::default());
        }
        if self.states.len() < states {
            self.states.resize(states, 0.0);
        }
        if self.scratch.len() < scratch {
            self.scratch.resize(scratch, 0);
        }
        let max_rank = low_rank::max_rank(step.adapters.adapters);
        let num_inner = max_rank * step.num_tokens * stack.max_adapted_rows;
        if self.inner.len() < num_inner {
            self.inner.resize(num_inner, 0.0);
        }
        let mut offset = 0;
        let mut of_rows = |widths: &PerRegister<usize>, num_rows: usize| {
            widths.map(|width| {
                let place = Target::new(self.numbers.as_mut_ptr().wrapping_add(offset));
                offset += width * num_rows;
                place
            })
        };
        let mut registers = of_rows(&widths, step.num_tokens);
        widths[Register::Residual as usize] = residual_width;
        let mut sampled = of_rows(&widths, step.num_samples);
        registers[Register::Residual as usize] = step.residual;
        registers[Register::Output as usize] = step.output;
        sampled[Register::Output as usize] = step.output;
        let states = Target::new(self.states.as_mut_ptr());
        let (num_logits, num_pairs) = (step.num_tokens * stack.max_wide_logits, step.num_tokens * stack.max_top_k);
        let routes = self.routes.reserve(num_logits, num_pairs, stack.num_experts);
        let (scratch, inner) = (Target::new(self.scratch.as_mut_ptr()), Target::new(self.inner.as_mut_ptr()));
        Places { registers, sampled, states, scratch, inner, max_rank, routes }
    }
}

impl Stack {
    /// Elements of a residual row.
    pub(crate) fn hidden(&self) -> usize {
        self.widths[Register::Residual as usize]
    }

    /// What each of the step's caches holds.
    pub(crate) fn caches(&self) -> &[Cache] {
        &self.caches
    }

    /// An attention that a cache belongs to.
    pub(crate) fn attention(&self, index: usize) -> &Attention {
        &self.attentions[index]
    }

    /// Whether the adapter was made for the stack's sites.
    pub(crate) fn takes(&self, adapter: &Adapter) -> bool {
        adapter.fits(&self.sites)
    }

    /// Runs a step through all layers. When a collective fails, the step ends there, on all threads.
    ///
    /// # Safety
    /// The step's pointers must be valid for the stated shapes, with a cache for each layer.
    pub(crate) unsafe fn run(&self, pool: &Pool, step: &Step<'_>) -> Result<(), Failure> {
        // Without sampled rows, what follows the last write to a cache has no reader.
        let end = if step.num_samples == 0 {
            self.operations.iter().rposition(Operation::writes).map_or(0, |last| last + 1)
        } else {
            self.operations.len()
        };
        let operations = &self.operations[..end];
        let num_threads = Executor::num_threads(pool);
        // SAFETY: the caller vouches for the batch.
        let works = self.attentions.iter().map(|attention| unsafe { attention.plan(&step.batch, num_threads) });
        let works: Vec<Work> = works.collect();
        let states = works.iter().map(Work::room_floats).max().unwrap_or(0);
        let scratch = operations.iter().map(|operation| operation.scratch_bytes(step.num_tokens)).max().unwrap_or(0);
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let places = buffers.places(self, step, states, scratch);
        let max_phases = operations.iter().map(|operation| operation.max_phases(step.num_tokens)).sum();
        let failure = OnceLock::new();
        pool.section(max_phases, |walker| {
            // SAFETY: the caller vouches for the step; the buffers have room, and every thread makes the same calls.
            unsafe { self.walk(walker, operations, step, &works, &places, &failure) };
        });
        failure.into_inner().map_or(Ok(()), Err)
    }

    unsafe fn walk(
        &self,
        walker: &Walker<'_>,
        operations: &[Operation],
        step: &Step<'_>,
        works: &[Work],
        places: &Places,
        failure: &OnceLock<Failure>,
    ) {
        let mut registers = places.registers;
        let mut num_rows = step.num_tokens;
        let StepAdapters { adapters, runs, sampled_runs } = &step.adapters;
        let mut adapted = Adapted { adapters, runs, inner: places.inner, max_rank: places.max_rank };
        for operation in operations {
            // SAFETY: the program has checked widths and order of the operations; the caller of `run` vouches for the step.
            unsafe {
                match operation {
                    Operation::Linear { linear, from, to, combine } => {
                        let (from, to) = (registers[*from as usize], registers[*to as usize]);
                        let rows = Rows { address: from.source(), stride: linear.in_features(), num_rows };
                        let stride = match combine {
                            Combine::Store | Combine::Add => linear.output_columns(),
                            Combine::Apart => linear.out_features(),
                        };
                        let output = Output { address: to, stride, combine: *combine };
                        linear.apply(walker, rows, output, places.scratch);
                    }
                    Operation::Adapt { sites, from, to, steps, widths, then } => {
                        let (from, to) = (registers[*from as usize], registers[*to as usize]);
                        let product = |site: usize| {
                            let head = site - sites.start;
                            let address = Source::new(from.at(head * steps[0]).cast_const());
                            let rows = Rows { address, stride: widths[0], num_rows };
                            Product { rows, y: Target::new(to.at(head * steps[1])), out_columns: widths[1] }
                        };
                        let changed = sites.clone().filter(|&site| adapted.changes(site));
                        let context = TokenContext { step, registers: &registers };
                        if adapted.has_rows_for(walker.num_threads()) {
                            walker.for_ranges(num_rows, 1, |range| {
                                for site in changed.clone() {
                                    adapted.apply_to(range.clone(), site, product(site));
                                }
                                apply_to_rows(then, range, &context);
                            });
                        } else {
                            changed.for_each(|site| adapted.apply(walker, site, product(site)));
                            if !then.is_empty() {
                                run_rows(walker, then, num_rows, &context);
                            }
                        }
                    }
                    Operation::Rows(of_row) => {
                        let context = TokenContext { step, registers: &registers };
                        run_rows(walker, of_row, num_rows, &context);
                    }
                    Operation::Attend { cache, stride, sinks, attention, scales } => {
                        let (attention, scales) = (*attention, *scales);
                        let operands = Operands {
                            queries: registers[Register::Qkv as usize].source(),
                            stride: *stride,
                            cache: step.caches[*cache].source(),
                            output: registers[Register::Attended as usize],
                            sinks: *sinks,
                            bias: None,
                            scales,
                        };
                        let (work, states) = (&works[attention], places.states);
                        self.attentions[attention].attend(walker, work, &step.batch, &operands, states);
                    }
                    Operation::AdvanceStates { net, cache, from, to } => {
                        let Batch { query_starts, context_lens, num_sequences, .. } = step.batch;
                        let sequences =
                            Sequences { query_starts, context_lens, slots: step.state_slots, num_sequences };
                        let mut inputs = [registers[0].source(); MAX_INPUTS];
                        for (input, register) in inputs.iter_mut().zip(from) {
                            *input = registers[*register as usize].source();
                        }
                        let operands = recurrence::Operands {
                            inputs: &inputs[..from.len()],
                            slots: Target::new(step.caches[*cache].at(0).cast()),
                            output: registers[*to as usize],
                        };
                        net.run(walker, &sequences, &operands);
                    }
                    Operation::Gather { collective, widths, from, to } => {
                        let (from, to) = (registers[*from as usize], registers[*to as usize]);
                        gather(walker, collective, || widths, num_rows, from, to, failure);
                        if has_failed(failure) {
                            return;
                        }
                    }
                    Operation::Experts(experts) => {
                        experts.run(walker, num_rows, &registers, &places.routes, &adapted, places.scratch, failure);
                        if has_failed(failure) {
                            return;
                        }
                    }
                    Operation::Heads { linears, from, to, step, widths } => {
                        let (from, to) = (registers[*from as usize], registers[*to as usize]);
                        apply_heads(walker, linears, num_rows, [from, to], *step, *widths);
                    }
                    Operation::Select(kept) if step.num_samples < step.num_tokens => {
                        select(walker, kept, step, &registers, &places.sampled);
                        for &(register, _) in kept {
                            registers[register as usize] = places.sampled[register as usize];
                        }
                        num_rows = step.num_samples;
                        adapted.runs = sampled_runs;
                    }
                    Operation::Select(_) => {}
                }
            }
        }
    }
}

/// Runs operations on each row, one row after the other.
///
/// # Safety
/// As for `RowOperation::apply`, for all rows.
unsafe fn run_rows(walker: &Walker<'_>, of_row: &[RowOperation], num_rows: usize, context: &TokenContext<'_>) {
    let numbers = of_row.iter().map(RowOperation::numbers).sum::<usize>();
    // SAFETY: guaranteed by the caller; a row is one thread's.
    walker
        .for_ranges(num_rows, PART_NUMBERS / numbers.max(1), |range| unsafe { apply_to_rows(of_row, range, context) });
}

/// Runs operations on some rows, on the calling thread.
///
/// # Safety
/// As for `RowOperation::apply`, for these rows, which no other thread may use.
unsafe fn apply_to_rows(of_row: &[RowOperation], range: Range<usize>, context: &TokenContext<'_>) {
    for row in range {
        for operation in of_row {
            // SAFETY: guaranteed by the caller.
            unsafe { operation.apply(row, context) };
        }
    }
}

/// Rows of a head that one part computes.
const HEAD_ROWS: usize = 64;

/// Applies a dense layer for each head: a head's rows are one part, because there are many heads and their layers are small. `widths`:
/// elements of a row of `from` and of `to`.
///
/// # Safety
/// The registers must have the rows, and their rows the columns of all heads.
unsafe fn apply_heads(
    walker: &Walker<'_>,
    linears: &[Arc<Linear>],
    num_rows: usize,
    [from, to]: [Target<Element>; 2],
    step: usize,
    widths: [usize; 2],
) {
    let num_chunks = num_rows.div_ceil(HEAD_ROWS);
    walker.for_each(linears.len() * num_chunks, |part| {
        let (head, first) = (part / num_chunks, part % num_chunks * HEAD_ROWS);
        let (linear, num_rows) = (&linears[head], HEAD_ROWS.min(num_rows - first));
        let address = Source::new(from.at(first * widths[0] + head * linear.in_features()).cast_const());
        let rows = Rows { address, stride: widths[0], num_rows };
        let output = Output::store(Target::new(to.at(first * widths[1] + head * step)), widths[1]);
        // SAFETY: guaranteed by the caller; a dense layer needs no scratch.
        unsafe { linear.apply(&Pool::single(), rows, output, Target::new(std::ptr::null_mut())) };
    });
}

/// Whether a collective that this thread has passed failed. INVARIANT: a failure is set before the barrier, so every thread stops at the
/// same place.
fn has_failed(failure: &OnceLock<Failure>) -> bool {
    failure.get().is_some()
}

/// Joins the ranks' columns of contiguous rows, on one thread; the others wait for it. `widths`: bytes of a row on each rank.
///
/// # Safety
/// As for `Collective::gather`.
unsafe fn gather<W: AsRef<[usize]>>(
    walker: &Walker<'_>,
    collective: &Collective,
    widths: impl Fn() -> W + Sync,
    num_rows: usize,
    from: Target<Element>,
    to: Target<Element>,
    failure: &OnceLock<Failure>,
) {
    walker.for_each(1, |_| {
        let widths = widths();
        let stride = widths.as_ref()[collective.rank()];
        let part = Part { address: Source::new(from.at(0).cast_const().cast()), stride, num_rows };
        // SAFETY: guaranteed by the caller.
        let done =
            unsafe { collective.gather(&part, widths.as_ref(), Some(Target::new(to.at(0).cast())), |sleep| sleep()) };
        if let Err(reason) = done {
            // The one part of this phase is the only writer, and no phase follows it.
            let _ = failure.set(reason);
        }
    });
}

/// Copies the sampled rows of registers, given with their widths.
///
/// # Safety
/// The caller of `Stack::run` vouches for the step.
unsafe fn select(
    walker: &Walker<'_>,
    kept: &[(Register, usize)],
    step: &Step<'_>,
    from: &PerRegister<Target<Element>>,
    to: &PerRegister<Target<Element>>,
) {
    walker.for_each(step.num_samples, |sample| {
        for &(register, width) in kept {
            // SAFETY: sampled rows are rows of the step; each part writes its own row.
            unsafe {
                let row = *step.sample_rows.at(sample) as usize;
                let (source, target) = (from[register as usize].at(row * width), to[register as usize]);
                target.at(sample * width).copy_from_nonoverlapping(source, width);
            }
        }
    });
}
