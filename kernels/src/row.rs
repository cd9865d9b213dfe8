//! Element-wise arithmetic on single rows, each result rounded to an element.

use crate::element::Element;
use crate::simd::{F32, LANES};

/// row[i] = change(row[i], i), a vector at a time. Lanes behind the row's end have any value, and their results are dropped.
///
/// # Safety
/// The row must be valid for `dim` elements. `change` gets the index of the vector's first element and the number of elements left.
#[inline(always)]
unsafe fn change(row: *mut Element, dim: usize, change: impl Fn(F32, usize, usize) -> F32) {
    for first in (0..dim).step_by(LANES) {
        let (target, count) = (row.wrapping_add(first), dim - first);
        // SAFETY: guaranteed by the caller.
        unsafe { Element::store_first(change(Element::load_first(target, count), first, count), target, count) };
    }
}

/// sum += x
///
/// # Safety
/// Both must be valid for `dim` elements.
pub(crate) unsafe fn add(x: *const Element, sum: *mut Element, dim: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { change(sum, dim, |sum, first, count| sum + Element::load_first(x.add(first), count)) };
}

/// product *= x
///
/// # Safety
/// As for `add`.
pub(crate) unsafe fn multiply(x: *const Element, product: *mut Element, dim: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { change(product, dim, |product, first, count| product * Element::load_first(x.add(first), count)) };
}

/// x *= factor
///
/// # Safety
/// As for `add`.
pub(crate) unsafe fn scale(x: *mut Element, factor: f32, dim: usize) {
    // SAFETY: guaranteed by the caller.
    unsafe { change(x, dim, |x, _, _| x * F32::splat(factor)) };
}

/// Clamps x to ± `bound`; NaN stays NaN.
///
/// # Safety
/// As for `add`.
pub(crate) unsafe fn clamp(x: *mut Element, bound: f32, dim: usize) {
    // The second operand is returned when one is NaN.
    // SAFETY: guaranteed by the caller.
    unsafe { change(x, dim, |x, _, _| F32::splat(-bound).max(F32::splat(bound).min(x))) };
}
