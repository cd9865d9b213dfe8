//! Gated delta networks: convolution, delta rule over the state of each sequence, and gated norm. The Python module
//! `device/gated_delta.py` has the formulas. A part is a key head and the heads that it serves.

use super::convolution::Convolution;
use super::project::project;
use super::{CHUNK, Recurrence, Row, softplus};
use crate::element::Element;
use crate::simd::{F32, LANES, SUMS};
use std::mem::MaybeUninit;

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
    /// Each head's rate of decay, and the bias of each of its decays.
    decay: Vec<f32>,
    decay_bias: Vec<f32>,
    /// Decays of a head: one, or one for each element of its keys.
    decay_dim: usize,
    /// The lowest logarithm of a decay, which sigmoids approach; None: softplus, without a limit.
    decay_floor: Option<f32>,
    /// Weights of the norm, [value_dim].
    norm: Vec<f32>,
    eps: f32,
    /// The largest strength of a correction.
    strength: f32,
    has_sigmoid_gates: bool,
    /// Columns of "mixed" (queries, keys, values and the output's gates) and of "rates" (for each head the strength of its correction,
    /// then its decays). Decays and gates may be two further inputs.
    input_widths: Vec<usize>,
    /// The input and the first column of decays and of gates.
    of_decays: (usize, usize),
    of_gates: (usize, usize),
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
    pub(crate) decay_floor: Option<f32>,
    pub(crate) has_sigmoid_gates: bool,
    /// Decays and gates are inputs of their own.
    pub(crate) is_apart: bool,
}

/// What a row's key and query have to do with the rows of its chunk up to its own.
struct Scores {
    keys: [f32; CHUNK],
    queries: [f32; CHUNK],
}

/// A row's key and query, and what decays of each element have left at that row: of the chunk's keys, of the state before them, and
/// of key and query that read this state.
struct Decayed {
    keys: [[f32; MAX_DIM]; CHUNK],
    start: [f32; MAX_DIM],
    key: [f32; MAX_DIM],
    query: [f32; MAX_DIM],
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
        self.channels() + self.key_width() + self.value_width() + self.decay_bias.len()
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
            if self.decay_dim == 1 {
                for position in first..=row.position {
                    scores.keys[position - first] = self.dot(key(row.position), key(position));
                    scores.queries[position - first] = self.dot(query.as_ptr(), key(position));
                }
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
        let (num_decays, value_width) = (of.decay_bias.len(), num_heads * value_dim);
        let decay_dim = num_decays / num_heads;
        if num_decays != decay_dim * num_heads || ![1, key_dim].contains(&decay_dim) {
            return Err(format!("{num_decays} biases of decay for {num_heads} heads"));
        }
        let (input_widths, of_decays, of_gates) = if of.is_apart {
            (vec![channels, num_heads, num_decays, value_width], (2, 0), (3, 0))
        } else {
            (vec![channels + value_width, num_heads + num_decays], (1, num_heads), (0, channels))
        };
        Ok(GatedDelta {
            served,
            key_dim,
            value_dim,
            conv: Convolution::new(channels, of.conv)?,
            input_widths,
            of_decays,
            of_gates,
            decay: of.decay.to_vec(),
            decay_bias: of.decay_bias.to_vec(),
            decay_dim,
            decay_floor: of.decay_floor,
            has_sigmoid_gates: of.has_sigmoid_gates,
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
        let of_keys = self.channels() + key_head * self.key_dim;
        let of_values = self.channels() + self.key_width();
        let mut buffers = [[0.0; MAX_DIM]; 3];
        let [values, of_key, of_query] = &mut buffers;
        let mut decayed = MaybeUninit::<Decayed>::uninit();
        // SAFETY: guaranteed by the caller of `advance`.
        unsafe {
            let kept_key = |index: usize| row.kept(first + index).add(of_keys).cast_const();
            let kept_value = |position: usize| row.kept(position).add(of_values + head * dim);
            let strength = self.strength / (1.0 + (-(*row.inputs[1].add(head)).to_f32()).exp());
            self.convolve(row, 2 * self.key_width() + head * dim, dim, values.as_mut_ptr());
            self.keep_decays(head, row);

            // What decays have left of each of the chunk's rows, and of the state before them.
            let (mut left, mut start) = ([1.0; CHUNK], 1.0);
            // What the rows of the chunk count for the row's key and query.
            let mut weights = Scores { keys: [0.0; CHUNK], queries: [0.0; CHUNK] };
            let mut readers = [kept_key(within), query];
            if self.decay_dim == 1 {
                for index in (0..within).rev() {
                    left[index] = left[index + 1] * *self.kept_decay(head, row, first + index + 1);
                }
                start = left[0] * *self.kept_decay(head, row, first);
                for index in 0..=within {
                    weights.keys[index] = left[index] * scores.keys[index];
                    weights.queries[index] = left[index] * scores.queries[index];
                }
            } else {
                self.decay_elements(head, of_keys, row, query, decayed.as_mut_ptr());
                for index in 0..=within {
                    let key = (&raw const (*decayed.as_ptr()).keys[index]).cast();
                    weights.keys[index] = self.dot(kept_key(within), key);
                    weights.queries[index] = self.dot(query, key);
                }
                readers =
                    [&raw const (*decayed.as_ptr()).key, &raw const (*decayed.as_ptr()).query].map(<*const _>::cast);
            }
            let of_head = head * self.key_dim * dim;
            let old = row.state().map(|state| state.add(of_head));
            if let Some(old) = old {
                let products = [of_key.as_mut_ptr(), of_query.as_mut_ptr()];
                project::<2, VECTORS>(old, self.key_dim, dim, readers, products);
            }
            let mut squares = F32::splat(0.0);
            for lane in (0..dim).step_by(LANES) {
                let at = |numbers: &[f32; MAX_DIM]| F32::load(numbers.as_ptr().add(lane));
                let mut value = at(values) - at(of_key) * F32::splat(start);
                let mut output = at(of_query) * F32::splat(start);
                for index in 0..within {
                    let kept = F32::load(kept_value(first + index).add(lane));
                    value = kept.mul_add(F32::splat(-weights.keys[index]), value);
                    output = kept.mul_add(F32::splat(weights.queries[index]), output);
                }
                let value = value * F32::splat(strength);
                value.store(kept_value(row.position).add(lane));
                let output = value.mul_add(F32::splat(weights.queries[within]), output);
                squares = output.mul_add(output, squares);
                output.store(of_query.as_mut_ptr().add(lane));
            }
            let factor = F32::splat(1.0 / (squares.reduce_sum() / dim as f32 + self.eps).sqrt());
            for lane in (0..dim).step_by(LANES) {
                let normed = F32::load(of_query.as_ptr().add(lane)) * factor * F32::load(self.norm.as_ptr().add(lane));
                let gate = Element::load(row.inputs[self.of_gates.0].add(self.of_gates.1 + head * dim + lane));
                let gate = if self.has_sigmoid_gates { gate.sigmoid() } else { gate.silu() };
                Element::store(normed * gate, row.output.add(head * dim + lane));
            }
            if let Some(next) = row.next_state() {
                for element in 0..self.key_dim {
                    let (weights, start): ([f32; CHUNK], f32) = if self.decay_dim == 1 {
                        (std::array::from_fn(|index| left[index] * *kept_key(index).add(element)), start)
                    } else {
                        let decayed = &*decayed.as_ptr();
                        (decayed.keys.each_ref().map(|key| key[element]), decayed.start[element])
                    };
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

    /// The decays that a row has left in the ring.
    unsafe fn kept_decay(&self, head: usize, row: &Row, position: usize) -> *mut f32 {
        let of_decays = self.channels() + self.key_width() + self.value_width();
        // SAFETY: guaranteed by the caller of `advance`.
        unsafe { row.kept(position).add(of_decays + head * self.decay_dim) }
    }

    /// Computes the row's decays.
    unsafe fn keep_decays(&self, head: usize, row: &Row) {
        let (decay, first) = (self.decay[head], head * self.decay_dim);
        // SAFETY: guaranteed by the caller of `advance`.
        unsafe {
            let (rates, kept) =
                (row.inputs[self.of_decays.0].add(self.of_decays.1 + first), self.kept_decay(head, row, row.position));
            if self.decay_dim == 1 {
                let rate = (*rates).to_f32() + self.decay_bias[head];
                *kept = match self.decay_floor {
                    None => (-decay * softplus(rate)).exp(),
                    Some(floor) => (floor / (1.0 + (-decay * rate).exp())).exp(),
                };
                return;
            }
            for lane in (0..self.decay_dim).step_by(LANES) {
                let rate = Element::load(rates.add(lane)) + F32::load(self.decay_bias.as_ptr().add(first + lane));
                let exponent = match self.decay_floor {
                    None => F32::splat(-decay) * rate.softplus(),
                    Some(floor) => F32::splat(floor) * (F32::splat(decay) * rate).sigmoid(),
                };
                exponent.exp().store(kept.add(lane));
            }
        }
    }

    /// Decays the keys of the chunk up to the row, which begin at column `of_keys` of the ring, and the row's own key and query.
    unsafe fn decay_elements(&self, head: usize, of_keys: usize, row: &Row, query: *const f32, decayed: *mut Decayed) {
        let (within, first) = (row.within(), row.first());
        // SAFETY: guaranteed by the caller of `advance`; only fields of `decayed` are written.
        unsafe {
            for lane in (0..self.key_dim).step_by(LANES) {
                let key = |index: usize| F32::load(row.kept(first + index).add(of_keys + lane));
                let mut left = F32::splat(1.0);
                for index in (0..=within).rev() {
                    (left * key(index)).store((&raw mut (*decayed).keys[index]).cast::<f32>().add(lane));
                    left = left * F32::load(self.kept_decay(head, row, first + index).add(lane));
                }
                left.store((&raw mut (*decayed).start).cast::<f32>().add(lane));
                (left * key(within)).store((&raw mut (*decayed).key).cast::<f32>().add(lane));
                (left * F32::load(query.add(lane))).store((&raw mut (*decayed).query).cast::<f32>().add(lane));
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
