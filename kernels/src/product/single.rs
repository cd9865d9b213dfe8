//! Numbers in float32, one after the other.

use crate::element::{Element, GROUP};
use crate::simd::{F32, I32, SUMS};

/// Storage type of a factor.
pub(crate) type Factor = f32;
/// One side of an operation on 16 chains.
pub(crate) type Operand = F32;
/// Links per operation.
pub(crate) const WIDTH: usize = 1;
/// Whether registers cannot hold a group's columns in addition to the sums. PERF: the compiler otherwise keeps them from the even link to
/// the odd one and moves sums to the stack: prompts of 512 tokens took 1.27 times as long (AVX2 build, Sapphire Rapids, 2 threads).
const LOADS_AGAIN: bool = SUMS < 24;

/// A row's factor of one operation, for every column.
///
/// # Safety
/// The factor must be readable.
#[inline(always)]
pub(crate) unsafe fn splat(factor: *const Factor) -> Operand {
    // SAFETY: guaranteed by the caller.
    F32::splat(unsafe { factor.read() })
}

/// Like `splat`, for the last link of a chain that ends within a group.
///
/// # Safety
/// As for `splat`.
#[inline(always)]
pub(crate) unsafe fn splat_last(factor: *const Factor) -> Operand {
    // SAFETY: guaranteed by the caller.
    unsafe { splat(factor) }
}

/// 16 columns at link `index`. Groups are `width` columns wide, from `first` on.
///
/// # Safety
/// The columns' group must be readable.
#[inline(always)]
pub(crate) unsafe fn columns(first: *const Element, width: usize, index: usize) -> Operand {
    // SAFETY: guaranteed by the caller.
    unsafe {
        let group = first.add(index / GROUP * GROUP * width);
        if GROUP == 1 {
            return Element::load(group);
        }
        if index.is_multiple_of(GROUP) {
            return F32::from_bits(I32::load(group.cast()).shift_left(16));
        }
        let group = if LOADS_AGAIN { unknown(group) } else { group };
        F32::from_bits(I32::load(group.cast()) & I32::splat(!0xffff))
    }
}

/// The same address, unknown to the compiler, which therefore loads from it again.
#[inline(always)]
#[expect(clippy::pointers_in_nomem_asm_block, reason = "nothing is read there")]
fn unknown<T>(address: *const T) -> *const T {
    let mut address = address;
    // SAFETY: there is no instruction.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    unsafe {
        std::arch::asm!("/* {} */", inout(reg) address, options(pure, nomem, nostack, preserves_flags));
    }
    address
}

/// `LANES` operations on consecutive links of one chain.
///
/// # Safety
/// `LANES * WIDTH` elements must be readable.
#[inline(always)]
pub(crate) unsafe fn consecutive(first: *const Element) -> Operand {
    // SAFETY: guaranteed by the caller.
    unsafe { Element::load(first) }
}

/// Like `consecutive`, for factors.
///
/// # Safety
/// `LANES * WIDTH` factors must be readable.
#[inline(always)]
pub(crate) unsafe fn consecutive_factors(first: *const Factor) -> Operand {
    // SAFETY: guaranteed by the caller.
    unsafe { F32::load(first) }
}

/// 16 columns of an operation from their numbers, rounded to elements.
#[inline(always)]
pub(crate) fn columns_of([numbers]: [F32; WIDTH]) -> Operand {
    Element::round(numbers)
}

/// Like `columns`, for the last link of chains that end within a group. The rest of the group may have any value.
///
/// # Safety
/// As for `columns`.
#[inline(always)]
pub(crate) unsafe fn last_columns(first: *const Element, width: usize, index: usize) -> Operand {
    // SAFETY: guaranteed by the caller.
    unsafe { columns(first, width, index) }
}

/// sum + factors · columns
#[inline(always)]
pub(crate) fn multiply_add(factors: Operand, columns: Operand, sum: F32) -> F32 {
    columns.mul_add(factors, sum)
}

/// Stores 16 consecutive factors.
///
/// # Safety
/// 16 factors must be writable.
#[inline(always)]
pub(crate) unsafe fn store_factors(values: F32, factors: *mut Factor) {
    // SAFETY: guaranteed by the caller.
    unsafe { values.store(factors) };
}
