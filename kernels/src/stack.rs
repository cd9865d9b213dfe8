//! All layers of a Llama-like decoder in one call and one parallel section per step. In small batches a layer's kernels take about ten
//! microseconds each, as long as a call from Python and the start of a section.
//!
//! INVARIANT: bit-equal to the single kernels called one after the other.

use crate::attention::{Attention, Batch, Layout, NewTokens, Operands, Work};
use crate::linear::{Linear, Output, Rows};
use crate::norm::RmsNorm;
use crate::pool::{Executor, Pool, Source, Target, Walker};
use crate::rotate::{self, Angles, Heads};
use std::sync::{Arc, Mutex, PoisonError};

/// One layer: norm and attention, norm and gated MLP.
pub(crate) struct Layer {
    pub(crate) attention_norm: Source<u16>,
    pub(crate) qkv: Arc<Linear>,
    pub(crate) output: Arc<Linear>,
    pub(crate) mlp_norm: Source<u16>,
    /// Packed with `gated`.
    pub(crate) gate_up: Arc<Linear>,
    pub(crate) down: Arc<Linear>,
}

/// All layers and the final norm. The caller owns norm weights and angles and keeps them alive.
pub(crate) struct Stack {
    pub(crate) layers: Vec<Layer>,
    pub(crate) final_norm: Source<u16>,
    pub(crate) eps: f32,
    pub(crate) attention: Attention,
    pub(crate) cos: Source<f32>,
    pub(crate) sin: Source<f32>,
    pub(crate) half: usize,
    buffers: Mutex<Buffers>,
}

/// One step: its tokens, their sequences, and the rows to output.
pub(crate) struct Step<'a> {
    /// [tokens, hidden]: the embeddings; overwritten.
    pub(crate) residual: Target<u16>,
    pub(crate) num_tokens: usize,
    pub(crate) positions: Source<i64>,
    pub(crate) slots: Source<i64>,
    pub(crate) batch: Batch,
    /// One per layer.
    pub(crate) caches: &'a [Target<u16>],
    pub(crate) sample_rows: Source<i64>,
    pub(crate) num_samples: usize,
    /// [samples, hidden]: the normalized output of the last layer.
    pub(crate) output: Target<u16>,
}

/// Intermediate results, reused from step to step; they grow to the largest step's size.
#[derive(Default)]
struct Buffers {
    numbers: Vec<u16>,
    states: Vec<f32>,
    scratch: Vec<u8>,
}

/// Addresses of a step's intermediate results in the buffers.
#[derive(Clone, Copy)]
struct Places {
    normed: Target<u16>,
    qkv: Target<u16>,
    attended: Target<u16>,
    gated: Target<u16>,
    sampled_residual: Target<u16>,
    sampled_attended: Target<u16>,
    states: Target<f32>,
    /// Of the linear layers.
    scratch: Target<u8>,
}

/// Phases of the section per layer, at most: nine kernels, of which four are linear layers that may quantize their inputs first.
const PHASES_PER_LAYER: usize = 13;
/// The gather of sampled rows, and the final norm.
const MORE_PHASES: usize = 2;

impl Buffers {
    fn places(&mut self, sizes: [usize; 6], states: usize, scratch: usize) -> Places {
        let total = sizes.iter().sum();
        if self.numbers.len() < total {
            self.numbers.resize(total, 0);
        }
        if self.states.len() < states {
            self.states.resize(states, 0.0);
        }
        if self.scratch.len() < scratch {
            self.scratch.resize(scratch, 0);
        }
        let mut offset = 0;
        let [normed, qkv, attended, gated, sampled_residual, sampled_attended] = sizes.map(|size| {
            let place = Target::new(self.numbers.as_mut_ptr().wrapping_add(offset));
            offset += size;
            place
        });
        let states = Target::new(self.states.as_mut_ptr());
        let scratch = Target::new(self.scratch.as_mut_ptr());
        Places { normed, qkv, attended, gated, sampled_residual, sampled_attended, states, scratch }
    }
}

impl Stack {
    /// Validates that the layers' sizes match. The error names the mismatch.
    pub(crate) fn new(
        layers: Vec<Layer>,
        final_norm: Source<u16>,
        eps: f32,
        attention: Attention,
        angles: (Source<f32>, Source<f32>, usize),
    ) -> Result<Stack, String> {
        let layout = &attention.layout;
        let query_size = layout.num_heads * layout.head_dim;
        if layout.value_dim != layout.head_dim || layout.values_in_keys || attention.has_relative_bias {
            return Err(
                "a stack's values are as wide as its keys, beside them, and its scores have no learned bias".to_owned()
            );
        }
        let qkv_size = query_size + 2 * layout.num_kv_heads * layout.head_dim;
        let hidden = layers.first().ok_or("a stack needs a layer")?.qkv.in_features();
        for (index, layer) in layers.iter().enumerate() {
            let fits = [
                (layer.qkv.in_features(), hidden, "qkv input"),
                (layer.qkv.output_columns(), qkv_size, "qkv output"),
                (layer.output.in_features(), query_size, "attention output input"),
                (layer.output.output_columns(), hidden, "attention output"),
                (layer.gate_up.in_features(), hidden, "gate and up input"),
                (layer.gate_up.output_columns(), layer.down.in_features(), "gated size"),
                (layer.down.output_columns(), hidden, "down output"),
            ];
            if let Some((given, wanted, what)) = fits.into_iter().find(|(given, wanted, _)| given != wanted) {
                return Err(format!("layer {index}: {what} is {given}, must be {wanted}"));
            }
            if !layer.gate_up.is_gated() || layer.qkv.is_gated() || layer.output.is_gated() || layer.down.is_gated() {
                return Err(format!("layer {index}: gate_up must be packed as gated, and nothing else"));
            }
        }
        let (cos, sin, half) = angles;
        Ok(Stack { layers, final_norm, eps, attention, cos, sin, half, buffers: Mutex::default() })
    }

    /// Elements of a residual row.
    pub(crate) fn hidden(&self) -> usize {
        self.layers[0].qkv.in_features()
    }

    /// Elements of a token's queries.
    fn query_size(&self) -> usize {
        self.attention.layout.num_heads * self.attention.layout.head_dim
    }

    /// Runs a step through all layers.
    ///
    /// # Safety
    /// The step's pointers must be valid for the stated shapes, with a cache for each layer. The CPU must be `supported()`.
    pub(crate) unsafe fn run(&self, pool: &Pool, step: &Step<'_>) {
        // SAFETY: the caller vouches for the batch.
        let work = unsafe { self.attention.plan(&step.batch, Executor::num_threads(pool)) };
        let gated_size = self.layers.iter().map(|layer| layer.down.in_features()).max().unwrap_or(0);
        let mut buffers = self.buffers.lock().unwrap_or_else(PoisonError::into_inner);
        let sizes = [
            step.num_tokens * self.hidden(),
            step.num_tokens * self.layers[0].qkv.output_columns(),
            step.num_tokens * self.query_size(),
            step.num_tokens * gated_size,
            step.num_samples * self.hidden(),
            step.num_samples * self.query_size(),
        ];
        let linears = self.layers.iter().flat_map(|layer| [&layer.qkv, &layer.output, &layer.gate_up, &layer.down]);
        let scratch = linears.map(|linear| linear.scratch_bytes(step.num_tokens)).max().unwrap_or(0);
        let places = buffers.places(sizes, work.room_floats(), scratch);
        pool.section(self.layers.len() * PHASES_PER_LAYER + MORE_PHASES, |walker| {
            // SAFETY: the caller vouches for the step; the buffers have room, and every thread makes the same calls.
            unsafe { self.walk(walker, step, &work, places) };
        });
    }

    unsafe fn walk(&self, walker: &Walker<'_>, step: &Step<'_>, work: &Work, places: Places) {
        let mut residual = step.residual;
        let mut num_rows = step.num_tokens;
        for (index, layer) in self.layers.iter().enumerate() {
            let is_last = index + 1 == self.layers.len();
            // SAFETY: the caller of `run` vouches for the step.
            unsafe {
                self.norm(walker, layer.attention_norm, residual, num_rows, places.normed);
                self.store(walker, layer, step, step.caches[index], places);
                if is_last && step.num_samples == 0 {
                    return;
                }
                self.attend(walker, step, step.caches[index], work, places);
                let mut attended = places.attended;
                if is_last && step.num_samples < step.num_tokens {
                    // After the last layer's attention only the sampled rows matter.
                    self.take_sampled(walker, step, places);
                    (residual, attended) = (places.sampled_residual, places.sampled_attended);
                    num_rows = step.num_samples;
                }
                layer.output.apply(
                    walker,
                    rows(attended, self.query_size(), num_rows),
                    Output::Add(residual),
                    places.scratch,
                );
                self.norm(walker, layer.mlp_norm, residual, num_rows, places.normed);
                let normed = rows(places.normed, self.hidden(), num_rows);
                layer.gate_up.apply(walker, normed, Output::Store(places.gated), places.scratch);
                let gated = rows(places.gated, layer.down.in_features(), num_rows);
                layer.down.apply(walker, gated, Output::Add(residual), places.scratch);
            }
        }
        // SAFETY: as above.
        unsafe { self.norm(walker, self.final_norm, residual, num_rows, step.output) };
    }

    unsafe fn norm(&self, walker: &Walker<'_>, weight: Source<u16>, x: Target<u16>, num_rows: usize, to: Target<u16>) {
        let norm = RmsNorm { weight, eps: self.eps, dim: self.hidden(), num_rows };
        // SAFETY: the caller of `run` vouches for the step.
        unsafe { norm.apply(walker, x.source(), to) };
    }

    /// Projects and rotates queries and keys of the new tokens, and stores keys and values.
    unsafe fn store(&self, walker: &Walker<'_>, layer: &Layer, step: &Step<'_>, cache: Target<u16>, places: Places) {
        let Layout { num_heads, num_kv_heads, head_dim, .. } = self.attention.layout;
        let stride = layer.qkv.output_columns();
        let queries = Heads { address: places.qkv, stride, num_heads, head_dim };
        let keys = Target::new(places.qkv.at(num_heads * head_dim));
        let keys = Heads { address: keys, stride, num_heads: num_kv_heads, head_dim };
        let tokens = NewTokens {
            keys: keys.address.source(),
            keys_stride: stride,
            values: Source::new(places.qkv.at((num_heads + num_kv_heads) * head_dim)),
            values_stride: stride,
            slots: step.slots,
            num_tokens: step.num_tokens,
        };
        let angles = Angles { cos: self.cos, sin: self.sin, positions: step.positions, half: self.half };
        // SAFETY: the caller of `run` vouches for the step.
        unsafe {
            let normed = rows(places.normed, self.hidden(), step.num_tokens);
            layer.qkv.apply(walker, normed, Output::Store(places.qkv), places.scratch);
            rotate::rotate_and_write(walker, &angles, [queries, keys], &self.attention.layout, cache, tokens);
        }
    }

    unsafe fn attend(&self, walker: &Walker<'_>, step: &Step<'_>, cache: Target<u16>, work: &Work, places: Places) {
        let operands = Operands {
            queries: places.qkv.source(),
            stride: self.layers[0].qkv.output_columns(),
            cache: cache.source(),
            output: places.attended,
            sinks: None,
            bias: None,
        };
        // SAFETY: the caller of `run` vouches for the step.
        unsafe { self.attention.attend(walker, work, &step.batch, &operands, places.states) };
    }

    /// Gathers the sampled rows of the residual and of the attention's output.
    unsafe fn take_sampled(&self, walker: &Walker<'_>, step: &Step<'_>, places: Places) {
        walker.for_each(step.num_samples, |sample| {
            // SAFETY: sampled rows are rows of the step; each part writes its own row.
            unsafe {
                let row = *step.sample_rows.at(sample) as usize;
                for (from, to, size) in [
                    (step.residual, places.sampled_residual, self.hidden()),
                    (places.attended, places.sampled_attended, self.query_size()),
                ] {
                    to.at(sample * size).copy_from_nonoverlapping(from.at(row * size), size);
                }
            }
        });
    }
}

fn rows(address: Target<u16>, stride: usize, num_rows: usize) -> Rows {
    Rows { address: address.source(), stride, num_rows }
}
