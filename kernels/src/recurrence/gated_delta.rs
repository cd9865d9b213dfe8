//! Gated delta networks: convolution, delta rule over the state of each sequence, and gated norm. The Python module
//! `device/gated_delta.py` has the formulas. A part is a key head and the heads that it serves.

use super::convolution::Convolution;
use super::project::project;
use super::{CHUNK, Recurrence, Row, softplus};
use crate::element::Element;
use crate::simd::{F32, LANES, SUMS};

/// The largest dimension of a head.
const MAX_DIM: usize = 256;
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
    /// The heads that each key head serves.
    served: Vec<Vec<usize>>,
    key_dim: usize,
    value_dim: usize,
    /// Over queries, keys and values.
    conv: Convolution,
    /// Each head's rate of decay and its bias.
    decay: Vec<f32>,
    decay_bias: Vec<f32>,
    /// Weights of the norm, [value_dim].
    norm: Vec<f32>,
    eps: f32,
    /// The largest strength of a correction.
    strength: f32,
    /// Columns of "mixed" (queries, keys, values and the output's gates) and of "rates" (for each head the strength of its correction,
    /// then for each its decay).
    input_widths: [usize; 2],
}

/// The parameters of a layer: `conv` is [channels, rows].
pub(crate) struct GatedDeltaParts<'a> {
    pub(crate) num_key_heads: usize,
    pub(crate) key_dim: usize,
    /// The key head of each head.
    pub(crate) key_heads: &'a [i64],
    pub(crate) conv: &'a [f32],
    pub(crate) decay: &'a [f32],
    pub(crate) decay_bias: &'a [f32],
    pub(crate) norm: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) strength: f32,
}

/// What a row's key and query have to do with the rows of its chunk up to its own.
struct Scores {
    keys: [f32; CHUNK],
    queries: [f32; CHUNK],
}

impl Recurrence for GatedDelta {
    fn num_parts(&self) -> usize {
        self.served.len()
    }

    fn input_widths(&self) -> &[usize] {
        &self.input_widths
    }

    fn output_width(&self) -> usize {
        self.value_width()
    }

    fn state_floats(&self) -> usize {
        self.value_width() * self.key_dim
    }

    /// Inputs of the convolution, normed keys, corrected values, decays.
    fn row_floats(&self) -> usize {
        self.channels() + self.key_width() + self.value_width() + self.num_heads()
    }

    unsafe fn advance(&self, part: usize, row: &Row) {
        let first = row.first();
        let mut query = [0.0; MAX_DIM];
        let place = part * self.key_dim;
        // SAFETY: guaranteed by the caller.
        unsafe {
            let key = |position: usize| row.kept(position).add(self.channels() + place);
            self.convolve(row, place, self.key_dim, query.as_mut_ptr());
            self.convolve(row, self.key_width() + place, self.key_dim, key(row.position));
            self.normalize(query.as_mut_ptr(), 1.0 / (self.key_dim as f32).sqrt());
            self.normalize(key(row.position), 1.0);
            let mut scores = Scores { keys: [0.0; CHUNK], queries: [0.0; CHUNK] };
            for position in first..=row.position {
                scores.keys[position - first] = self.dot(key(row.position), key(position));
                scores.queries[position - first] = self.dot(query.as_ptr(), key(position));
            }
            for &head in &self.served[part] {
                self.advance_head(head, part, row, query.as_ptr(), &scores);
            }
        }
    }
}

impl GatedDelta {
    /// Validates the sizes. The error names the mismatch.
    pub(crate) fn new(of: &GatedDeltaParts<'_>) -> Result<GatedDelta, String> {
        let (num_key_heads, key_dim) = (of.num_key_heads, of.key_dim);
        let (num_heads, value_dim) = (of.decay.len(), of.norm.len());
        for dim in [key_dim, value_dim] {
            if dim == 0 || dim > MAX_DIM || !dim.is_multiple_of(LANES) {
                return Err(format!("heads have {dim} elements, must be a multiple of {LANES} up to {MAX_DIM}"));
            }
        }
        let mut served = vec![Vec::new(); num_key_heads];
        for (head, &key_head) in of.key_heads.iter().enumerate() {
            let heads = usize::try_from(key_head).ok().and_then(|key_head| served.get_mut(key_head));
            heads.ok_or_else(|| format!("head {head} has key head {key_head} of {num_key_heads}"))?.push(head);
        }
        if num_key_heads == 0 || num_heads == 0 || of.key_heads.len() != num_heads {
            return Err(format!("{} key heads are given for {num_heads} heads of {num_key_heads}", of.key_heads.len()));
        }
        let channels = 2 * num_key_heads * key_dim + num_heads * value_dim;
        if of.decay_bias.len() != num_heads {
            return Err(format!("{} biases of decay for {num_heads} heads", of.decay_bias.len()));
        }
        Ok(GatedDelta {
            served,
            key_dim,
            value_dim,
            conv: Convolution::new(channels, of.conv)?,
            input_widths: [channels + num_heads * value_dim, 2 * num_heads],
            decay: of.decay.to_vec(),
            decay_bias: of.decay_bias.to_vec(),
            norm: of.norm.to_vec(),
            eps: of.eps,
            strength: of.strength,
        })
    }

    fn num_heads(&self) -> usize {
        self.decay.len()
    }

    /// Elements of the keys, and of the queries, of a row.
    fn key_width(&self) -> usize {
        self.served.len() * self.key_dim
    }

    /// Elements of the values of a row.
    fn value_width(&self) -> usize {
        self.num_heads() * self.value_dim
    }

    /// Queries, keys and values.
    fn channels(&self) -> usize {
        self.conv.channels
    }

    unsafe fn advance_head(&self, head: usize, key_head: usize, row: &Row, query: *const f32, scores: &Scores) {
        let (dim, within, first) = (self.value_dim, row.within(), row.first());
        let of_values = self.channels() + self.key_width();
        let mut buffers = [[0.0; MAX_DIM]; 3];
        let [values, of_key, of_query] = &mut buffers;
        // SAFETY: guaranteed by the caller of `advance`.
        unsafe {
            let kept_value = |position: usize| row.kept(position).add(of_values + head * dim);
            let kept_decay = |position: usize| row.kept(position).add(of_values + self.value_width() + head);
            let key = row.kept(row.position).add(self.channels() + key_head * self.key_dim);
            let rates = row.inputs[1];
            let strength = self.strength / (1.0 + (-(*rates.add(head)).to_f32()).exp());
            let rate = (*rates.add(self.num_heads() + head)).to_f32() + self.decay_bias[head];
            *kept_decay(row.position) = (-self.decay[head] * softplus(rate)).exp();
            self.convolve(row, 2 * self.key_width() + head * dim, dim, values.as_mut_ptr());

            // What decays have left of each of the chunk's rows, and of the state before them.
            let mut left = [1.0; CHUNK];
            for index in (0..within).rev() {
                left[index] = left[index + 1] * *kept_decay(first + index + 1);
            }
            let start = left[0] * *kept_decay(first);
            let of_head = head * self.key_dim * dim;
            let old = row.state().map(|state| state.add(of_head));
            if let Some(old) = old {
                let products = [of_key.as_mut_ptr(), of_query.as_mut_ptr()];
                project::<2, VECTORS>(old, self.key_dim, dim, [key, query], products, row.is_cold);
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
                let gate = Element::load(row.inputs[0].add(self.channels() + head * dim + lane)).silu();
                Element::store(normed * gate, row.output.add(head * dim + lane));
            }
            if let Some(next) = row.next_state() {
                let kept_key = |index: usize| row.kept(first + index).add(self.channels() + key_head * self.key_dim);
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
                        sum.store(next.add(of_head + place));
                    }
                }
            }
        }
    }

    /// target = silu of what the convolution makes of `count` channels from `first` on, whose inputs it stores in the ring.
    unsafe fn convolve(&self, row: &Row, first: usize, count: usize, target: *mut f32) {
        // SAFETY: guaranteed by the caller of `advance`.
        unsafe {
            for channel in (first..first + count).step_by(LANES) {
                Element::load(row.inputs[0].add(channel)).store(row.kept(row.position).add(channel));
                let sum = self.conv.add(row, channel, F32::splat(0.0));
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
}

#[cfg(test)]
mod tests;
