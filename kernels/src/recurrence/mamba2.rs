//! Mamba 2: convolution, a state that decays and to which each row adds, and gates. The Python module `device/mamba2.py` has the
//! formulas. A part is a block of heads, which has B and C of its own in the ring.

use super::convolution::Convolution;
use super::project::project;
use super::{CHUNK, Recurrence, Row, softplus};
use crate::element::Element;
use crate::simd::{F32, LANES, SUMS};

/// The largest dimension of a head and of a state.
const MAX_DIM: usize = 256;
/// Vectors of a state's row that are read at a time; heads usually have four.
const VECTORS: usize = if SUMS >= 4 { 4 } else { 1 };

/// One layer on one rank.
pub(crate) struct Mamba2 {
    num_groups: usize,
    /// Heads for each group of B and C, and for each block but the last ones of the groups.
    group: usize,
    block: usize,
    state_dim: usize,
    head_dim: usize,
    /// Over x of all heads, B of all blocks, C of all blocks; None: there is none.
    conv: Option<Convolution>,
    conv_bias: Vec<f32>,
    /// These have a number for each head.
    decay: Vec<f32>,
    dt_bias: Vec<f32>,
    skip: Vec<f32>,
    dt_limits: (f32, f32),
    gate_factor: f32,
    dt_factor: f32,
    /// Outputs are gated here.
    has_gates: bool,
    /// Otherwise it is 1.
    has_dt: bool,
    /// Columns of "mixed": x, B and C of each group, gates, and dt of each head.
    input_widths: [usize; 1],
}

/// The parameters of a layer: `conv` is [channels, rows].
pub(crate) struct Mamba2Parts<'a> {
    pub(crate) num_groups: usize,
    pub(crate) block_heads: usize,
    pub(crate) state_dim: usize,
    pub(crate) head_dim: usize,
    /// Empty: there is no convolution.
    pub(crate) conv: &'a [f32],
    pub(crate) conv_bias: &'a [f32],
    pub(crate) decay: &'a [f32],
    pub(crate) dt_bias: &'a [f32],
    pub(crate) skip: &'a [f32],
    pub(crate) dt_limits: (f32, f32),
    pub(crate) gate_factor: f32,
    pub(crate) dt_factor: f32,
    pub(crate) has_gates: bool,
    pub(crate) has_dt: bool,
}

impl Recurrence for Mamba2 {
    fn num_parts(&self) -> usize {
        self.num_groups * self.blocks()
    }

    fn input_widths(&self) -> &[usize] {
        &self.input_widths
    }

    fn output_width(&self) -> usize {
        self.value_width()
    }

    fn state_floats(&self) -> usize {
        self.value_width() * self.state_dim
    }

    /// Inputs of the convolution, B of each block, u and decays.
    fn row_floats(&self) -> usize {
        self.channels() + self.num_parts() * self.state_dim + self.value_width() + self.num_heads()
    }

    unsafe fn advance(&self, part: usize, row: &Row) {
        let (group, block) = (part / self.blocks(), part % self.blocks());
        let (dim, first) = (self.state_dim, row.first());
        let (place, of_blocks) = (part * dim, self.num_parts() * dim);
        let of_b = self.value_width() + group * dim;
        let mut c = [0.0; MAX_DIM];
        let mut scores = [0.0; CHUNK];
        // SAFETY: guaranteed by the caller.
        unsafe {
            let kept_b = |position: usize| row.kept(position).add(self.channels() + place);
            self.convolve(row, of_b, self.value_width() + place, dim, kept_b(row.position));
            let of_c = of_b + self.num_groups * dim;
            self.convolve(row, of_c, self.value_width() + of_blocks + place, dim, c.as_mut_ptr());
            for position in first..=row.position {
                let b = kept_b(position);
                let mut sum = F32::splat(0.0);
                for lane in (0..dim).step_by(LANES) {
                    sum = F32::load(c.as_ptr().add(lane)).mul_add(F32::load(b.add(lane)), sum);
                }
                scores[position - first] = sum.reduce_sum();
            }
            let head = group * self.group + block * self.block;
            for head in head..(head + self.block).min((group + 1) * self.group) {
                self.advance_head(head, row, place, c.as_ptr(), &scores);
            }
        }
    }
}

impl Mamba2 {
    /// Validates the sizes. The error names the mismatch.
    pub(crate) fn new(of: &Mamba2Parts<'_>) -> Result<Mamba2, String> {
        let (num_groups, num_heads, block) = (of.num_groups, of.decay.len(), of.block_heads);
        for dim in [of.state_dim, of.head_dim] {
            if dim == 0 || dim > MAX_DIM || !dim.is_multiple_of(LANES) {
                return Err(format!("heads have {dim} elements, must be a multiple of {LANES} up to {MAX_DIM}"));
            }
        }
        if num_groups == 0 || num_heads == 0 || num_heads % num_groups != 0 || block == 0 {
            return Err(format!("{num_heads} heads in blocks of {block} are not a multiple of {num_groups} groups"));
        }
        let (values, keys, group) = (num_heads * of.head_dim, num_groups * of.state_dim, num_heads / num_groups);
        let channels = values + 2 * keys * group.div_ceil(block);
        let conv = (!of.conv.is_empty()).then(|| Convolution::new(channels, of.conv)).transpose()?;
        for (name, given, wanted) in [
            ("biases of the convolution", of.conv_bias.len(), conv.as_ref().map_or(0, |conv| conv.channels)),
            ("biases of dt", of.dt_bias.len(), num_heads),
            ("factors of the skip", of.skip.len(), num_heads),
        ] {
            if given != wanted {
                return Err(format!("{given} {name}, must be {wanted}"));
            }
        }
        Ok(Mamba2 {
            num_groups,
            group,
            block,
            state_dim: of.state_dim,
            head_dim: of.head_dim,
            conv,
            conv_bias: of.conv_bias.to_vec(),
            decay: of.decay.to_vec(),
            dt_bias: of.dt_bias.to_vec(),
            skip: of.skip.to_vec(),
            dt_limits: of.dt_limits,
            gate_factor: of.gate_factor,
            dt_factor: of.dt_factor,
            has_gates: of.has_gates,
            has_dt: of.has_dt,
            input_widths: [values
                + 2 * keys
                + if of.has_gates { values } else { 0 }
                + if of.has_dt { num_heads } else { 0 }],
        })
    }

    fn num_heads(&self) -> usize {
        self.decay.len()
    }

    /// Inputs of the convolution, which are in the ring.
    fn channels(&self) -> usize {
        self.conv.as_ref().map_or(0, |conv| conv.channels)
    }

    /// Blocks of each group.
    fn blocks(&self) -> usize {
        self.group.div_ceil(self.block)
    }

    /// Elements of x of a row.
    fn value_width(&self) -> usize {
        self.num_heads() * self.head_dim
    }

    /// One head of a block, whose B begins at `place` of those of all blocks.
    unsafe fn advance_head(&self, head: usize, row: &Row, place: usize, c: *const f32, scores: &[f32; CHUNK]) {
        let (dim, within, first) = (self.head_dim, row.within(), row.first());
        let of_b = self.channels();
        let of_u = of_b + self.num_parts() * self.state_dim;
        let of_gates = self.value_width() + 2 * self.num_groups * self.state_dim;
        let mut buffers = [[0.0; MAX_DIM]; 2];
        let [x, of_state] = &mut buffers;
        // SAFETY: guaranteed by the caller of `advance`.
        unsafe {
            let kept_u = |index: usize| row.kept(first + index).add(of_u + head * dim);
            let kept_decay = |index: usize| row.kept(first + index).add(of_u + self.value_width() + head);
            let mut dt = 1.0;
            if self.has_dt {
                let of_dt = of_gates + if self.has_gates { self.value_width() } else { 0 };
                let rate = (*row.inputs[0].add(of_dt + head)).to_f32() * self.dt_factor + self.dt_bias[head];
                dt = softplus(rate).max(self.dt_limits.0).min(self.dt_limits.1);
            }
            *kept_decay(within) = (-self.decay[head] * dt).exp();
            self.convolve(row, head * dim, head * dim, dim, x.as_mut_ptr());

            // What decays have left of each of the chunk's rows, and of the state before them.
            let mut left = [1.0; CHUNK];
            for index in (0..within).rev() {
                left[index] = left[index + 1] * *kept_decay(index + 1);
            }
            let start = left[0] * *kept_decay(0);
            let of_head = head * self.state_dim * dim;
            let old = row.state().map(|state| state.add(of_head));
            if let Some(old) = old {
                project::<1, VECTORS>(old, self.state_dim, dim, [c], [of_state.as_mut_ptr()]);
            }
            for lane in (0..dim).step_by(LANES) {
                let x = F32::load(x.as_ptr().add(lane));
                (x * F32::splat(dt)).store(kept_u(within).add(lane));
                let mut output = F32::load(of_state.as_ptr().add(lane)) * F32::splat(start);
                for index in 0..=within {
                    let weight = F32::splat(left[index] * scores[index]);
                    output = F32::load(kept_u(index).add(lane)).mul_add(weight, output);
                }
                let mut output = x.mul_add(F32::splat(self.skip[head]), output);
                if self.has_gates {
                    let gates = Element::load(row.inputs[0].add(of_gates + head * dim + lane));
                    output = output * (gates * F32::splat(self.gate_factor)).silu();
                }
                Element::store(output, row.output.add(head * dim + lane));
            }
            if let Some(next) = row.next_state() {
                for element in 0..self.state_dim {
                    let weights: [f32; CHUNK] =
                        std::array::from_fn(|index| left[index] * *row.kept(first + index).add(of_b + place + element));
                    for lane in (0..dim).step_by(LANES) {
                        let at = element * dim + lane;
                        let old = old.map_or(F32::splat(0.0), |old| F32::load(old.add(at)));
                        let mut sum = old * F32::splat(start);
                        for (index, &weight) in weights.iter().enumerate() {
                            sum = F32::load(kept_u(index).add(lane)).mul_add(F32::splat(weight), sum);
                        }
                        sum.store(next.add(of_head + at));
                    }
                }
            }
        }
    }

    /// target = silu of what the convolution makes of `count` channels from `channel` on, whose inputs begin at `column`; of the inputs if
    /// there is none.
    unsafe fn convolve(&self, row: &Row, column: usize, channel: usize, count: usize, target: *mut f32) {
        // SAFETY: guaranteed by the caller of `advance`.
        unsafe {
            for lane in (0..count).step_by(LANES) {
                let mut input = Element::load(row.inputs[0].add(column + lane));
                if let Some(conv) = &self.conv {
                    let channel = channel + lane;
                    input.store(row.kept(row.position).add(channel));
                    input = conv.add(row, channel, F32::load(self.conv_bias.as_ptr().add(channel)));
                }
                input.silu().store(target.add(lane));
            }
        }
    }
}

#[cfg(test)]
mod tests;
