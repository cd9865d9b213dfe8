//! RMSNorm and LayerNorm, alone and fused with the preceding addition to the residual. Statistics are in float32.

use crate::element::Element;
use crate::pool::{Executor, Source, Target};
use crate::row;
use crate::simd::{F32, LANES, Mask};

/// Elements from which a parallel section pays off.
const PART_NUMBERS: usize = 1 << 14;

/// How a row is normalized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Divided by its root mean square, and rounded to an element before the weight is applied (Llama).
    Rms,
    /// The same, rounded only once, at the end (Gemma).
    WideRms,
    /// LayerNorm, rounded once.
    Layer,
}

/// The norm of groups of `dim` elements: whole rows, or the heads of a token.
pub(crate) struct Norm {
    kind: Kind,
    eps: f32,
    dim: usize,
    /// A weight for each element, of one group or of as many as a row has.
    weight: Vec<f32>,
    /// The same, or empty.
    bias: Vec<f32>,
}

/// The input of a norm: `num_rows` rows of `num_groups` contiguous groups, `stride` elements apart.
#[derive(Clone, Copy)]
pub(crate) struct Groups {
    pub(crate) address: Source<Element>,
    pub(crate) stride: usize,
    pub(crate) num_groups: usize,
    pub(crate) num_rows: usize,
}

/// Mean and variance of a group; the mean is 0 where it is not subtracted.
struct Moments {
    mean: f32,
    variance: f32,
}

impl Norm {
    /// Validates the sizes. The error names the mismatch.
    pub(crate) fn new(kind: Kind, eps: f32, dim: usize, weight: Vec<f32>, bias: Vec<f32>) -> Result<Norm, String> {
        if dim == 0 || weight.is_empty() || !weight.len().is_multiple_of(dim) {
            return Err(format!("a norm of {dim} elements cannot have {} weights", weight.len()));
        }
        if !bias.is_empty() && bias.len() != weight.len() {
            return Err(format!("a norm has {} weights and {} biases", weight.len(), bias.len()));
        }
        Ok(Norm { kind, eps, dim, weight, bias })
    }

    /// Elements of a group.
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }

    /// Whether the norm applies to rows of this many groups.
    pub(crate) fn fits(&self, num_groups: usize) -> bool {
        self.weight.len() == self.dim || self.weight.len() == num_groups * self.dim
    }

    /// output = norm(x); the output's rows are contiguous.
    ///
    /// # Safety
    /// The norm must fit the groups, and the pointers be valid for them.
    pub(crate) unsafe fn apply(&self, executor: &impl Executor, x: Groups, output: Target<Element>) {
        let width = x.num_groups * self.dim;
        executor.for_ranges(x.num_rows, PART_NUMBERS / width.max(1), |range| {
            for row in range {
                // SAFETY: guaranteed by the caller.
                unsafe { self.apply_row(x.num_groups, x.address.at(row * x.stride), output.at(row * width)) };
            }
        });
    }

    /// residual += x; output = norm(residual). Rows are single groups, those of residual and output contiguous.
    ///
    /// # Safety
    /// As for `apply`; x, residual and output must not overlap, but output may be x.
    pub(crate) unsafe fn add_apply(
        &self,
        executor: &impl Executor,
        x: Groups,
        residual: Target<Element>,
        output: Target<Element>,
    ) {
        executor.for_ranges(x.num_rows, PART_NUMBERS / self.dim, |range| {
            for row in range {
                let (sum, target) = (residual.at(row * self.dim), output.at(row * self.dim));
                // SAFETY: guaranteed by the caller.
                unsafe {
                    row::add(x.address.at(row * x.stride), sum, self.dim);
                    self.apply_row(1, sum, target);
                }
            }
        });
    }

    /// output = norm(x) of one row. The output may be x.
    ///
    /// # Safety
    /// As for `apply`.
    pub(crate) unsafe fn apply_row(&self, num_groups: usize, x: *const Element, output: *mut Element) {
        let has_weights_by_group = self.weight.len() > self.dim;
        for group in 0..num_groups {
            let first = group * self.dim;
            // SAFETY: guaranteed by the caller.
            unsafe {
                let moments = self.moments(x.add(first));
                self.scale(x.add(first), moments, if has_weights_by_group { first } else { 0 }, output.add(first));
            }
        }
    }

    unsafe fn moments(&self, x: *const Element) -> Moments {
        let mut mean = 0.0;
        if self.kind == Kind::Layer {
            let mut sum = F32::splat(0.0);
            for first in (0..self.dim).step_by(LANES) {
                // SAFETY: the group has `dim` elements.
                sum = sum + unsafe { Element::load_first(x.add(first), self.dim - first) };
            }
            mean = sum.reduce_sum() / self.dim as f32;
        }
        let mut squares = F32::splat(0.0);
        for first in (0..self.dim).step_by(LANES) {
            // SAFETY: as above.
            let x = unsafe { Element::load_first(x.add(first), self.dim - first) };
            let centered = (x - F32::splat(mean)).select(Mask::first(self.dim - first), F32::splat(0.0));
            squares = centered.mul_add(centered, squares);
        }
        Moments { mean, variance: squares.reduce_sum() / self.dim as f32 }
    }

    /// Applies the moments, then weight and bias from element `offset` on.
    unsafe fn scale(&self, x: *const Element, moments: Moments, offset: usize, output: *mut Element) {
        let mean = F32::splat(moments.mean);
        let factor = F32::splat(1.0 / (moments.variance + self.eps).sqrt());
        let (weight, bias) = (self.weight.as_ptr().wrapping_add(offset), self.bias.as_ptr().wrapping_add(offset));
        for first in (0..self.dim).step_by(LANES) {
            let count = self.dim - first;
            // SAFETY: the group has `dim` elements; weight and bias cover it from `offset` on.
            unsafe {
                let mut result = (Element::load_first(x.add(first), count) - mean) * factor;
                if self.kind == Kind::Rms {
                    result = Element::round(result);
                }
                result = result * F32::load_first(weight.add(first), count);
                if !self.bias.is_empty() {
                    result = result + F32::load_first(bias.add(first), count);
                }
                Element::store_first(result, output.add(first), count);
            }
        }
    }
}

#[cfg(test)]
mod tests;
