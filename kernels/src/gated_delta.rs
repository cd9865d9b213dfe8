//! Gated delta networks: convolution, delta rule over the state of each sequence, and gated norm, row by row. The Python module
//! `kernels/gated_delta.py` has the formulas, and `kernels/state.py` says what a slot holds.
//!
//! INVARIANT: a row's arithmetic depends on its position and on the rows before it, which are in its sequence's slot; sums over the
//! rows of a chunk ascend.

use crate::element::Element;
use crate::pool::{Executor, Source, Target};
use crate::simd::{F32, LANES, SUMS};

/// Positions from one stored state to the next.
pub(crate) const CHUNK: usize = 16;
/// Rows in a slot.
const RING: usize = 2 * CHUNK;
/// The largest dimension of a head.
pub(crate) const MAX_DIM: usize = 256;
const EPSILON: f32 = 1e-6;
/// Vectors of a state's row that are read at a time, for a key and a query.
const VECTORS: usize = if SUMS >= 16 {
    8
} else if SUMS >= 4 {
    2
} else {
    1
};

/// One layer on one rank.
pub(crate) struct GatedDelta {
    num_key_heads: usize,
    /// Heads for each key head.
    group: usize,
    key_dim: usize,
    value_dim: usize,
    /// Weights of the convolution, [rows, channels]; a row's own are last.
    conv: Vec<f32>,
    /// Each head's rate of decay and its bias.
    decay: Vec<f32>,
    decay_bias: Vec<f32>,
    /// Weights of the norm, [value_dim].
    norm: Vec<f32>,
    eps: f32,
}

/// The parameters of a layer: `conv` is [channels, rows].
pub(crate) struct Parameters<'a> {
    pub(crate) conv: &'a [f32],
    pub(crate) decay: &'a [f32],
    pub(crate) decay_bias: &'a [f32],
    pub(crate) norm: &'a [f32],
    pub(crate) eps: f32,
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
#[derive(Clone, Copy)]
pub(crate) struct Operands {
    pub(crate) mixed: Source<Element>,
    pub(crate) rates: Source<Element>,
    pub(crate) slots: Target<f32>,
    pub(crate) output: Target<Element>,
}

/// A row that is computed, and its sequence's slot.
struct Row {
    position: usize,
    mixed: *const Element,
    rates: *const Element,
    states: *mut f32,
    ring: *mut f32,
    output: *mut Element,
}

/// What a row's key and query have to do with the rows of its chunk up to its own.
struct Scores {
    keys: [f32; CHUNK],
    queries: [f32; CHUNK],
}

impl GatedDelta {
    /// Validates the sizes. The error names the mismatch.
    pub(crate) fn new(num_key_heads: usize, key_dim: usize, of: &Parameters<'_>) -> Result<GatedDelta, String> {
        let (num_heads, value_dim) = (of.decay.len(), of.norm.len());
        for dim in [key_dim, value_dim] {
            if dim == 0 || dim > MAX_DIM || !dim.is_multiple_of(LANES) {
                return Err(format!("heads have {dim} elements, must be a multiple of {LANES} up to {MAX_DIM}"));
            }
        }
        if num_key_heads == 0 || num_heads == 0 || num_heads % num_key_heads != 0 {
            return Err(format!("{num_heads} heads are not a multiple of {num_key_heads} key heads"));
        }
        let channels = 2 * num_key_heads * key_dim + num_heads * value_dim;
        let width = of.conv.len() / channels;
        if of.conv.len() != width * channels || !(1..=CHUNK).contains(&width) {
            return Err(format!("{} weights of a convolution over {channels} channels", of.conv.len()));
        }
        if of.decay_bias.len() != num_heads {
            return Err(format!("{} biases of decay for {num_heads} heads", of.decay_bias.len()));
        }
        let transposed = |index: usize| of.conv[index % channels * width + index / channels];
        Ok(GatedDelta {
            num_key_heads,
            group: num_heads / num_key_heads,
            key_dim,
            value_dim,
            conv: (0..of.conv.len()).map(transposed).collect(),
            decay: of.decay.to_vec(),
            decay_bias: of.decay_bias.to_vec(),
            norm: of.norm.to_vec(),
            eps: of.eps,
        })
    }

    fn num_heads(&self) -> usize {
        self.decay.len()
    }

    /// Elements of the keys, and of the queries, of a row.
    fn key_width(&self) -> usize {
        self.num_key_heads * self.key_dim
    }

    /// Columns of the output.
    pub(crate) fn value_width(&self) -> usize {
        self.num_heads() * self.value_dim
    }

    /// Queries, keys and values.
    fn channels(&self) -> usize {
        2 * self.key_width() + self.value_width()
    }

    /// Columns of the first input: the channels, and the output's gates.
    pub(crate) fn mixed_width(&self) -> usize {
        self.channels() + self.value_width()
    }

    /// Columns of the second input: for each head, the strength of its correction, then for each its decay.
    pub(crate) fn rates_width(&self) -> usize {
        2 * self.num_heads()
    }

    fn state_floats(&self) -> usize {
        self.value_width() * self.key_dim
    }

    /// Inputs of the convolution, normed keys, corrected values, decays.
    fn row_floats(&self) -> usize {
        self.channels() + self.key_width() + self.value_width() + self.num_heads()
    }

    pub(crate) fn slot_floats(&self) -> usize {
        2 * self.state_floats() + RING * self.row_floats()
    }

    /// About how many numbers a step of one row reads.
    pub(crate) fn work(&self) -> usize {
        self.state_floats()
    }

    /// Advances the sequences by their rows, in order.
    ///
    /// # Safety
    /// The pointers must be valid for the rows and slots. Slots hold what the rows before have left there, from the chunk's first position on,
    /// and that many rows before as the convolution reads.
    pub(crate) unsafe fn run(&self, executor: &impl Executor, sequences: &Sequences, operands: &Operands) {
        executor.for_each(sequences.num_sequences * self.num_key_heads, |part| {
            let (sequence, key_head) = (part / self.num_key_heads, part % self.num_key_heads);
            // SAFETY: guaranteed by the caller; parts differ in the slot or in the heads.
            unsafe {
                let [first, end] = [0, 1].map(|next| *sequences.query_starts.at(sequence + next) as usize);
                let before = *sequences.context_lens.at(sequence) as usize - (end - first);
                let states = operands.slots.at(*sequences.slots.at(sequence) as usize * self.slot_floats());
                for row in first..end {
                    self.advance(
                        key_head,
                        &Row {
                            position: before + row - first,
                            mixed: operands.mixed.at(row * self.mixed_width()),
                            rates: operands.rates.at(row * self.rates_width()),
                            states,
                            ring: states.add(2 * self.state_floats()),
                            output: operands.output.at(row * self.value_width()),
                        },
                    );
                }
            }
        });
    }

    /// A row of the ring.
    unsafe fn kept(&self, row: &Row, position: usize) -> *mut f32 {
        // SAFETY: the ring has RING rows.
        unsafe { row.ring.add(position % RING * self.row_floats()) }
    }

    /// A key head of a row and the heads that it serves.
    unsafe fn advance(&self, key_head: usize, row: &Row) {
        let first = row.position - row.position % CHUNK;
        let mut query = [0.0; MAX_DIM];
        let place = key_head * self.key_dim;
        // SAFETY: guaranteed by the caller of `run`.
        unsafe {
            let key = |position: usize| self.kept(row, position).add(self.channels() + place);
            self.convolve(row, place, self.key_dim, query.as_mut_ptr());
            self.convolve(row, self.key_width() + place, self.key_dim, key(row.position));
            self.normalize(query.as_mut_ptr(), 1.0 / (self.key_dim as f32).sqrt());
            self.normalize(key(row.position), 1.0);
            let mut scores = Scores { keys: [0.0; CHUNK], queries: [0.0; CHUNK] };
            for position in first..=row.position {
                scores.keys[position - first] = self.dot(key(row.position), key(position));
                scores.queries[position - first] = self.dot(query.as_ptr(), key(position));
            }
            for head in key_head * self.group..(key_head + 1) * self.group {
                self.advance_head(head, row, query.as_ptr(), &scores);
            }
        }
    }

    unsafe fn advance_head(&self, head: usize, row: &Row, query: *const f32, scores: &Scores) {
        let (dim, within) = (self.value_dim, row.position % CHUNK);
        let (chunk, first) = (row.position / CHUNK, row.position - within);
        let of_values = self.channels() + self.key_width();
        let mut buffers = [[0.0; MAX_DIM]; 3];
        let [values, of_key, of_query] = &mut buffers;
        // SAFETY: guaranteed by the caller of `run`.
        unsafe {
            let kept_value = |position: usize| self.kept(row, position).add(of_values + head * dim);
            let kept_decay = |position: usize| self.kept(row, position).add(of_values + self.value_width() + head);
            let key = self.kept(row, row.position).add(self.channels() + head / self.group * self.key_dim);
            let strength = 1.0 / (1.0 + (-(*row.rates.add(head)).to_f32()).exp());
            let rate = (*row.rates.add(self.num_heads() + head)).to_f32() + self.decay_bias[head];
            *kept_decay(row.position) = (-self.decay[head] * softplus(rate)).exp();
            self.convolve(row, 2 * self.key_width() + head * dim, dim, values.as_mut_ptr());

            // What decays have left of each of the chunk's rows, and of the state before them.
            let mut left = [1.0; CHUNK];
            for index in (0..within).rev() {
                left[index] = left[index + 1] * *kept_decay(first + index + 1);
            }
            let start = left[0] * *kept_decay(first);
            let state = |chunk: usize| row.states.add(chunk % 2 * self.state_floats() + head * self.key_dim * dim);
            // The first chunk starts with a state of zeros, which is not stored.
            let old = (chunk > 0).then(|| state(chunk).cast_const());
            if let Some(old) = old {
                self.project(old, [key, query], [of_key.as_mut_ptr(), of_query.as_mut_ptr()]);
            }
            let mut squares = F32::splat(0.0);
            for lane in (0..dim).step_by(LANES) {
                let at = |numbers: &[f32; MAX_DIM]| F32::load(numbers.as_ptr().add(lane));
                let mut value = at(values) - at(of_key) * F32::splat(start);
                let mut output = at(of_query) * F32::splat(start);
                for index in 0..within {
                    let kept = F32::load(kept_value(first + index).add(lane));
                    value = kept.mul_add(F32::splat(-left[index] * scores.keys[index]), value);
                    output = kept.mul_add(F32::splat(left[index] * scores.queries[index]), output);
                }
                let value = value * F32::splat(strength);
                value.store(kept_value(row.position).add(lane));
                let output = value.mul_add(F32::splat(scores.queries[within]), output);
                squares = output.mul_add(output, squares);
                output.store(of_query.as_mut_ptr().add(lane));
            }
            let factor = F32::splat(1.0 / (squares.reduce_sum() / dim as f32 + self.eps).sqrt());
            for lane in (0..dim).step_by(LANES) {
                let normed = F32::load(of_query.as_ptr().add(lane)) * factor * F32::load(self.norm.as_ptr().add(lane));
                let gate = Element::load(row.mixed.add(self.channels() + head * dim + lane)).silu();
                Element::store(normed * gate, row.output.add(head * dim + lane));
            }
            if within == CHUNK - 1 {
                let kept_key = |index: usize| {
                    self.kept(row, first + index).add(self.channels() + head / self.group * self.key_dim)
                };
                for element in 0..self.key_dim {
                    let weights: [f32; CHUNK] =
                        std::array::from_fn(|index| left[index] * *kept_key(index).add(element));
                    for lane in (0..dim).step_by(LANES) {
                        let place = element * dim + lane;
                        let old = old.map_or(F32::splat(0.0), |old| F32::load(old.add(place)));
                        let mut sum = old * F32::splat(start);
                        for (index, &weight) in weights.iter().enumerate() {
                            sum = F32::load(kept_value(first + index).add(lane)).mul_add(F32::splat(weight), sum);
                        }
                        sum.store(state(chunk + 1).add(place));
                    }
                }
            }
        }
    }

    /// target = silu of what the convolution makes of `count` channels from `first` on, whose inputs it stores in the ring.
    unsafe fn convolve(&self, row: &Row, first: usize, count: usize, target: *mut f32) {
        let (channels, position) = (self.channels(), row.position);
        let width = self.conv.len() / channels;
        // SAFETY: guaranteed by the caller of `run`; rows before the first position are not read.
        unsafe {
            for channel in (first..first + count).step_by(LANES) {
                Element::load(row.mixed.add(channel)).store(self.kept(row, position).add(channel));
                let mut sum = F32::splat(0.0);
                for back in (0..width.min(position + 1)).rev() {
                    let weight = F32::load(self.conv.as_ptr().add((width - 1 - back) * channels + channel));
                    sum = F32::load(self.kept(row, position - back).add(channel)).mul_add(weight, sum);
                }
                sum.silu().store(target.add(channel - first));
            }
        }
    }

    /// Divides a key or a query by its length, and multiplies it.
    unsafe fn normalize(&self, vector: *mut f32, factor: f32) {
        // SAFETY: it has `key_dim` elements.
        unsafe {
            let factor = F32::splat(factor / (self.dot(vector, vector) + EPSILON).sqrt());
            for lane in (0..self.key_dim).step_by(LANES) {
                (F32::load(vector.add(lane)) * factor).store(vector.add(lane));
            }
        }
    }

    /// The product of two keys or queries.
    unsafe fn dot(&self, one: *const f32, other: *const f32) -> f32 {
        let mut sum = F32::splat(0.0);
        for lane in (0..self.key_dim).step_by(LANES) {
            // SAFETY: they have `key_dim` elements.
            sum = unsafe { F32::load(one.add(lane)).mul_add(F32::load(other.add(lane)), sum) };
        }
        sum.reduce_sum()
    }

    /// The products of two vectors with a state [key_dim, value_dim].
    unsafe fn project(&self, state: *const f32, vectors: [*const f32; 2], products: [*mut f32; 2]) {
        let mut first = 0;
        while first < self.value_dim {
            let products = products.map(|product| product.wrapping_add(first));
            // SAFETY: the columns are in the state and in the products.
            unsafe {
                if self.value_dim - first >= VECTORS * LANES {
                    self.project_columns::<VECTORS>(state.add(first), vectors, products);
                    first += VECTORS * LANES;
                } else {
                    self.project_columns::<1>(state.add(first), vectors, products);
                    first += LANES;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn project_columns<const N: usize>(
        &self,
        state: *const f32,
        vectors: [*const f32; 2],
        products: [*mut f32; 2],
    ) {
        let mut sums = [[F32::splat(0.0); N]; 2];
        // SAFETY: guaranteed by the caller.
        unsafe {
            for element in 0..self.key_dim {
                let factors = vectors.map(|vector| F32::splat(*vector.add(element)));
                for column in 0..N {
                    let number = F32::load(state.add(element * self.value_dim + column * LANES));
                    for (sums, factor) in sums.iter_mut().zip(factors) {
                        sums[column] = number.mul_add(factor, sums[column]);
                    }
                }
            }
            for (sums, product) in sums.into_iter().zip(products) {
                for (column, sum) in sums.into_iter().enumerate() {
                    sum.store(product.add(column * LANES));
                }
            }
        }
    }
}

/// ln(1 + e^x)
fn softplus(x: f32) -> f32 {
    x.max(0.0) + (-x.abs()).exp().ln_1p()
}

#[cfg(test)]
mod tests;
