//! Native CPU kernels: linear layers, paged attention, and the small operators between them. The crate is compiled once for each
//! instruction set (`-C target-feature`) and data type (`--cfg element`); nothing inside chooses between them.
//!
//! The kernels work on raw addresses that the caller owns; the Python module checks tensors before it passes their addresses on.
//!
//! INVARIANT: a row's result does not depend on other rows, on the grouping of rows into calls, or on the number of threads.

// The kernels' only caller outside of tests.
#![cfg_attr(not(feature = "python"), allow(dead_code, unused_imports))]

mod activation;
mod attention;
mod collective;
mod cpu;
#[allow(dead_code, unused_imports, unused_macros, reason = "builds use different operations")]
mod element;
mod linear;
mod low_rank;
mod memory;
mod norm;
mod pool;
mod product;
mod recurrence;
#[cfg(target_feature = "avx512bf16")]
mod registers;
mod rotate;
mod routing;
mod row;
mod sample;
#[allow(dead_code, unused_imports, unused_macros, reason = "builds use different operations")]
mod simd;
mod stack;

#[cfg(feature = "python")]
mod python;
#[cfg(test)]
mod testing;
