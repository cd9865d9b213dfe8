//! Products of vectors with a state.

use crate::simd::{F32, LANES};

/// `products[i]` = `vectors[i]` times the state [rows, columns]. Sums ascend. `N`: vectors of a row that are read at a time.
///
/// # Safety
/// The pointers must be valid for these sizes, and `columns` a multiple of the lanes.
pub(super) unsafe fn project<const V: usize, const N: usize>(
    state: *const f32,
    rows: usize,
    columns: usize,
    vectors: [*const f32; V],
    products: [*mut f32; V],
) {
    let mut first = 0;
    while first < columns {
        // SAFETY: guaranteed by the caller.
        unsafe {
            if columns - first >= N * LANES {
                project_strip::<V, N>(state, rows, columns, first, vectors, products);
                first += N * LANES;
            } else {
                project_strip::<V, 1>(state, rows, columns, first, vectors, products);
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
) {
    let mut sums = [[F32::splat(0.0); N]; V];
    // SAFETY: guaranteed by the caller of `project`.
    unsafe {
        for row in 0..rows {
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
