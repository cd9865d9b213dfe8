//! A causal convolution of each channel over its last inputs, which are the leading numbers of the rows in the ring.

use super::{CHUNK, Row};
use crate::simd::{F32, LANES};

pub(super) struct Convolution {
    pub(super) channels: usize,
    width: usize,
    /// [rows, channels]; a row's own are last.
    weights: Vec<f32>,
}

impl Convolution {
    /// weights: [channels, rows]. The error names the mismatch.
    pub(super) fn new(channels: usize, weights: &[f32]) -> Result<Convolution, String> {
        let width = weights.len() / channels;
        if weights.len() != width * channels || !(1..=CHUNK).contains(&width) {
            return Err(format!("{} weights of a convolution over {channels} channels", weights.len()));
        }
        let transposed = |index: usize| weights[index % channels * width + index / channels];
        Ok(Convolution { channels, width, weights: (0..weights.len()).map(transposed).collect() })
    }

    #[cfg(test)]
    pub(super) fn weight(&self, row: usize, channel: usize) -> f32 {
        self.weights[row * self.channels + channel]
    }

    /// `sum` plus the convolution of LANES channels from `channel` on. The row's own inputs are in the ring already.
    #[inline(always)]
    pub(super) unsafe fn add(&self, row: &Row, channel: usize, mut sum: F32) -> F32 {
        // SAFETY: the caller of `Recurrence::advance` guarantees the rows; none before the first position is read.
        unsafe {
            for back in (0..self.width.min(row.position + 1)).rev() {
                let weight = F32::load(self.weights.as_ptr().add((self.width - 1 - back) * self.channels + channel));
                sum = F32::load(row.kept(row.position - back).add(channel)).mul_add(weight, sum);
            }
        }
        sum
    }
}

/// The numbers of each channel, and zeros for the channels that whole vectors have besides.
pub(super) fn padded(numbers: &[f32], channels: usize) -> Vec<f32> {
    let mut numbers = numbers.to_vec();
    numbers.resize(numbers.len() / channels * channels.next_multiple_of(LANES), 0.0);
    numbers
}
