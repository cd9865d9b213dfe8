//! Native CPU kernels: bf16 linear layers, paged attention, and the small operators between them, for x86-64 with AVX-512 BF16.
//! The kernels work on raw addresses that the caller owns; the Python module checks tensors before it passes their addresses on.
//!
//! INVARIANT: a row's result does not depend on other rows, on the grouping of rows into calls, or on the number of threads.

// The kernels' only caller outside of tests.
#![cfg_attr(not(feature = "python"), allow(dead_code, unused_imports))]

#[cfg(target_arch = "x86_64")]
mod attention;
mod collective;
mod cpu;
#[cfg(target_arch = "x86_64")]
mod linear;
mod memory;
#[cfg(target_arch = "x86_64")]
mod norm;
mod pool;
#[cfg(target_arch = "x86_64")]
mod rotate;
#[cfg(target_arch = "x86_64")]
mod row;
#[cfg(target_arch = "x86_64")]
mod sample;
#[cfg(target_arch = "x86_64")]
mod simd;
#[cfg(target_arch = "x86_64")]
mod stack;
#[cfg(target_arch = "x86_64")]
mod table;

#[cfg(feature = "python")]
mod python;
#[cfg(test)]
mod testing;

pub(crate) use cpu::supported;
