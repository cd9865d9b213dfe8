//! 8-bit floats in memory.

use super::{F32, Float8, I32};

/// The magnitude that stands for NaN. E5M2 has more, and infinities, which are not stored.
const NAN: i32 = 0x7f;

impl Float8 {
    /// 16 numbers that were stored.
    ///
    /// # Safety
    /// 16 bytes must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(self, address: *const u8) -> F32 {
        // SAFETY: guaranteed by the caller.
        let bits = unsafe { I32::load_bytes(address.cast()) };
        let numbers = F32::from_float8::<0>(bits, self) * F32::splat(1.0 / self.shrinkage());
        F32::splat(f32::NAN).select((bits & I32::splat(NAN)).equal(I32::splat(NAN)), numbers)
    }

    /// Stores 16 numbers, rounded to nearest even. Those beyond the range become the largest; NaN stays NaN.
    ///
    /// # Safety
    /// 16 bytes must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store(self, values: F32, address: *mut u8) {
        // The largest and the smallest normal number, bits that are cut off, and the power of two whose last bit is the smallest number.
        let (largest, normal, cut, power) = match self {
            Float8::E4m3fn => (448.0, 1.0 / 64.0, 20, 16384.0f32),
            Float8::E5m2 => (57344.0, 1.0 / 16384.0, 21, 128.0f32),
        };
        let sign = values.to_bits().shift_right(24) & I32::splat(0x80);
        // `min` keeps NaN.
        let magnitude = F32::splat(largest).min(F32::from_bits(values.to_bits() & I32::splat(i32::MAX)));
        let bits = magnitude.to_bits();
        // A normal number: the exponent gets another bias, and what does not fit is rounded.
        let is_odd = bits.shift_right(cut) & I32::splat(1);
        let bias = (1 << 23) - f32::to_bits(normal) as i32;
        let rounded = (bits + I32::splat(bias + (1 << (cut - 1)) - 1) + is_odd).shift_right(cut);
        // A subnormal one: the sum rounds it to a multiple of the smallest number.
        let subnormal = (magnitude + F32::splat(power)).to_bits() - I32::splat(power.to_bits() as i32);
        let number = rounded.select(magnitude.greater(F32::splat(normal)), subnormal);
        let number = number.select(values.equal(values), I32::splat(NAN)) | sign;
        // SAFETY: guaranteed by the caller.
        unsafe { number.store_bytes(address) };
    }
}
