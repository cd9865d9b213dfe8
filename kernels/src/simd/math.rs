//! Functions of vectors that are made of the operations of every instruction set.

use super::{F32, I32};
use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI, LN_2, LOG2_E};

/// A format of 8-bit floating point (Open Compute Project).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float8 {
    E4m3fn,
    E5m2,
}

impl Float8 {
    pub(super) const fn fraction_bits(self) -> i32 {
        match self {
            Float8::E4m3fn => 3,
            Float8::E5m2 => 2,
        }
    }

    /// Bits of a float32's exponent above those of an 8-bit float.
    pub(super) const fn offset(self) -> i32 {
        match self {
            Float8::E4m3fn => 112 << 23,
            Float8::E5m2 => 96 << 23,
        }
    }

    /// The power of two that `F32::from_float8` multiplies by, which saves an operation.
    pub(crate) const fn shrinkage(self) -> f32 {
        match self {
            Float8::E4m3fn => 1.0 / 256.0,
            Float8::E5m2 => 1.0 / 65536.0,
        }
    }
}

impl F32 {
    /// The finite numbers in a byte of each lane, exactly, times `format.shrinkage()`.
    #[inline(always)]
    pub(crate) fn from_float8<const BYTE: i32>(lanes: I32, format: Float8) -> F32 {
        let fraction_bits = format.fraction_bits();
        let place = |bit: i32, target: i32| {
            let shift = target - bit - 8 * BYTE;
            if shift < 0 { lanes.shift_right(-shift) } else { lanes.shift_left(shift) }
        };
        // The bits where float32 has them, below higher bits of the exponent. So a subnormal number, m · least, becomes
        // (1 + m) · least / 2, which is below `least`.
        let offset = format.offset();
        let bits = place(0, 23 - fraction_bits) & I32::splat(0x7f << (23 - fraction_bits)) | I32::splat(offset);
        let (magnitude, least) = (F32::from_bits(bits), f32::from_bits(offset as u32 + (1 << 23)));
        let magnitude = magnitude.min(magnitude.mul_add(F32::splat(2.0), F32::splat(-least)));
        F32::from_bits(place(7, 31) & I32::splat(i32::MIN) | magnitude.to_bits())
    }

    /// 2^x to about 1e-7; 0 below -150 and exactly 1 at 0. NaN stays NaN, +∞ may become NaN. Uses the minimax polynomial over
    /// [-0.5, 0.5] that is 1 at 0.
    #[inline(always)]
    pub(crate) fn exp2(self) -> F32 {
        power(self, [1.326_471_4e-3, 9.671_513e-3, 5.550_734e-2, 2.402_224_2e-1, LN_2])
    }

    /// 2^x to about 3e-6, which is enough before rounding to bf16.
    #[inline(always)]
    pub(crate) fn exp2_coarse(self) -> F32 {
        power(self, [9.582_836e-3, 5.590_641e-2, 2.402_41e-1, 6.931_242e-1])
    }

    /// e^x
    #[inline(always)]
    pub(crate) fn exp(self) -> F32 {
        (self * F32::splat(LOG2_E)).exp2()
    }

    /// ln(1 + e^x)
    #[inline(always)]
    pub(crate) fn softplus(self) -> F32 {
        let zero = F32::splat(0.0);
        let power = self.min(zero - self).exp();
        // ln(1 + p) is twice the area hyperbolic tangent of p / (2 + p), which is at most 1/3.
        let ratio = power / (F32::splat(2.0) + power);
        let square = ratio * ratio;
        let mut sum = F32::splat(2.0 / 15.0);
        for divisor in [13.0, 11.0, 9.0, 7.0, 5.0, 3.0, 1.0] {
            sum = sum.mul_add(square, F32::splat(2.0 / divisor));
        }
        sum.mul_add(ratio, self.max(zero))
    }

    /// tanh(x), to about 4e-7 of the result. NaN stays NaN.
    #[inline(always)]
    pub(crate) fn tanh(self) -> F32 {
        // tanh(x) is 1 from 10 on.
        let power = (F32::splat(10.0).min(self) * F32::splat(2.0)).exp();
        let far = F32::splat(1.0) - F32::splat(2.0) / (F32::splat(1.0) + power);
        // Near zero, the difference would consist of rounding errors: the first terms of the series.
        let square = self * self;
        let mut near = F32::splat(62.0 / 2835.0);
        for coefficient in [-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0] {
            near = near.mul_add(square, F32::splat(coefficient));
        }
        near = (near * square).mul_add(self, self);
        near.select(F32::splat(0.0625).greater(square), far)
    }

    /// 1 / (1 + e^-x), also of ± ∞
    #[inline(always)]
    pub(crate) fn sigmoid(self) -> F32 {
        let power = F32::splat(256.0).min(self * F32::splat(-LOG2_E)); // 2^256 is ∞ already, of which `exp2` knows nothing
        F32::splat(1.0) / (F32::splat(1.0) + power.exp2())
    }

    /// x / (1 + e^-x)
    #[inline(always)]
    pub(crate) fn silu(self) -> F32 {
        self / (F32::splat(1.0) + (self * F32::splat(-LOG2_E)).exp2())
    }

    /// x · Φ(x)
    #[inline(always)]
    #[expect(clippy::excessive_precision, reason = "the coefficients as published")]
    pub(crate) fn gelu(self) -> F32 {
        let zero = F32::splat(0.0);
        let negative = (zero - self).min(self);
        // Φ of the negative number: erfc(z) / 2 by Chebyshev fitting, to 1.2e-7 of the result (Press et al., Numerical Recipes, 6.2).
        let z = negative * F32::splat(-FRAC_1_SQRT_2);
        let t = F32::splat(1.0) / F32::splat(0.5).mul_add(z, F32::splat(1.0));
        let mut exponent = F32::splat(0.170_872_77);
        for coefficient in [
            -0.822_152_23,
            1.488_515_87,
            -1.135_203_98,
            0.278_868_07,
            -0.186_288_06,
            0.096_784_18,
            0.374_091_96,
            1.000_023_68,
            -1.265_512_23,
        ] {
            exponent = exponent.mul_add(t, F32::splat(coefficient));
        }
        let tail = F32::splat(0.5) * t * (exponent - z * z).exp();
        let share = (F32::splat(1.0) - tail).select(self.greater(zero), tail);
        self * share
    }

    /// 0.5 · x · (1 + tanh(√(2 / π) · (x + 0.044715 · x³))), as x times a sigmoid
    #[inline(always)]
    pub(crate) fn tanh_gelu(self) -> F32 {
        let cubic = (self * self).mul_add(F32::splat(0.044_715), F32::splat(1.0)) * self;
        self * (cubic * F32::splat(2.0 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2)).sigmoid()
    }

    /// Rounds to bf16 and back.
    #[inline(always)]
    pub(crate) fn round_to_bf16(self) -> F32 {
        F32::from_bf16(self.to_bf16())
    }
}

/// 2^x by a polynomial: coefficients from the highest power down, without the constant 1.
#[inline(always)]
fn power<const N: usize>(x: F32, coefficients: [f32; N]) -> F32 {
    let x = F32::splat(-160.0).max(x);
    let whole = x.round();
    let fraction = x - whole;
    let mut y = F32::splat(coefficients[0]);
    for coefficient in &coefficients[1..] {
        y = y.mul_add(fraction, F32::splat(*coefficient));
    }
    y.mul_add(fraction, F32::splat(1.0)).scale_by_power(whole)
}

/// The bits of the nearest bf16 numbers (ties to even) in the lower halves of lanes; zeros above them.
#[inline(always)]
pub(super) fn bf16_bits(x: F32) -> I32 {
    let bits = x.to_bits();
    let is_odd = bits.shift_right(16) & I32::splat(1);
    let rounded = (bits + I32::splat(0x7fff) + is_odd).shift_right(16);
    let quiet_nan = bits.shift_right(16) | I32::splat(0x40);
    rounded.select(x.equal(x), quiet_nan)
}

/// x · 2^power, for powers from -160 to 256, as two products, because 2^power may not be a float.
#[inline(always)]
#[cfg(not(target_feature = "avx512f"))]
pub(super) fn scale_by_power(x: F32, power: I32) -> F32 {
    let half = power.halve();
    let factor = |power: I32| F32::from_bits((power + I32::splat(127)).shift_left(23));
    x * factor(half) * factor(power - half)
}

/// The number that float16 bits stand for.
pub(crate) fn from_f16(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff);
    // The exponent has another bias: as the bits of a float32, the number is 2^112 times too small. So are subnormal numbers.
    let scaled = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    let special = f32::from_bits(magnitude << 13 | 0x7f80_0000);
    let absolute = if magnitude >= 0x7c00 { special } else { scaled };
    f32::from_bits(absolute.to_bits() | u32::from(bits & 0x8000) << 16)
}

/// Rounds to float16, to nearest even. Greater numbers become ∞.
pub(crate) fn to_f16(value: f32) -> u16 {
    let magnitude = value.to_bits() & 0x7fff_ffff;
    // A normal number: the exponent gets another bias, and what does not fit is rounded.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + (magnitude >> 13 & 1)) >> 13;
    // A subnormal one: adding 0.5 rounds it to a multiple of 2^-24.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits() - 0.5f32.to_bits();
    let special = 0x7c00 | if magnitude > 0x7f80_0000 { 0x200 | magnitude >> 13 & 0x1ff } else { 0 };
    let absolute = match magnitude {
        0..0x3880_0000 => subnormal,
        0x3880_0000..0x4780_0000 => normal,
        _ => special,
    };
    (absolute | (value.to_bits() >> 16 & 0x8000)) as u16
}

/// Rounds a number to bf16, to nearest even.
pub(crate) fn to_bf16(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// The number that bf16 bits stand for.
pub(crate) fn from_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
