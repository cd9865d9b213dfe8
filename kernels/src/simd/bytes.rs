//! Codes of 8 bits, prepared once for products with many rows of inputs of 8 bits.

use super::I32;

/// 4 codes per lane.
#[cfg(any(target_feature = "avx512f", not(target_feature = "avx2")))]
#[derive(Clone, Copy)]
pub(crate) struct Bytes(I32);

#[cfg(any(target_feature = "avx512f", not(target_feature = "avx2")))]
impl Bytes {
    /// Number subtracted from each code.
    pub(crate) const OFFSET: i32 = 0;

    #[inline(always)]
    pub(crate) fn of(codes: I32) -> Bytes {
        Bytes(codes)
    }

    /// sum + the products of vectors of codes with as many groups of 4 signed bytes of `inputs`, one for all lanes; exact. No input may be
    /// -128.
    ///
    /// # Safety
    /// 4 bytes must be readable for each vector.
    #[inline(always)]
    pub(crate) unsafe fn dot(codes: &[Bytes], inputs: *const i32, mut sum: I32) -> I32 {
        for (index, codes) in codes.iter().enumerate() {
            // SAFETY: guaranteed by the caller.
            sum = unsafe { sum.dot_codes(&[codes.0], inputs.add(index), 255) };
        }
        sum
    }
}

/// 4 codes per lane, less 128, and their magnitudes. PERF: AVX2 adds the products of two unsigned bytes with signed ones to 16 bits, and
/// saturates. Magnitudes of codes with inputs that have their signs fit, 2 · 128 · 127; many rows take less time than with codes that are
/// widened to 16 bits (Emerald Rapids).
#[cfg(all(target_feature = "avx2", not(target_feature = "avx512f")))]
#[derive(Clone, Copy)]
pub(crate) struct Bytes {
    signed: I32,
    magnitudes: I32,
}

#[cfg(all(target_feature = "avx2", not(target_feature = "avx512f")))]
impl Bytes {
    /// Number subtracted from each code.
    pub(crate) const OFFSET: i32 = 128;

    #[inline(always)]
    pub(crate) fn of(codes: I32) -> Bytes {
        let signed = codes ^ I32::splat(0x8080_8080_u32.cast_signed());
        Bytes { signed, magnitudes: signed.magnitudes_of_bytes() }
    }

    /// The same result as on other instruction sets.
    ///
    /// # Safety
    /// 4 bytes must be readable for each vector.
    #[inline(always)]
    pub(crate) unsafe fn dot(codes: &[Bytes], inputs: *const i32, mut sum: I32) -> I32 {
        for (index, codes) in codes.iter().enumerate() {
            // SAFETY: guaranteed by the caller.
            let input = I32::splat(unsafe { inputs.add(index).read_unaligned() });
            sum = sum + codes.magnitudes.multiply_pairs(input.with_signs_of_bytes(codes.signed)).add_pairs();
        }
        sum
    }
}
