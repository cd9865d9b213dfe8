//! Mamba: a convolution, and a selective scan of what projections make of it. The Python module `device/mamba.py` has the formulas.

use super::convolution::{Convolution, padded};
use super::{Recurrence, Row};
use crate::element::Element;
use crate::simd::{F32, LANES};
use std::f32::consts::LOG2_E;

/// Channels of a part of the convolution.
const PART: usize = 16 * LANES;
/// The largest dimension of a channel's state.
const MAX_DIM: usize = 256;

/// The convolution of one layer on one rank, and SiLU.
pub(crate) struct MambaConv {
    channels: usize,
    /// Over whole vectors of channels, as rows of the ring are.
    conv: Convolution,
    bias: Vec<f32>,
    /// What it convolves, then as many gates.
    input_widths: [usize; 1],
}

impl MambaConv {
    /// conv: [channels, rows]; bias: [channels]. The error names the mismatch.
    pub(crate) fn new(conv: &[f32], bias: &[f32]) -> Result<MambaConv, String> {
        let channels = bias.len();
        if channels == 0 || !conv.len().is_multiple_of(channels) {
            return Err(format!("{} weights of a convolution over {channels} channels", conv.len()));
        }
        let conv = Convolution::new(channels.next_multiple_of(LANES), &padded(conv, channels))?;
        Ok(MambaConv { channels, conv, bias: padded(bias, channels), input_widths: [2 * channels] })
    }
}

impl Recurrence for MambaConv {
    fn num_parts(&self) -> usize {
        self.channels.div_ceil(PART)
    }

    fn input_widths(&self) -> &[usize] {
        &self.input_widths
    }

    fn output_width(&self) -> usize {
        self.channels
    }

    fn state_floats(&self) -> usize {
        0
    }

    fn row_floats(&self) -> usize {
        self.conv.channels
    }

    unsafe fn advance(&self, part: usize, row: &Row) {
        for channel in (part * PART..self.channels.min((part + 1) * PART)).step_by(LANES) {
            let count = LANES.min(self.channels - channel);
            // SAFETY: guaranteed by the caller; a row of the ring and the bias are whole vectors.
            unsafe {
                Element::load_first(row.inputs[0].add(channel), count).store(row.kept(row.position).add(channel));
                let sum = self.conv.add(row, channel, F32::load(self.bias.as_ptr().add(channel)));
                Element::store_first(sum.silu(), row.output.add(channel), count);
            }
        }
    }
}

/// The scan of one layer on one rank. A part is some channels, which have B of their own in the ring, and behind it the position
/// for which the running state is. States are stored part by part, as [state_dim, channels].
pub(crate) struct MambaScan {
    channels: usize,
    state_dim: usize,
    /// Channels of a part.
    part: usize,
    /// Exponents of 2, in the order of states: the decay of a state in a step of 1.
    decay: Vec<f32>,
    /// These have a number for each channel, in whole vectors.
    dt_bias: Vec<f32>,
    skip: Vec<f32>,
    /// What the convolution reads, whose second half are the gates; what it returned; B and C; the steps.
    input_widths: [usize; 4],
}

impl MambaScan {
    /// decay: rates [state_dim, channels]; part: channels of a part. The error names the mismatch.
    pub(crate) fn new(part: usize, decay: &[f32], dt_bias: &[f32], skip: &[f32]) -> Result<MambaScan, String> {
        let channels = skip.len();
        if part == 0 || !part.is_multiple_of(LANES) {
            return Err(format!("{part} channels in a part, must be a multiple of {LANES}"));
        }
        if channels == 0 || dt_bias.len() != channels {
            return Err(format!("{} biases of steps and {channels} factors of the skip", dt_bias.len()));
        }
        let state_dim = decay.len() / channels;
        if decay.len() != state_dim * channels || !(1..=MAX_DIM).contains(&state_dim) {
            return Err(format!("{} decays of {channels} channels, must be up to {MAX_DIM} for each", decay.len()));
        }
        let mut net = MambaScan {
            channels,
            state_dim,
            part,
            decay: vec![0.0; state_dim * channels.next_multiple_of(LANES)],
            dt_bias: padded(dt_bias, channels),
            skip: padded(skip, channels),
            input_widths: [2 * channels, channels, 2 * state_dim, channels],
        };
        for channel in 0..channels {
            let (first, width) = net.columns(channel / part);
            for element in 0..state_dim {
                let rate = decay[element * channels + channel];
                net.decay[first * state_dim + element * width + channel - first] = -rate * LOG2_E;
            }
        }
        Ok(net)
    }

    /// Channels in whole vectors.
    fn width(&self) -> usize {
        self.skip.len()
    }

    /// The first channel of a part, and the number of its channels in whole vectors.
    fn columns(&self, part: usize) -> (usize, usize) {
        (part * self.part, self.part.min(self.width() - part * self.part))
    }
}

impl Recurrence for MambaScan {
    fn num_parts(&self) -> usize {
        self.channels.div_ceil(self.part)
    }

    fn input_widths(&self) -> &[usize] {
        &self.input_widths
    }

    fn output_width(&self) -> usize {
        self.channels
    }

    fn state_floats(&self) -> usize {
        self.width() * self.state_dim
    }

    /// dt, dt * x, and B of each part.
    fn row_floats(&self) -> usize {
        2 * self.width() + self.num_parts() * self.state_dim
    }

    /// A state, and the position that follows it in each part.
    fn running_floats(&self) -> usize {
        self.state_floats() + self.num_parts()
    }

    unsafe fn advance(&self, part: usize, row: &Row) {
        let (first, width) = self.columns(part);
        let of_b = 2 * self.width() + part * self.state_dim;
        let [mixed, x, rates, steps] = row.inputs;
        let mut c = [0.0; MAX_DIM];
        // SAFETY: guaranteed by the caller; rows of the ring, states and parameters are whole vectors.
        unsafe {
            let kept = row.kept(row.position);
            for (element, c) in c[..self.state_dim].iter_mut().enumerate() {
                *kept.add(of_b + element) = (*rates.add(element)).to_f32();
                *c = (*rates.add(self.state_dim + element)).to_f32();
            }
            // The same sums follow each other, whether they begin at the chunk or behind the row that was computed last.
            let of_part = first * self.state_dim;
            let running = row.running.add(of_part);
            let next_position = row.running.add(self.state_floats() + part).cast::<u32>();
            let (old, begin) = if row.within() > 0 && *next_position == row.position as u32 {
                (Some(running.cast_const()), row.position)
            } else {
                (row.state().map(|state| state.add(of_part)), row.first())
            };
            let new = row.next_state().map_or(running, |next| next.add(of_part));
            for lane in (0..width).step_by(LANES) {
                let channel = first + lane;
                let count = LANES.min(self.channels - channel);
                let x = Element::load_first(x.add(channel), count);
                let step = Element::load_first(steps.add(channel), count);
                let dt = (step + F32::load(self.dt_bias.as_ptr().add(channel))).softplus();
                dt.store(kept.add(channel));
                (dt * x).store(kept.add(self.width() + channel));
                let mut output = F32::load(self.skip.as_ptr().add(channel)) * x;
                for (element, &c) in c[..self.state_dim].iter().enumerate() {
                    let at = element * width + lane;
                    let decay = F32::load(self.decay.as_ptr().add(of_part + at));
                    let mut state = old.map_or(F32::splat(0.0), |old| F32::load(old.add(at)));
                    for position in begin..=row.position {
                        let kept = row.kept(position);
                        let left = (decay * F32::load(kept.add(channel))).exp2();
                        let u = F32::load(kept.add(self.width() + channel));
                        state = state.mul_add(left, u * F32::splat(*kept.add(of_b + element)));
                    }
                    state.store(new.add(at));
                    output = state.mul_add(F32::splat(c), output);
                }
                let gate = Element::load_first(mixed.add(self.channels + channel), count);
                Element::store_first(output * gate.silu(), row.output.add(channel), count);
            }
            *next_position = row.position as u32 + 1;
        }
    }
}

#[cfg(test)]
mod tests;
