//! Operations of the kernels that are written for AVX-512 BF16 only.

use super::LANES;
use crate::element::Element;
use std::arch::x86_64::*;

/// Mask of the first `count` (at most 16) lanes.
#[inline]
pub(crate) fn first_lanes(count: usize) -> __mmask16 {
    if count >= LANES { 0xffff } else { (1 << count) - 1 }
}

/// Loads the selected ones of 16 bf16 elements as float32; zeros elsewhere.
///
/// # Safety
/// The selected elements must be readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn load_bf16_masked(address: *const Element, mask: __mmask16) -> __m512 {
    // SAFETY: the caller vouches for the selected elements; the others are not touched.
    let halves = unsafe { _mm256_maskz_loadu_epi16(mask, address.cast()) };
    widen(halves)
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn widen(halves: __m256i) -> __m512 {
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(halves)))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) fn narrow(values: __m512) -> __m256i {
    // SAFETY: both types are 256 bits of plain data.
    unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values)) }
}

/// Rounds to bf16 and back.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) fn round_bf16(values: __m512) -> __m512 {
    widen(narrow(values))
}

/// Stores 16 elements as bf16.
///
/// # Safety
/// 32 bytes must be writable at `address`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn store_bf16(address: *mut Element, values: __m512) {
    // SAFETY: the caller vouches for 32 bytes.
    unsafe { _mm256_storeu_si256(address.cast(), narrow(values)) };
}

/// Stores the selected elements as bf16.
///
/// # Safety
/// The selected elements must be writable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn store_bf16_masked(address: *mut Element, mask: __mmask16, values: __m512) {
    // SAFETY: the caller vouches for the selected elements; the others are not touched.
    unsafe { _mm256_mask_storeu_epi16(address.cast(), mask, narrow(values)) };
}

/// Broadcasts two consecutive bf16 elements to every lane.
///
/// # Safety
/// 4 bytes must be readable at `address`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn broadcast_pair(address: *const Element) -> __m512i {
    // SAFETY: the caller vouches for 4 bytes.
    _mm512_set1_epi32(unsafe { address.cast::<i32>().read_unaligned() })
}

/// Transposes 16 × 16 pairs of bf16. Rows are `stride` and `target_stride` elements apart.
///
/// # Safety
/// 64 bytes must be readable in each row of `source`, and writable in each row of `target`, which are 64-byte aligned.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) unsafe fn transpose_pairs(
    source: *const Element,
    stride: usize,
    target: *mut Element,
    target_stride: usize,
) {
    let mut rows = [_mm512_setzero_si512(); LANES];
    for (index, row) in rows.iter_mut().enumerate() {
        // SAFETY: the caller vouches for the rows.
        *row = unsafe { _mm512_loadu_si512(source.add(index * stride).cast()) };
    }
    for block in (0..LANES).step_by(2) {
        let (a, b) = (rows[block], rows[block + 1]);
        (rows[block], rows[block + 1]) = (_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    let mut quads = [_mm512_setzero_si512(); LANES];
    for block in (0..LANES).step_by(4) {
        for half in 0..2 {
            let (a, b) = (rows[block + half], rows[block + 2 + half]);
            quads[block + 2 * half] = _mm512_unpacklo_epi64(a, b);
            quads[block + 2 * half + 1] = _mm512_unpackhi_epi64(a, b);
        }
    }
    // Now 128-bit lane l of quads[4 b + p] holds pair 4 l + p of rows 4 b to 4 b + 3.
    for pair in 0..4 {
        let [a, b, c, d] = [quads[pair], quads[4 + pair], quads[8 + pair], quads[12 + pair]];
        let (ab_even, ab_odd) = (_mm512_shuffle_i32x4::<0x88>(a, b), _mm512_shuffle_i32x4::<0xdd>(a, b));
        let (cd_even, cd_odd) = (_mm512_shuffle_i32x4::<0x88>(c, d), _mm512_shuffle_i32x4::<0xdd>(c, d));
        let columns = [
            _mm512_shuffle_i32x4::<0x88>(ab_even, cd_even),
            _mm512_shuffle_i32x4::<0x88>(ab_odd, cd_odd),
            _mm512_shuffle_i32x4::<0xdd>(ab_even, cd_even),
            _mm512_shuffle_i32x4::<0xdd>(ab_odd, cd_odd),
        ];
        for (lane, column) in columns.into_iter().enumerate() {
            // SAFETY: the caller vouches for the rows.
            unsafe { _mm512_store_si512(target.add((4 * lane + pair) * target_stride).cast(), column) };
        }
    }
}

/// `sum + a·b` over pairs of bf16 elements, per lane.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) fn dot_pairs(sum: __m512, a: __m512i, b: __m512i) -> __m512 {
    // SAFETY: `__m512bh` and `__m512i` are both 512 bits of plain data.
    unsafe {
        let a = std::mem::transmute::<__m512i, __m512bh>(a);
        let b = std::mem::transmute::<__m512i, __m512bh>(b);
        _mm512_dpbf16_ps(sum, a, b)
    }
}

/// 2^x per lane, to about 1e-7; 0 below -150 and exactly 1 at 0. NaN stays NaN. Uses the minimax polynomial over [-0.5, 0.5] that is
/// 1 at 0.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) fn exp2(x: __m512) -> __m512 {
    power(x, [1.326_471_4e-3, 9.671_513e-3, 5.550_734e-2, 2.402_224_2e-1, std::f32::consts::LN_2])
}

/// 2^x per lane to about 3e-6, which is enough before rounding to bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) fn exp2_coarse(x: __m512) -> __m512 {
    power(x, [9.582_836e-3, 5.590_641e-2, 2.402_41e-1, 6.931_242e-1])
}

/// 2^x by a polynomial: coefficients from the highest power down, without the constant 1.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn power<const N: usize>(x: __m512, coefficients: [f32; N]) -> __m512 {
    // `max` returns its second operand when one is NaN.
    let x = _mm512_max_ps(_mm512_set1_ps(-160.0), x);
    let whole = _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
    let fraction = _mm512_sub_ps(x, whole);
    let mut y = _mm512_set1_ps(coefficients[0]);
    for coefficient in &coefficients[1..] {
        y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(*coefficient));
    }
    y = _mm512_fmadd_ps(y, fraction, _mm512_set1_ps(1.0));
    _mm512_scalef_ps(y, whole)
}

/// tanh(x), absolute error about 2e-7. NaN stays NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) fn tanh(x: __m512) -> __m512 {
    let (one, two) = (_mm512_set1_ps(1.0), _mm512_set1_ps(2.0));
    // tanh(x) is 1 from 10 on. `min` returns its second operand when one is NaN.
    let x = _mm512_min_ps(_mm512_set1_ps(10.0), x);
    let power = exp2(_mm512_mul_ps(x, _mm512_set1_ps(2.0 * std::f32::consts::LOG2_E)));
    _mm512_sub_ps(one, _mm512_div_ps(two, _mm512_add_ps(one, power)))
}

/// x / (1 + e^-x) in float32.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
pub(crate) fn silu(x: __m512) -> __m512 {
    let power = exp2(_mm512_mul_ps(x, _mm512_set1_ps(-std::f32::consts::LOG2_E)));
    _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0), power))
}
