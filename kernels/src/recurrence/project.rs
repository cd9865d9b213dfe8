//! Products of vectors with a state.

use crate::simd::{F32, LANES, prefetch};

/// Numbers of a cache line.
const LINE: usize = 16;
/// Rows from what is read to what is prefetched.
const AHEAD: usize = 8;

/// `products[i]` = `vectors[i]` times the state [rows, columns]. Sums ascend. `N`: vectors of a row that are read at a time. `is_cold`:
/// the state is probably in no cache.
///
/// # Safety
/// The pointers must be valid for these sizes, and `columns` a multiple of the lanes.
pub(super) unsafe fn project<const V: usize, const N: usize>(
    state: *const f32,
    rows: usize,
    columns: usize,
    vectors: [*const f32; V],
    products: [*mut f32; V],
    is_cold: bool,
) {
    let mut first = 0;
    while first < columns {
        // SAFETY: guaranteed by the caller.
        unsafe {
            let prefetches = is_cold && first == 0;
            if columns - first >= N * LANES {
                project_strip::<V, N>(state, rows, columns, first, vectors, products, prefetches);
                first += N * LANES;
            } else {
                project_strip::<V, 1>(state, rows, columns, first, vectors, products, prefetches);
                first += LANES;
            }
        }
    }
}

#[inline(always)]
unsafe fn project_strip<const V: usize, const N: usize>(
    state: *const f32,
    rows: usize,
    columns: usize,
    first: usize,
    vectors: [*const f32; V],
    products: [*mut f32; V],
    prefetches: bool,
) {
    let mut sums = [[F32::splat(0.0); N]; V];
    // SAFETY: guaranteed by the caller of `project`.
    unsafe {
        for row in 0..rows {
            if prefetches {
                // PERF: a strip is narrower than a row, so the hardware does not see that the state is read as a whole. Behind it is
                // the state of the next head.
                for line in (0..columns).step_by(LINE) {
                    prefetch(state.wrapping_add((row + AHEAD) * columns + line));
                }
            }
            let factors = vectors.map(|vector| F32::splat(*vector.add(row)));
            for column in 0..N {
                let number = F32::load(state.add(row * columns + first + column * LANES));
                for (sums, factor) in sums.iter_mut().zip(factors) {
                    sums[column] = number.mul_add(factor, sums[column]);
                }
            }
        }
        for (sums, product) in sums.into_iter().zip(products) {
            for (column, sum) in sums.into_iter().enumerate() {
                sum.store(product.add(first + column * LANES));
            }
        }
    }
}
