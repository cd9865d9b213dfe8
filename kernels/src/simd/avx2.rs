//! AVX2, FMA and F16C: a vector is two registers.

use super::LANES;
use std::arch::x86_64::*;
use std::array::from_fn;
use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Sub};

/// Calls of intrinsics that touch no memory.
macro_rules! intrinsics {
    ($($body:tt)*) => {{
        // SAFETY: this file is only compiled for CPUs with these instructions, and values are all that they work on.
        unsafe { $($body)* }
    }};
}

/// Vectors of sums that fit into the registers alongside the operands of a loop.
pub(crate) const SUMS: usize = 6;

/// 16 numbers in float32.
#[derive(Clone, Copy)]
pub(crate) struct F32([__m256; 2]);

/// 16 integers of 32 bits, or 64 bytes.
#[derive(Clone, Copy)]
pub(crate) struct I32([__m256i; 2]);

/// 16 words of 16 bits: bf16 or float16 as they are in memory.
#[derive(Clone, Copy)]
pub(crate) struct U16(__m256i);

/// A choice of lanes: all bits of a lane are set, or none.
#[derive(Clone, Copy)]
pub(crate) struct Mask([__m256i; 2]);

/// Lanes of a register.
const HALF: usize = LANES / 2;

#[inline(always)]
fn both<A: Copy, B: Copy, C>(a: [A; 2], b: [B; 2], function: impl Fn(A, B) -> C) -> [C; 2] {
    [function(a[0], b[0]), function(a[1], b[1])]
}

macro_rules! operators {
    ($($type:ident: $($operator:ident $method:ident $intrinsic:ident),*;)*) => {$($(
        impl $operator for $type {
            type Output = $type;
            #[inline(always)]
            fn $method(self, other: $type) -> $type {
                intrinsics! {
                    $type(both(self.0, other.0, |a, b| $intrinsic(a, b)))
                }
            }
        }
    )*)*};
}
operators! {
    F32: Add add _mm256_add_ps, Sub sub _mm256_sub_ps, Mul mul _mm256_mul_ps, Div div _mm256_div_ps;
    I32: Add add _mm256_add_epi32, Sub sub _mm256_sub_epi32, Mul mul _mm256_mullo_epi32,
        BitAnd bitand _mm256_and_si256, BitOr bitor _mm256_or_si256, BitXor bitxor _mm256_xor_si256;
    Mask: BitAnd bitand _mm256_and_si256;
}

impl Mask {
    /// The first `count` lanes; all from 16 on.
    #[inline(always)]
    pub(crate) fn first(count: usize) -> Mask {
        intrinsics! {
            let count = _mm256_set1_epi32(count.min(LANES) as i32);
            Mask(I32::lane_numbers().0.map(|numbers| _mm256_cmpgt_epi32(count, numbers)))
        }
    }

    /// One bit per lane, the lowest first.
    #[inline(always)]
    pub(crate) fn from_bits(bits: u16) -> Mask {
        intrinsics! {
            let lanes = _mm256_setr_epi32(1, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7);
            let bits = i32::from(bits);
            Mask([bits, bits >> HALF].map(|bits| _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), lanes), lanes)))
        }
    }

    #[inline(always)]
    pub(crate) fn bits(self) -> u16 {
        intrinsics! {
            let [low, high] = self.0.map(|half| _mm256_movemask_ps(_mm256_castsi256_ps(half)));
            (low | high << HALF) as u16
        }
    }
}

impl F32 {
    #[inline(always)]
    pub(crate) fn splat(value: f32) -> F32 {
        intrinsics! {
            F32([_mm256_set1_ps(value); 2])
        }
    }

    /// # Safety
    /// 16 floats must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(address: *const f32) -> F32 {
        // SAFETY: guaranteed by the caller.
        F32(unsafe { [_mm256_loadu_ps(address), _mm256_loadu_ps(address.add(HALF))] })
    }

    /// The first `count` floats, and zeros.
    ///
    /// # Safety
    /// At least `count` floats, or 16, must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_first(address: *const f32, count: usize) -> F32 {
        let Mask([low, high]) = Mask::first(count);
        // SAFETY: guaranteed by the caller.
        F32(unsafe { [_mm256_maskload_ps(address, low), _mm256_maskload_ps(address.wrapping_add(HALF), high)] })
    }

    /// # Safety
    /// 16 floats must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store(self, address: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            _mm256_storeu_ps(address, self.0[0]);
            _mm256_storeu_ps(address.add(HALF), self.0[1]);
        }
    }

    /// Stores the first `count` lanes.
    ///
    /// # Safety
    /// At least `count` floats, or 16, must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_first(self, address: *mut f32, count: usize) {
        let Mask([low, high]) = Mask::first(count);
        // SAFETY: guaranteed by the caller.
        unsafe {
            _mm256_maskstore_ps(address, low, self.0[0]);
            _mm256_maskstore_ps(address.wrapping_add(HALF), high, self.0[1]);
        }
    }

    /// self · factor + addend, rounded once where the CPU can.
    #[inline(always)]
    pub(crate) fn mul_add(self, factor: F32, addend: F32) -> F32 {
        intrinsics! {
            let product = |half: usize| _mm256_fmadd_ps(self.0[half], factor.0[half], addend.0[half]);
            F32([product(0), product(1)])
        }
    }

    /// The greater; `other` if one is NaN.
    #[inline(always)]
    pub(crate) fn max(self, other: F32) -> F32 {
        intrinsics! {
            F32(both(self.0, other.0, |a, b| _mm256_max_ps(a, b)))
        }
    }

    /// The lesser; `other` if one is NaN.
    #[inline(always)]
    pub(crate) fn min(self, other: F32) -> F32 {
        intrinsics! {
            F32(both(self.0, other.0, |a, b| _mm256_min_ps(a, b)))
        }
    }

    /// Rounds to the nearest integer, ties to even; beyond ± 2^22, to an integer nearby.
    #[inline(always)]
    pub(crate) fn round(self) -> F32 {
        intrinsics! {
            F32(self.0.map(|half| _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(half)))
        }
    }

    /// self · 2^power, for integers from -160 on; NaN if one of the two is NaN.
    #[inline(always)]
    pub(crate) fn scale_by_power(self, power: F32) -> F32 {
        super::math::scale_by_power(self, power.min(F32::splat(256.0)).to_i32())
    }

    #[inline(always)]
    pub(crate) fn greater(self, other: F32) -> Mask {
        intrinsics! {
            Mask(both(self.0, other.0, |a, b| _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(a, b))))
        }
    }

    #[inline(always)]
    pub(crate) fn equal(self, other: F32) -> Mask {
        intrinsics! {
            Mask(both(self.0, other.0, |a, b| _mm256_castps_si256(_mm256_cmp_ps::<_CMP_EQ_OQ>(a, b))))
        }
    }

    /// Lanes of `self` where the mask is set, and of `other`.
    #[inline(always)]
    pub(crate) fn select(self, mask: Mask, other: F32) -> F32 {
        intrinsics! {
            let choose = |half: usize| _mm256_blendv_ps(other.0[half], self.0[half], _mm256_castsi256_ps(mask.0[half]));
            F32([choose(0), choose(1)])
        }
    }

    #[inline(always)]
    pub(crate) fn reduce_max(self) -> f32 {
        intrinsics! {
            let four = halves(_mm256_max_ps(self.0[0], self.0[1]), |a, b| _mm_max_ps(a, b));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }

    #[inline(always)]
    pub(crate) fn reduce_sum(self) -> f32 {
        intrinsics! {
            let four = halves(_mm256_add_ps(self.0[0], self.0[1]), |a, b| _mm_add_ps(a, b));
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
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
            I32(self.0.map(|half| _mm256_castps_si256(half)))
        }
    }

    #[inline(always)]
    pub(crate) fn from_bits(bits: I32) -> F32 {
        intrinsics! {
            F32(bits.0.map(|half| _mm256_castsi256_ps(half)))
        }
    }

    /// Rounds to the nearest integers, ties to even; numbers must be in the range of i32.
    #[inline(always)]
    pub(crate) fn to_i32(self) -> I32 {
        intrinsics! {
            I32(self.0.map(|half| _mm256_cvtps_epi32(half)))
        }
    }

    #[inline(always)]
    pub(crate) fn from_bf16(words: U16) -> F32 {
        F32::from_bits(words.widen().shift_left(16))
    }

    /// Rounded to bf16, to nearest even.
    #[inline(always)]
    pub(crate) fn to_bf16(self) -> U16 {
        super::math::bf16_bits(self).narrow()
    }

    #[inline(always)]
    pub(crate) fn from_f16(words: U16) -> F32 {
        intrinsics! {
            F32([_mm256_cvtph_ps(_mm256_castsi256_si128(words.0)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(words.0))])
        }
    }

    /// Rounded to float16, to nearest even.
    #[inline(always)]
    pub(crate) fn to_f16(self) -> U16 {
        intrinsics! {
            let [low, high] = self.0.map(|half| _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(half));
            U16(_mm256_set_m128i(high, low))
        }
    }
}

/// Combines the halves of a register.
#[inline(always)]
fn halves(x: __m256, combine: impl Fn(__m128, __m128) -> __m128) -> __m128 {
    intrinsics! {
        combine(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x))
    }
}

impl I32 {
    #[inline(always)]
    pub(crate) fn splat(value: i32) -> I32 {
        intrinsics! {
            I32([_mm256_set1_epi32(value); 2])
        }
    }

    /// The number of each lane: 0 to 15.
    #[inline(always)]
    pub(crate) fn lane_numbers() -> I32 {
        intrinsics! {
            I32([_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)])
        }
    }

    /// # Safety
    /// 64 bytes must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(address: *const i32) -> I32 {
        // SAFETY: guaranteed by the caller.
        I32(unsafe { [_mm256_loadu_si256(address.cast()), _mm256_loadu_si256(address.add(HALF).cast())] })
    }

    /// # Safety
    /// 64 bytes must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store(self, address: *mut i32) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            _mm256_storeu_si256(address.cast(), self.0[0]);
            _mm256_storeu_si256(address.add(HALF).cast(), self.0[1]);
        }
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
            I32(both(self.0, other.0, |a, b| _mm256_max_epi32(a, b)))
        }
    }

    #[inline(always)]
    pub(crate) fn min(self, other: I32) -> I32 {
        intrinsics! {
            I32(both(self.0, other.0, |a, b| _mm256_min_epi32(a, b)))
        }
    }

    #[inline(always)]
    pub(crate) fn shift_left(self, bits: i32) -> I32 {
        intrinsics! {
            I32(self.0.map(|half| _mm256_sll_epi32(half, _mm_cvtsi32_si128(bits))))
        }
    }

    /// Shifts zeros in.
    #[inline(always)]
    pub(crate) fn shift_right(self, bits: i32) -> I32 {
        intrinsics! {
            I32(self.0.map(|half| _mm256_srl_epi32(half, _mm_cvtsi32_si128(bits))))
        }
    }

    /// Halves, towards -∞.
    #[inline(always)]
    pub(super) fn halve(self) -> I32 {
        intrinsics! {
            I32(self.0.map(|half| _mm256_srai_epi32::<1>(half)))
        }
    }

    #[inline(always)]
    pub(crate) fn equal(self, other: I32) -> Mask {
        intrinsics! {
            Mask(both(self.0, other.0, |a, b| _mm256_cmpeq_epi32(a, b)))
        }
    }

    /// Lanes of `self` where the mask is set, and of `other`.
    #[inline(always)]
    pub(crate) fn select(self, mask: Mask, other: I32) -> I32 {
        intrinsics! {
            let choose = |half: usize| _mm256_blendv_epi8(other.0[half], self.0[half], mask.0[half]);
            I32([choose(0), choose(1)])
        }
    }

    #[inline(always)]
    pub(crate) fn to_f32(self) -> F32 {
        intrinsics! {
            F32(self.0.map(|half| _mm256_cvtepi32_ps(half)))
        }
    }

    /// The greatest lane.
    #[inline(always)]
    pub(crate) fn reduce_max(self) -> i32 {
        self.to_array().into_iter().fold(i32::MIN, i32::max)
    }

    #[inline(always)]
    pub(crate) fn reduce_sum(self) -> i32 {
        self.to_array().into_iter().sum()
    }

    /// 16 signed bytes, widened.
    ///
    /// # Safety
    /// They must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_bytes(address: *const i8) -> I32 {
        // SAFETY: guaranteed by the caller.
        I32(unsafe { [0, HALF].map(|half| _mm256_cvtepi8_epi32(_mm_loadl_epi64(address.add(half).cast()))) })
    }

    /// Stores the lowest byte of each lane.
    ///
    /// # Safety
    /// 16 bytes must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_bytes(self, address: *mut u8) {
        let U16(words) = (self & I32::splat(0xff)).narrow();
        // SAFETY: guaranteed by the caller.
        unsafe {
            let bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(address.cast(), bytes);
        }
    }

    /// 64 bytes: 0xff where a bit is set, the lowest bit first, else 0.
    #[inline(always)]
    pub(crate) fn bytes_where(bits: u64) -> I32 {
        intrinsics! {
            // Each of the four bytes of 32 bits eight times; each copy selects its bit.
            let order = _mm256_setr_epi64x(0, 0x0101_0101_0101_0101, 0x0202_0202_0202_0202, 0x0303_0303_0303_0303);
            let own = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
            I32([bits as i32, (bits >> 32) as i32].map(|bits| {
                let bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(bits), order);
                _mm256_cmpeq_epi8(_mm256_and_si256(bytes, own), own)
            }))
        }
    }

    /// The byte of the table at the lowest 4 bits of each byte, or 0 if its highest bit is set.
    #[inline(always)]
    pub(crate) fn look_up(self, table: &[u8; 16]) -> I32 {
        intrinsics! {
            let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast()));
            I32(self.0.map(|bytes| _mm256_shuffle_epi8(table, bytes)))
        }
    }

    /// The sum of each byte, unsigned, and `other`, at most 255.
    #[inline(always)]
    pub(crate) fn add_bytes_saturating(self, other: u8) -> I32 {
        intrinsics! { I32(self.0.map(|bytes| _mm256_adds_epu8(bytes, _mm256_set1_epi8(other as i8)))) }
    }

    /// The difference of each byte, unsigned, and `other`, at least 0.
    #[inline(always)]
    pub(crate) fn subtract_bytes_saturating(self, other: u8) -> I32 {
        intrinsics! { I32(self.0.map(|bytes| _mm256_subs_epu8(bytes, _mm256_set1_epi8(other as i8)))) }
    }

    /// 64 bytes in an order of this instruction set, which `zip_bytes` undoes.
    ///
    /// # Safety
    /// They must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_to_zip(address: *const u8) -> I32 {
        // SAFETY: guaranteed by the caller.
        I32(unsafe { I32::load(address.cast()) }
            .0
            .map(|bytes| intrinsics! { _mm256_permute4x64_epi64::<0b11_01_10_00>(bytes) }))
    }

    /// 64 words in the order of memory, of the lower and the upper bytes that were made of `load_to_zip`.
    #[inline(always)]
    pub(crate) fn zip_bytes(low: I32, high: I32) -> [I32; 2] {
        intrinsics! {
            from_fn(|half| {
                let (low, high) = (low.0[half], high.0[half]);
                I32([_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)])
            })
        }
    }

    /// self + the sum of the products of 4 unsigned bytes of `codes` with 4 signed bytes of `inputs`, per lane; exact.
    #[inline(always)]
    pub(crate) fn dot_bytes(self, codes: I32, inputs: I32) -> I32 {
        intrinsics! {
            // Even and odd bytes as 16 bits: the instruction that multiplies bytes saturates.
            let products = both(codes.0, inputs.0, |codes, inputs| {
                let (even, odd) = (_mm256_and_si256(codes, _mm256_set1_epi16(0xff)), _mm256_srli_epi16::<8>(codes));
                let even_inputs = _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(inputs));
                let odd_inputs = _mm256_srai_epi16::<8>(inputs);
                _mm256_add_epi32(_mm256_madd_epi16(even, even_inputs), _mm256_madd_epi16(odd, odd_inputs))
            });
            self + I32(products)
        }
    }

    /// The magnitude of each signed byte, unsigned.
    #[inline(always)]
    pub(super) fn magnitudes_of_bytes(self) -> I32 {
        intrinsics! { I32(self.0.map(|bytes| _mm256_abs_epi8(bytes))) }
    }

    /// Each signed byte, negated where that of `signs` is negative, and 0 where it is 0. None may be -128.
    #[inline(always)]
    pub(super) fn with_signs_of_bytes(self, signs: I32) -> I32 {
        intrinsics! { I32(both(self.0, signs.0, |bytes, signs| _mm256_sign_epi8(bytes, signs))) }
    }

    /// The products of pairs of unsigned bytes with signed ones, added to 16 bits, which must hold them.
    #[inline(always)]
    pub(super) fn multiply_pairs(self, inputs: I32) -> I32 {
        intrinsics! { I32(both(self.0, inputs.0, |a, b| _mm256_maddubs_epi16(a, b))) }
    }

    #[inline(always)]
    fn add_words(self, other: I32) -> I32 {
        intrinsics! { I32(both(self.0, other.0, |a, b| _mm256_add_epi16(a, b))) }
    }

    /// The sums of both words of a lane.
    #[inline(always)]
    pub(super) fn add_pairs(self) -> I32 {
        intrinsics! { I32(self.0.map(|pairs| _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))) }
    }

    /// self + the products of vectors of 4 codes per lane with as many groups of 4 signed bytes of `inputs`, one for all lanes; exact.
    /// Codes are unsigned bytes of at most `greatest`, a constant.
    ///
    /// # Safety
    /// 4 bytes must be readable for each vector.
    #[inline(always)]
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

    /// The lower half of each lane.
    #[inline(always)]
    pub(crate) fn narrow(self) -> U16 {
        let I32([low, high]) = self & I32::splat(0xffff);
        // Packs the 128-bit halves of both registers alternately.
        intrinsics! { U16(_mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packus_epi32(low, high))) }
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
            let order = _mm256_setr_epi64x(ORDER, ORDER + UPPER, ORDER, ORDER + UPPER);
            I32(self.0.map(|half| _mm256_shuffle_epi8(half, order)))
        }
    }

    /// Pair of lanes i of row j becomes pair j of row i.
    #[inline(always)]
    pub(crate) fn transpose_pairs(rows: [I32; HALF]) -> [I32; HALF] {
        let mut columns = rows;
        for half in 0..2 {
            for part in 0..2 {
                let [a, b, c, d]: [__m256i; 4] = from_fn(|row| rows[part * 4 + row].0[half]);
                intrinsics! {
                    let (ab_even, ab_odd) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
                    let (cd_even, cd_odd) = (_mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d));
                    columns[half * 4].0[part] = _mm256_permute2x128_si256::<0x20>(ab_even, cd_even);
                    columns[half * 4 + 1].0[part] = _mm256_permute2x128_si256::<0x20>(ab_odd, cd_odd);
                    columns[half * 4 + 2].0[part] = _mm256_permute2x128_si256::<0x31>(ab_even, cd_even);
                    columns[half * 4 + 3].0[part] = _mm256_permute2x128_si256::<0x31>(ab_odd, cd_odd);
                }
            }
        }
        columns
    }

    /// Lane i of row j becomes lane j of row i.
    #[inline(always)]
    pub(crate) fn transpose(rows: [I32; LANES]) -> [I32; LANES] {
        let mut columns = rows;
        for half in 0..2 {
            for part in 0..2 {
                let square = transpose(from_fn(|row| rows[part * HALF + row].0[half]));
                for column in 0..HALF {
                    columns[half * HALF + column].0[part] = square[column];
                }
            }
        }
        columns
    }
}

/// Transposes 8 × 8 lanes.
#[inline(always)]
fn transpose(mut rows: [__m256i; HALF]) -> [__m256i; HALF] {
    intrinsics! {
        for block in (0..HALF).step_by(2) {
            let (a, b) = (rows[block], rows[block + 1]);
            (rows[block], rows[block + 1]) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        }
        let mut quads = rows;
        for block in (0..HALF).step_by(4) {
            for half in 0..2 {
                let (a, b) = (rows[block + half], rows[block + 2 + half]);
                quads[block + 2 * half] = _mm256_unpacklo_epi64(a, b);
                quads[block + 2 * half + 1] = _mm256_unpackhi_epi64(a, b);
            }
        }
        // Now 128-bit part p of quads[4 b + i] holds column 4 p + i of rows 4 b to 4 b + 3.
        for index in 0..4 {
            rows[index] = _mm256_permute2x128_si256::<0x20>(quads[index], quads[4 + index]);
            rows[4 + index] = _mm256_permute2x128_si256::<0x31>(quads[index], quads[4 + index]);
        }
        rows
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
        let mut words = [0; LANES];
        // SAFETY: guaranteed by the caller; the array has 16 words.
        unsafe {
            if count >= LANES {
                return U16::load(address);
            }
            address.copy_to_nonoverlapping(words.as_mut_ptr(), count);
            U16::load(words.as_ptr())
        }
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
        let mut words = [0; LANES];
        // SAFETY: guaranteed by the caller; the array has 16 words.
        unsafe {
            if count >= LANES {
                return self.store(address);
            }
            self.store(words.as_mut_ptr());
            address.copy_from_nonoverlapping(words.as_ptr(), count);
        }
    }

    /// Stores the words at every second place, and leaves the words between them unchanged.
    ///
    /// # Safety
    /// The 16 places must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_apart(self, address: *mut u16) {
        let mut words = [0; LANES];
        // SAFETY: guaranteed by the caller; the array has 16 words.
        unsafe {
            self.store(words.as_mut_ptr());
            for (index, word) in words.into_iter().enumerate() {
                address.add(2 * index).write(word);
            }
        }
    }

    /// Each word, followed by zeros, as 32 bits.
    #[inline(always)]
    pub(crate) fn widen(self) -> I32 {
        intrinsics! {
            let (low, high) = (_mm256_castsi256_si128(self.0), _mm256_extracti128_si256::<1>(self.0));
            I32([_mm256_cvtepu16_epi32(low), _mm256_cvtepu16_epi32(high)])
        }
    }
}
