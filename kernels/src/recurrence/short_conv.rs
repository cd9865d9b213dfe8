//! Short convolutions between two gates. The Python module `device/short_conv.py` has the formula. A part is some channels.

use super::convolution::{Convolution, padded};
use super::{Recurrence, Row};
use crate::element::Element;
use crate::simd::{F32, LANES};

/// Channels of a part.
const PART: usize = 16 * LANES;

/// One layer on one rank.
pub(crate) struct ShortConv {
    channels: usize,
    /// Over whole vectors of channels, as rows of the ring are.
    conv: Convolution,
    bias: Vec<f32>,
    /// b of all channels, then c, then x.
    input_widths: [usize; 1],
}

impl ShortConv {
    /// conv: [channels, rows]; bias: [channels]. The error names the mismatch.
    pub(crate) fn new(conv: &[f32], bias: &[f32]) -> Result<ShortConv, String> {
        let channels = bias.len();
        if channels == 0 || !conv.len().is_multiple_of(channels) {
            return Err(format!("{} weights of a convolution over {channels} channels", conv.len()));
        }
        Ok(ShortConv {
            channels,
            conv: Convolution::new(channels.next_multiple_of(LANES), &padded(conv, channels))?,
            bias: padded(bias, channels),
            input_widths: [3 * channels],
        })
    }
}

impl Recurrence for ShortConv {
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
                let [b, c, x] = [0, 1, 2]
                    .map(|index| Element::load_first(row.inputs[0].add(index * self.channels + channel), count));
                (b * x).store(row.kept(row.position).add(channel));
                let sum = self.conv.add(row, channel, F32::load(self.bias.as_ptr().add(channel)));
                Element::store_first(c * sum, row.output.add(channel), count);
            }
        }
    }
}

#[cfg(test)]
mod tests;
