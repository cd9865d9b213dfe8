//! What becomes of the sums of a tile: they are stored, added to the output, or combined as gate and up.

use crate::element::Element;
use crate::simd::{F32, LANES};

/// The output of a tile.
#[derive(Clone, Copy)]
pub(super) struct Outcome {
    pub(super) target: *mut Element,
    pub(super) stride: usize,
    pub(super) num_columns: usize,
    pub(super) add: bool,
    /// Elements from a gate to its up in the output of a gated layer that stores both. 0: it stores their product.
    pub(super) apart: usize,
}

impl Outcome {
    /// The output from a later row on.
    pub(super) fn below(self, num_rows: usize) -> Outcome {
        Outcome { target: self.target.wrapping_add(num_rows * self.stride), ..self }
    }

    /// The output from a later column on.
    pub(super) fn right_of(self, num_columns: usize) -> Outcome {
        Outcome {
            target: self.target.wrapping_add(num_columns),
            num_columns: self.num_columns.saturating_sub(num_columns),
            ..self
        }
    }
}

/// The sums of `R` rows by `V` vectors of columns.
pub(super) type Sums<const R: usize, const V: usize> = [[F32; V]; R];

/// Adds a bias for every column, unless it is null.
///
/// # Safety
/// The bias must be null or cover the columns.
#[inline(always)]
pub(super) unsafe fn add_bias<const R: usize, const V: usize>(sums: &mut Sums<R, V>, bias: *const f32) {
    if bias.is_null() {
        return;
    }
    for row in sums {
        for (vector, sum) in row.iter_mut().enumerate() {
            // SAFETY: the caller vouches for the bias.
            *sum = *sum + unsafe { F32::load(bias.add(vector * LANES)) };
        }
    }
}

/// Stores the sums, or adds them, rounded like elements, to what is there.
///
/// # Safety
/// `outcome` must be writable for all rows.
#[inline(always)]
pub(super) unsafe fn store<const R: usize, const V: usize>(sums: &Sums<R, V>, outcome: Outcome) {
    for row in 0..R {
        for vector in 0..V {
            let place = outcome.below(row).right_of(vector * LANES);
            let mut result = sums[row][vector];
            // SAFETY: the caller vouches for the target.
            unsafe {
                if outcome.add {
                    result = Element::load_first(place.target, place.num_columns) + Element::round(result);
                }
                Element::store_first(result, place.target, place.num_columns);
            }
        }
    }
}

/// Stores silu(gate)·up, with a rounding after every operator, or gate and up apart.
///
/// # Safety
/// `outcome` must be writable for all rows.
#[inline(always)]
pub(super) unsafe fn store_gated<const R: usize, const V: usize>(
    gates: &Sums<R, V>,
    ups: &Sums<R, V>,
    outcome: Outcome,
) {
    for row in 0..R {
        for vector in 0..V {
            let place = outcome.below(row).right_of(vector * LANES);
            if outcome.apart > 0 {
                // SAFETY: as below.
                unsafe {
                    Element::store_first(gates[row][vector], place.target, place.num_columns);
                    let up = place.target.wrapping_add(outcome.apart);
                    Element::store_first(ups[row][vector], up, place.num_columns);
                }
                continue;
            }
            let gate = Element::round(Element::round(gates[row][vector]).silu());
            let product = gate * Element::round(ups[row][vector]);
            // SAFETY: the caller vouches for the target.
            unsafe { Element::store_first(product, place.target, place.num_columns) };
        }
    }
}
