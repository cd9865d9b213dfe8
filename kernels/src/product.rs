//! Products of elements with float32 sums: the chains of dense layers and of attention.
//!
//! The columns of a product are stored in groups of `GROUP` consecutive links of their chains (input features, elements of a head, or
//! tokens): [group][column][GROUP]. A CPU that multiplies pairs of bf16 takes a group per operation, and reads the other side of the
//! product, the factors, as they are in memory. Every other CPU takes one link per operation, and reads factors that were widened once
//! for all columns.

use crate::element::Element;
use crate::simd::{F32, LANES};
use std::array::from_fn;
use std::cell::RefCell;

#[cfg_attr(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32"))), path = "product/pair.rs")]
#[cfg_attr(
    not(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32")))),
    path = "product/single.rs"
)]
mod operand;

pub(crate) use operand::{
    Factor, Operand, WIDTH, columns, columns_of, consecutive, consecutive_factors, last_columns, multiply_add, splat,
    splat_last, store_factors,
};

/// Links of a chain that fill a cache line with 16 columns.
pub(crate) const STEP: usize = LINE / LANES / size_of::<Element>();
/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Whether factors are elements as they are in memory.
pub(crate) const IN_PLACE: bool = size_of::<Factor>() == size_of::<Element>();

thread_local! {
    /// Widened factors.
    static FACTORS: RefCell<Vec<Factor>> = const { RefCell::new(Vec::new()) };
}

/// Calls `work` with the factors of rows that are `dim` elements long and `stride` apart: their address, and their own distance.
///
/// # Safety
/// The rows must be readable during the call.
pub(crate) unsafe fn with_factors(
    rows: *const Element,
    stride: usize,
    num_rows: usize,
    dim: usize,
    work: impl FnOnce(*const Factor, usize),
) {
    if IN_PLACE {
        return work(rows.cast(), stride);
    }
    let widened = dim.next_multiple_of(LANES);
    FACTORS.with_borrow_mut(|factors| {
        if factors.len() < num_rows * widened {
            factors.resize(num_rows * widened, Factor::default());
        }
        for row in 0..num_rows {
            for first in (0..dim).step_by(LANES) {
                let target = factors[row * widened + first..].as_mut_ptr();
                // SAFETY: the caller vouches for the row; rows of factors are whole vectors.
                unsafe { store_factors(Element::load_first(rows.add(row * stride + first), dim - first), target) };
            }
        }
        work(factors.as_ptr(), widened);
    });
}

/// Adds the products of one operation: V vectors of columns, with the factors of R rows.
#[inline(always)]
pub(crate) fn add<const R: usize, const V: usize>(
    sums: &mut [[F32; V]; R],
    columns: [Operand; V],
    factors: impl Fn(usize) -> Operand,
) {
    if R < V {
        let factors: [_; R] = from_fn(factors);
        for vector in 0..V {
            for row in 0..R {
                sums[row][vector] = multiply_add(factors[row], columns[vector], sums[row][vector]);
            }
        }
        return;
    }
    for row in 0..R {
        let factors = factors(row);
        for vector in 0..V {
            sums[row][vector] = multiply_add(factors, columns[vector], sums[row][vector]);
        }
    }
}

#[cfg(test)]
mod tests;
