//! Vectors of 16 lanes: the few types and operations that the kernels are written in, with one implementation per instruction set.
//! The crate is compiled once for each instruction set (`-C target-feature`), which chooses the implementation; nothing is dispatched
//! inside. Functions that are made of these operations are written here once.
//!
//! INVARIANT: within one build, an operation's bits depend on its operands only. Sums over lanes have a fixed order. Builds may differ
//! from each other: with fused multiply-add, or in subnormal numbers.

mod bytes;
mod float8;
#[cfg(target_feature = "avx512f")]
#[path = "avx512.rs"]
mod isa;
#[cfg(all(target_feature = "avx2", not(target_feature = "avx512f")))]
#[path = "avx2.rs"]
mod isa;
#[cfg(not(target_feature = "avx2"))]
#[path = "portable.rs"]
mod isa;
mod math;
#[cfg(test)]
mod tests;

pub(crate) use bytes::Bytes;
pub(crate) use isa::{F32, I32, Mask, SUMS, U16};
pub(crate) use math::{Float8, from_bf16, from_f16, to_bf16, to_f16};

/// Lanes of a vector on every instruction set, so that packed layouts are the same everywhere.
pub(crate) const LANES: usize = 16;

/// The instruction set that this crate is compiled for.
pub(crate) const ISA: &str = if cfg!(target_feature = "avx512bf16") {
    "avx512-bf16"
} else if cfg!(target_feature = "avx512vnni") {
    "avx512-vnni"
} else if cfg!(target_feature = "avx512f") {
    "avx512"
} else if cfg!(target_feature = "avx2") {
    "avx2"
} else {
    "portable"
};

// What the implementations use beyond the feature that chooses them.
#[cfg(all(
    target_feature = "avx512f",
    not(all(target_feature = "avx512bw", target_feature = "avx512vl", target_feature = "avx512dq"))
))]
compile_error!("AVX-512 kernels need +avx512f,+avx512bw,+avx512vl,+avx512dq");
#[cfg(all(target_feature = "avx512bf16", not(target_feature = "avx512vnni")))]
compile_error!("AVX-512 BF16 kernels need +avx512vnni too");
#[cfg(all(target_feature = "avx2", not(all(target_feature = "fma", target_feature = "f16c"))))]
compile_error!("AVX2 kernels need +avx2,+fma,+f16c");

/// Calls `function::<N>` with `count` as the constant N, the last one for all larger counts: loops over N are then unrolled, and
/// their vectors stay in registers.
macro_rules! with_constant {
    ($count:expr, [$($size:literal),*; $last:literal], $function:ident::<$rows:ident>$arguments:tt) => {
        match $count {
            $($size => $function::<$rows, $size>$arguments,)*
            _ => $function::<$rows, $last>$arguments,
        }
    };
    ($count:expr, [$($size:literal),*; $last:literal], $function:ident$arguments:tt) => {
        match $count {
            $($size => $function::<$size>$arguments,)*
            _ => $function::<$last>$arguments,
        }
    };
}
pub(crate) use with_constant;

/// Starts to load the cache line of an address that is read once: into the first-level cache, past the others. The address may be
/// anything.
#[inline(always)]
pub(crate) fn prefetch_once<T>(address: *const T) {
    // SAFETY: prefetching touches nothing.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_NTA, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_NTA>(address.cast());
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl1strm, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}

/// Starts to load the cache line of an address into the second-level cache. The address may be anything.
#[inline(always)]
pub(crate) fn prefetch<T>(address: *const T) {
    // SAFETY: prefetching touches nothing.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!("prfm pldl2keep, [{}]", in(reg) address, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = address;
}
