//! Pairs of bf16, which an instruction multiplies at once.

use crate::element::Element;
use crate::simd::{F32, I32};

/// Storage type of a factor.
pub(crate) type Factor = Element;
/// One side of an operation on 16 chains.
pub(crate) type Operand = I32;
/// Links per operation.
pub(crate) const WIDTH: usize = 2;

/// A row's factors of one operation, for every column.
///
/// # Safety
/// `WIDTH` factors must be readable.
#[inline(always)]
pub(crate) unsafe fn splat(factors: *const Factor) -> Operand {
    // SAFETY: guaranteed by the caller.
    I32::splat(unsafe { factors.cast::<i32>().read_unaligned() })
}

/// Like `splat`, for the last link of a chain that ends within a group.
///
/// # Safety
/// One factor must be readable.
#[inline(always)]
pub(crate) unsafe fn splat_last(factor: *const Factor) -> Operand {
    // SAFETY: guaranteed by the caller.
    I32::splat(i32::from(unsafe { factor.read() }.bits()))
}

/// 16 columns at the operation that begins with link `index`. Groups are `width` columns wide, from `first` on.
///
/// # Safety
/// The columns' group must be readable.
#[inline(always)]
pub(crate) unsafe fn columns(first: *const Element, width: usize, index: usize) -> Operand {
    // SAFETY: guaranteed by the caller.
    unsafe { I32::load(first.add(index * width).cast()) }
}

/// `LANES` operations on consecutive links of one chain.
///
/// # Safety
/// `LANES * WIDTH` elements must be readable.
#[inline(always)]
pub(crate) unsafe fn consecutive(first: *const Element) -> Operand {
    // SAFETY: guaranteed by the caller.
    unsafe { I32::load(first.cast()) }
}

/// Like `consecutive`, for factors.
///
/// # Safety
/// `LANES * WIDTH` factors must be readable.
#[inline(always)]
pub(crate) unsafe fn consecutive_factors(first: *const Factor) -> Operand {
    // SAFETY: guaranteed by the caller.
    unsafe { consecutive(first) }
}

/// 16 columns of an operation from their numbers, rounded to elements.
#[inline(always)]
pub(crate) fn columns_of([first, second]: [F32; WIDTH]) -> Operand {
    first.to_bf16_pairs(second)
}

/// Like `columns`, for the last link of chains that end within a group. The rest of the group may have any value.
///
/// # Safety
/// As for `columns`.
#[inline(always)]
pub(crate) unsafe fn last_columns(first: *const Element, width: usize, index: usize) -> Operand {
    // SAFETY: guaranteed by the caller.
    unsafe { columns(first, width, index) & I32::splat(0xffff) }
}

/// sum + factors · columns
#[inline(always)]
pub(crate) fn multiply_add(factors: Operand, columns: Operand, sum: F32) -> F32 {
    factors.dot_pairs(columns, sum)
}

/// Stores 16 consecutive factors.
///
/// # Safety
/// 16 factors must be writable.
#[inline(always)]
pub(crate) unsafe fn store_factors(values: F32, factors: *mut Factor) {
    // SAFETY: guaranteed by the caller.
    unsafe { Element::store(values, factors) };
}
