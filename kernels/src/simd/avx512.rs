//! AVX-512 F, BW, VL and DQ: a vector is one register. With AVX-512 BF16 and VNNI also their conversions and products.

use super::LANES;
use std::arch::x86_64::*;
use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Sub};

/// Calls of intrinsics that touch no memory.
macro_rules! intrinsics {
    ($($body:tt)*) => {{
        // SAFETY: this file is only compiled for CPUs with these instructions, and values are all that they work on.
        unsafe { $($body)* }
    }};
}

/// Vectors of sums that fit into the registers alongside the operands of a loop.
pub(crate) const SUMS: usize = 24;

/// 16 numbers in float32.
#[derive(Clone, Copy)]
pub(crate) struct F32(__m512);

/// 16 integers of 32 bits, or 64 bytes.
#[derive(Clone, Copy)]
pub(crate) struct I32(__m512i);

/// 16 words of 16 bits: bf16 or float16 as they are in memory.
#[derive(Clone, Copy)]
pub(crate) struct U16(__m256i);

/// A choice of lanes.
#[derive(Clone, Copy)]
pub(crate) struct Mask(__mmask16);

macro_rules! operators {
    ($($type:ident: $($operator:ident $method:ident $intrinsic:ident),*;)*) => {$($(
        impl $operator for $type {
            type Output = $type;
            #[inline(always)]
            fn $method(self, other: $type) -> $type {
                intrinsics! {
                    $type($intrinsic(self.0, other.0))
                }
            }
        }
    )*)*};
}
operators! {
    F32: Add add _mm512_add_ps, Sub sub _mm512_sub_ps, Mul mul _mm512_mul_ps, Div div _mm512_div_ps;
    I32: Add add _mm512_add_epi32, Sub sub _mm512_sub_epi32, Mul mul _mm512_mullo_epi32,
        BitAnd bitand _mm512_and_si512, BitOr bitor _mm512_or_si512, BitXor bitxor _mm512_xor_si512;
}

impl BitAnd for Mask {
    type Output = Mask;
    #[inline(always)]
    fn bitand(self, other: Mask) -> Mask {
        Mask(self.0 & other.0)
    }
}

impl Mask {
    /// The first `count` lanes; all from 16 on.
    #[inline(always)]
    pub(crate) fn first(count: usize) -> Mask {
        Mask(if count >= LANES { 0xffff } else { (1 << count) - 1 })
    }

    /// One bit per lane, the lowest first.
    #[inline(always)]
    pub(crate) fn from_bits(bits: u16) -> Mask {
        Mask(bits)
    }

    #[inline(always)]
    pub(crate) fn bits(self) -> u16 {
        self.0
    }
}

impl F32 {
    #[inline(always)]
    pub(crate) fn splat(value: f32) -> F32 {
        intrinsics! {
            F32(_mm512_set1_ps(value))
        }
    }

    /// # Safety
    /// 16 floats must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(address: *const f32) -> F32 {
        // SAFETY: guaranteed by the caller.
        F32(unsafe { _mm512_loadu_ps(address) })
    }

    /// The first `count` floats, and zeros.
    ///
    /// # Safety
    /// At least `count` floats, or 16, must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_first(address: *const f32, count: usize) -> F32 {
        // SAFETY: guaranteed by the caller.
        F32(unsafe { _mm512_maskz_loadu_ps(Mask::first(count).0, address) })
    }

    /// # Safety
    /// 16 floats must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store(self, address: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_storeu_ps(address, self.0) };
    }

    /// Stores the first `count` lanes.
    ///
    /// # Safety
    /// At least `count` floats, or 16, must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_first(self, address: *mut f32, count: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_mask_storeu_ps(address, Mask::first(count).0, self.0) };
    }

    /// self · factor + addend, rounded once where the CPU can.
    #[inline(always)]
    pub(crate) fn mul_add(self, factor: F32, addend: F32) -> F32 {
        intrinsics! {
            F32(_mm512_fmadd_ps(self.0, factor.0, addend.0))
        }
    }

    /// The greater; `other` if one is NaN.
    #[inline(always)]
    pub(crate) fn max(self, other: F32) -> F32 {
        intrinsics! {
            F32(_mm512_max_ps(self.0, other.0))
        }
    }

    /// The lesser; `other` if one is NaN.
    #[inline(always)]
    pub(crate) fn min(self, other: F32) -> F32 {
        intrinsics! {
            F32(_mm512_min_ps(self.0, other.0))
        }
    }

    /// Rounds to the nearest integer, ties to even; beyond ± 2^22, to an integer nearby.
    #[inline(always)]
    pub(crate) fn round(self) -> F32 {
        intrinsics! {
            F32(_mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0))
        }
    }

    /// self · 2^power, for integers from -160 on; NaN if one of the two is NaN.
    #[inline(always)]
    pub(crate) fn scale_by_power(self, power: F32) -> F32 {
        intrinsics! {
            F32(_mm512_scalef_ps(self.0, power.0))
        }
    }

    #[inline(always)]
    pub(crate) fn greater(self, other: F32) -> Mask {
        intrinsics! {
            Mask(_mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, other.0))
        }
    }

    #[inline(always)]
    pub(crate) fn equal(self, other: F32) -> Mask {
        intrinsics! {
            Mask(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(self.0, other.0))
        }
    }

    /// Lanes of `self` where the mask is set, and of `other`.
    #[inline(always)]
    pub(crate) fn select(self, mask: Mask, other: F32) -> F32 {
        intrinsics! {
            F32(_mm512_mask_mov_ps(other.0, mask.0, self.0))
        }
    }

    #[inline(always)]
    pub(crate) fn reduce_max(self) -> f32 {
        intrinsics! {
            _mm512_reduce_max_ps(self.0)
        }
    }

    #[inline(always)]
    pub(crate) fn reduce_sum(self) -> f32 {
        intrinsics! {
            _mm512_reduce_add_ps(self.0)
        }
    }

    #[inline(always)]
    pub(crate) fn to_array(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: the array has 16 floats.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }

    /// The bits of each number.
    #[inline(always)]
    pub(crate) fn to_bits(self) -> I32 {
        intrinsics! {
            I32(_mm512_castps_si512(self.0))
        }
    }

    #[inline(always)]
    pub(crate) fn from_bits(bits: I32) -> F32 {
        intrinsics! {
            F32(_mm512_castsi512_ps(bits.0))
        }
    }

    /// Rounds to the nearest integers, ties to even; numbers must be in the range of i32.
    #[inline(always)]
    pub(crate) fn to_i32(self) -> I32 {
        intrinsics! {
            I32(_mm512_cvtps_epi32(self.0))
        }
    }

    #[inline(always)]
    pub(crate) fn from_bf16(words: U16) -> F32 {
        intrinsics! {
            F32(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(words.0))))
        }
    }

    /// Rounded to bf16, to nearest even.
    #[inline(always)]
    #[cfg(target_feature = "avx512bf16")]
    pub(crate) fn to_bf16(self) -> U16 {
        intrinsics! { U16(std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(self.0))) }
    }

    /// Both rounded to bf16, to nearest even: pairs of words, the first ones in the lower halves of lanes.
    #[inline(always)]
    #[cfg(all(target_feature = "avx512bf16", not(any(element = "f16", element = "f32"))))]
    pub(crate) fn to_bf16_pairs(self, second: F32) -> I32 {
        // The words of lane i are i and 16 + i.
        let order: [i16; 2 * LANES] = std::array::from_fn(|word| (word / 2 + word % 2 * LANES) as i16);
        intrinsics! {
            let words = std::mem::transmute::<__m512bh, __m512i>(_mm512_cvtne2ps_pbh(second.0, self.0));
            I32(_mm512_permutexvar_epi16(std::mem::transmute::<[i16; 2 * LANES], __m512i>(order), words))
        }
    }

    /// Rounded to bf16, to nearest even.
    #[inline(always)]
    #[cfg(not(target_feature = "avx512bf16"))]
    pub(crate) fn to_bf16(self) -> U16 {
        super::math::bf16_bits(self).narrow()
    }

    #[inline(always)]
    pub(crate) fn from_f16(words: U16) -> F32 {
        intrinsics! {
            F32(_mm512_cvtph_ps(words.0))
        }
    }

    /// Rounded to float16, to nearest even.
    #[inline(always)]
    pub(crate) fn to_f16(self) -> U16 {
        intrinsics! {
            U16(_mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))
        }
    }
}

impl I32 {
    #[inline(always)]
    pub(crate) fn splat(value: i32) -> I32 {
        intrinsics! {
            I32(_mm512_set1_epi32(value))
        }
    }

    /// The number of each lane: 0 to 15.
    #[inline(always)]
    pub(crate) fn lane_numbers() -> I32 {
        intrinsics! {
            I32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15))
        }
    }

    /// # Safety
    /// 64 bytes must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(address: *const i32) -> I32 {
        // SAFETY: guaranteed by the caller.
        I32(unsafe { _mm512_loadu_si512(address.cast()) })
    }

    /// # Safety
    /// 64 bytes must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store(self, address: *mut i32) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm512_storeu_si512(address.cast(), self.0) };
    }

    #[inline(always)]
    pub(crate) fn to_array(self) -> [i32; LANES] {
        let mut lanes = [0; LANES];
        // SAFETY: the array has 64 bytes.
        unsafe { self.store(lanes.as_mut_ptr()) };
        lanes
    }

    #[inline(always)]
    pub(crate) fn max(self, other: I32) -> I32 {
        intrinsics! {
            I32(_mm512_max_epi32(self.0, other.0))
        }
    }

    #[inline(always)]
    pub(crate) fn min(self, other: I32) -> I32 {
        intrinsics! {
            I32(_mm512_min_epi32(self.0, other.0))
        }
    }

    #[inline(always)]
    pub(crate) fn shift_left(self, bits: i32) -> I32 {
        intrinsics! {
            I32(_mm512_sll_epi32(self.0, _mm_cvtsi32_si128(bits)))
        }
    }

    /// Shifts zeros in.
    #[inline(always)]
    pub(crate) fn shift_right(self, bits: i32) -> I32 {
        intrinsics! {
            I32(_mm512_srl_epi32(self.0, _mm_cvtsi32_si128(bits)))
        }
    }

    #[inline(always)]
    pub(crate) fn equal(self, other: I32) -> Mask {
        intrinsics! {
            Mask(_mm512_cmpeq_epi32_mask(self.0, other.0))
        }
    }

    /// Lanes of `self` where the mask is set, and of `other`.
    #[inline(always)]
    pub(crate) fn select(self, mask: Mask, other: I32) -> I32 {
        intrinsics! {
            I32(_mm512_mask_mov_epi32(other.0, mask.0, self.0))
        }
    }

    #[inline(always)]
    pub(crate) fn to_f32(self) -> F32 {
        intrinsics! {
            F32(_mm512_cvtepi32_ps(self.0))
        }
    }

    /// The greatest lane.
    #[inline(always)]
    pub(crate) fn reduce_max(self) -> i32 {
        intrinsics! { _mm512_reduce_max_epi32(self.0) }
    }

    #[inline(always)]
    pub(crate) fn reduce_sum(self) -> i32 {
        intrinsics! { _mm512_reduce_add_epi32(self.0) }
    }

    /// 16 signed bytes, widened.
    ///
    /// # Safety
    /// They must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_bytes(address: *const i8) -> I32 {
        // SAFETY: guaranteed by the caller.
        I32(unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(address.cast())) })
    }

    /// Stores the lowest byte of each lane.
    ///
    /// # Safety
    /// 16 bytes must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_bytes(self, address: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm_storeu_si128(address.cast(), _mm512_cvtepi32_epi8(self.0)) };
    }

    /// 64 bytes: 0xff where a bit is set, the lowest bit first, else 0.
    #[inline(always)]
    pub(crate) fn bytes_where(bits: u64) -> I32 {
        intrinsics! { I32(_mm512_movm_epi8(bits)) }
    }

    /// The byte of the table at the lowest 4 bits of each byte, or 0 if its highest bit is set.
    #[inline(always)]
    pub(crate) fn look_up(self, table: &[u8; 16]) -> I32 {
        intrinsics! { I32(_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), self.0)) }
    }

    /// The sum of each byte, unsigned, and `other`, at most 255.
    #[inline(always)]
    pub(crate) fn add_bytes_saturating(self, other: u8) -> I32 {
        intrinsics! { I32(_mm512_adds_epu8(self.0, _mm512_set1_epi8(other as i8))) }
    }

    /// The difference of each byte, unsigned, and `other`, at least 0.
    #[inline(always)]
    pub(crate) fn subtract_bytes_saturating(self, other: u8) -> I32 {
        intrinsics! { I32(_mm512_subs_epu8(self.0, _mm512_set1_epi8(other as i8))) }
    }

    /// 64 bytes in an order of this instruction set, which `zip_bytes` undoes.
    ///
    /// # Safety
    /// They must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_to_zip(address: *const u8) -> I32 {
        // SAFETY: guaranteed by the caller.
        let bytes = unsafe { I32::load(address.cast()) };
        intrinsics! { I32(_mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), bytes.0)) }
    }

    /// 64 words in the order of memory, of the lower and the upper bytes that were made of `load_to_zip`.
    #[inline(always)]
    pub(crate) fn zip_bytes(low: I32, high: I32) -> [I32; 2] {
        intrinsics! { [I32(_mm512_unpacklo_epi8(low.0, high.0)), I32(_mm512_unpackhi_epi8(low.0, high.0))] }
    }

    /// Each byte less `other`, without its overflow.
    #[inline(always)]
    pub(crate) fn subtract_bytes(self, other: i8) -> I32 {
        intrinsics! { I32(_mm512_sub_epi8(self.0, _mm512_set1_epi8(other))) }
    }

    /// self + the sum of the products of 4 unsigned bytes of `codes` with 4 signed bytes of `inputs`, per lane; exact.
    #[inline(always)]
    #[cfg(target_feature = "avx512vnni")]
    pub(crate) fn dot_bytes(self, codes: I32, inputs: I32) -> I32 {
        intrinsics! {
            I32(_mm512_dpbusd_epi32(self.0, codes.0, inputs.0))
        }
    }

    /// self + the sum of the products of 4 unsigned bytes of `codes` with 4 signed bytes of `inputs`, per lane; exact.
    #[inline(always)]
    #[cfg(not(target_feature = "avx512vnni"))]
    pub(crate) fn dot_bytes(self, codes: I32, inputs: I32) -> I32 {
        intrinsics! {
            // Even and odd bytes as 16 bits: the instruction that multiplies bytes saturates.
            let (even, odd) = (_mm512_and_si512(codes.0, _mm512_set1_epi16(0xff)), _mm512_srli_epi16::<8>(codes.0));
            let even_inputs = _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(inputs.0));
            let odd_inputs = _mm512_srai_epi16::<8>(inputs.0);
            let sum = _mm512_add_epi32(_mm512_madd_epi16(even, even_inputs), _mm512_madd_epi16(odd, odd_inputs));
            I32(_mm512_add_epi32(self.0, sum))
        }
    }

    /// The products of pairs of unsigned bytes with signed ones, added to 16 bits, which must hold them.
    #[inline(always)]
    #[cfg(not(target_feature = "avx512vnni"))]
    fn multiply_pairs(self, inputs: I32) -> I32 {
        intrinsics! { I32(_mm512_maddubs_epi16(self.0, inputs.0)) }
    }

    #[inline(always)]
    #[cfg(not(target_feature = "avx512vnni"))]
    fn add_words(self, other: I32) -> I32 {
        intrinsics! { I32(_mm512_add_epi16(self.0, other.0)) }
    }

    /// The sums of both words of a lane.
    #[inline(always)]
    #[cfg(not(target_feature = "avx512vnni"))]
    fn add_pairs(self) -> I32 {
        intrinsics! { I32(_mm512_madd_epi16(self.0, _mm512_set1_epi16(1))) }
    }

    /// self + the products of vectors of 4 codes per lane with as many groups of 4 signed bytes of `inputs`, one for all lanes; exact.
    /// Codes are unsigned bytes of at most `_greatest`, a constant.
    ///
    /// # Safety
    /// 4 bytes must be readable for each vector.
    #[inline(always)]
    #[cfg(target_feature = "avx512vnni")]
    pub(crate) unsafe fn dot_codes(self, codes: &[I32], inputs: *const i32, _greatest: i32) -> I32 {
        let mut sum = self;
        for (index, &codes) in codes.iter().enumerate() {
            // SAFETY: guaranteed by the caller.
            sum = sum.dot_bytes(codes, I32::splat(unsafe { inputs.add(index).read_unaligned() }));
        }
        sum
    }

    /// self + the products of vectors of 4 codes per lane with as many groups of 4 signed bytes of `inputs`, one for all lanes; exact.
    /// Codes are unsigned bytes of at most `greatest`, a constant.
    ///
    /// # Safety
    /// 4 bytes must be readable for each vector.
    #[inline(always)]
    #[cfg(not(target_feature = "avx512vnni"))]
    pub(crate) unsafe fn dot_codes(self, codes: &[I32], inputs: *const i32, greatest: i32) -> I32 {
        // Sums of pairs of products that fit 16 bits. The instruction that multiplies pairs saturates, so codes of 8 bits need another.
        let fitting = (i32::from(i16::MAX) / (2 * 128 * greatest)) as usize;
        let mut sum = self;
        for (part, codes) in codes.chunks(fitting.max(1)).enumerate() {
            // SAFETY: guaranteed by the caller.
            let input = |index| I32::splat(unsafe { inputs.add(part * fitting.max(1) + index).read_unaligned() });
            if fitting == 0 {
                sum = sum.dot_bytes(codes[0], input(0));
                continue;
            }
            let mut pairs = codes[0].multiply_pairs(input(0));
            for index in 1..codes.len() {
                pairs = pairs.add_words(codes[index].multiply_pairs(input(index)));
            }
            sum = sum + pairs.add_pairs();
        }
        sum
    }

    /// sum + the products of two bf16 numbers per lane, in the order of the instruction.
    #[inline(always)]
    #[cfg(target_feature = "avx512bf16")]
    pub(crate) fn dot_pairs(self, other: I32, sum: F32) -> F32 {
        intrinsics! {
            let [a, b] = [self.0, other.0].map(|pairs| std::mem::transmute::<__m512i, __m512bh>(pairs));
            F32(_mm512_dpbf16_ps(sum.0, a, b))
        }
    }

    /// The lower half of each lane.
    #[inline(always)]
    pub(crate) fn narrow(self) -> U16 {
        intrinsics! { U16(_mm512_cvtepi32_epi16(self.0)) }
    }
}

impl I32 {
    /// Swaps the second and the third of the four words of each pair of lanes.
    #[inline(always)]
    pub(crate) fn swap_inner_words(self) -> I32 {
        const ORDER: i64 = 0x0706_0302_0504_0100;
        /// Selects from the upper half of 128 bits.
        const UPPER: i64 = 0x0808_0808_0808_0808;
        intrinsics! {
            let order = _mm512_setr_epi64(0, UPPER, 0, UPPER, 0, UPPER, 0, UPPER);
            I32(_mm512_shuffle_epi8(self.0, _mm512_add_epi64(_mm512_set1_epi64(ORDER), order)))
        }
    }

    /// Pair of lanes i of row j becomes pair j of row i.
    #[inline(always)]
    pub(crate) fn transpose_pairs(rows: [I32; LANES / 2]) -> [I32; LANES / 2] {
        let mut columns = rows;
        intrinsics! {
            for odd in 0..2 {
                // For each two rows: every second pair, side by side.
                let [a, b, c, d]: [__m512i; 4] = std::array::from_fn(|index| {
                    let (upper, lower) = (rows[2 * index].0, rows[2 * index + 1].0);
                    if odd == 0 { _mm512_unpacklo_epi64(upper, lower) } else { _mm512_unpackhi_epi64(upper, lower) }
                });
                let (ab_low, cd_low) = (_mm512_shuffle_i64x2::<0x44>(a, b), _mm512_shuffle_i64x2::<0x44>(c, d));
                let (ab_high, cd_high) = (_mm512_shuffle_i64x2::<0xee>(a, b), _mm512_shuffle_i64x2::<0xee>(c, d));
                columns[odd] = I32(_mm512_shuffle_i64x2::<0x88>(ab_low, cd_low));
                columns[odd + 2] = I32(_mm512_shuffle_i64x2::<0xdd>(ab_low, cd_low));
                columns[odd + 4] = I32(_mm512_shuffle_i64x2::<0x88>(ab_high, cd_high));
                columns[odd + 6] = I32(_mm512_shuffle_i64x2::<0xdd>(ab_high, cd_high));
            }
        }
        columns
    }

    /// Lane i of row j becomes lane j of row i.
    #[inline(always)]
    pub(crate) fn transpose(rows: [I32; LANES]) -> [I32; LANES] {
        intrinsics! {
            let mut rows = rows.map(|row| row.0);
            for block in (0..LANES).step_by(2) {
                let (a, b) = (rows[block], rows[block + 1]);
                (rows[block], rows[block + 1]) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            }
            let mut quads = rows;
            for block in (0..LANES).step_by(4) {
                for half in 0..2 {
                    let (a, b) = (rows[block + half], rows[block + 2 + half]);
                    quads[block + 2 * half] = _mm512_unpacklo_epi64(a, b);
                    quads[block + 2 * half + 1] = _mm512_unpackhi_epi64(a, b);
                }
            }
            // Now 128-bit part p of quads[4 b + i] holds column 4 p + i of rows 4 b to 4 b + 3.
            for index in 0..4 {
                let [a, b, c, d] = [quads[index], quads[4 + index], quads[8 + index], quads[12 + index]];
                let (ab_even, ab_odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
                let (cd_even, cd_odd) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
                rows[index] = _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even);
                rows[4 + index] = _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd);
                rows[8 + index] = _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even);
                rows[12 + index] = _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd);
            }
            rows.map(I32)
        }
    }
}

impl U16 {
    /// # Safety
    /// 16 words must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(address: *const u16) -> U16 {
        // SAFETY: guaranteed by the caller.
        U16(unsafe { _mm256_loadu_si256(address.cast()) })
    }

    /// The first `count` words, and zeros.
    ///
    /// # Safety
    /// At least `count` words, or 16, must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_first(address: *const u16, count: usize) -> U16 {
        // SAFETY: guaranteed by the caller.
        U16(unsafe { _mm256_maskz_loadu_epi16(Mask::first(count).0, address.cast()) })
    }

    /// # Safety
    /// 16 words must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store(self, address: *mut u16) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm256_storeu_si256(address.cast(), self.0) };
    }

    /// Stores the first `count` lanes.
    ///
    /// # Safety
    /// At least `count` words, or 16, must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_first(self, address: *mut u16, count: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { _mm256_mask_storeu_epi16(address.cast(), Mask::first(count).0, self.0) };
    }

    /// Stores the words at every second place, and leaves the words between them unchanged.
    ///
    /// # Safety
    /// The 16 places must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_apart(self, address: *mut u16) {
        // SAFETY: guaranteed by the caller; nothing else is touched.
        unsafe { _mm512_mask_storeu_epi16(address.cast(), 0x5555_5555, _mm512_cvtepu16_epi32(self.0)) };
    }

    /// Each word, followed by zeros, as 32 bits.
    #[inline(always)]
    pub(crate) fn widen(self) -> I32 {
        intrinsics! {
            I32(_mm512_cvtepu16_epi32(self.0))
        }
    }
}
