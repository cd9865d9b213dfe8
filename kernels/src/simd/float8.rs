//! 8-bit floats in memory.

use super::{F32, Float8, I32};

/// The magnitude that stands for NaN. E5M2 has more, and infinities, which are not stored.
const NAN: i32 = 0x7f;

/// The number 1 in each byte.
const BYTES: i32 = 0x0101_0101;

/// What makes magnitudes bf16, byte by byte: a table of the first 16; the others keep the bits of their fraction and the lowest bit of
/// their exponent, and a table has the upper byte for the exponent's higher bits.
struct Tables {
    first_upper: [u8; 16],
    /// Differs by these bits from the lower byte of the others.
    first_lower: [u8; 16],
    upper: [u8; 16],
}

impl Tables {
    const fn of(format: Float8) -> Tables {
        let mut tables = Tables { first_upper: [0; 16], first_lower: [0; 16], upper: [0; 16] };
        let kept_bits = format.fraction_bits() + 1;
        let mut index = 0;
        while index < 16 {
            let [.., lower, upper] = format.number(index).to_bits().to_le_bytes();
            tables.first_upper[index as usize] = upper;
            tables.first_lower[index as usize] = lower ^ (index << (8 - kept_bits)) as u8;
            let code = index << kept_bits;
            if code >= 16 && code < NAN {
                tables.upper[index as usize] = format.number(code).to_bits().to_le_bytes()[3];
            }
            index += 1;
        }
        tables
    }
}

impl Float8 {
    /// The number of a magnitude other than NaN.
    const fn number(self, code: i32) -> f32 {
        let bits = self.fraction_bits();
        let (exponent, fraction) = (code >> bits, code & ((1 << bits) - 1));
        let (significand, exponent) = if exponent == 0 { (fraction, 1) } else { (fraction + (1 << bits), exponent) };
        significand as f32 * f32::from_bits((self.offset() + ((exponent - bits) << 23)) as u32) / self.shrinkage()
    }

    /// 64 numbers that were stored, as bf16, in the order of memory. PERF: looks bytes up, 64 at a time, in a quarter of the
    /// instructions of `load`.
    ///
    /// # Safety
    /// 64 bytes must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_as_bf16(self, address: *const u8) -> [I32; 2] {
        let tables = match self {
            Float8::E4m3fn => const { &Tables::of(Float8::E4m3fn) },
            Float8::E5m2 => const { &Tables::of(Float8::E5m2) },
        };
        let kept_bits = self.fraction_bits() + 1;
        // SAFETY: guaranteed by the caller.
        let codes = unsafe { I32::load_to_zip(address) };
        let magnitudes = codes & I32::splat(NAN * BYTES);
        // From the 16th magnitude on, the highest bit is set, and the tables of the first 16 yield 0.
        let first = magnitudes.add_bytes_saturating(0x70);
        let exponents = magnitudes.shift_right(kept_bits) & I32::splat(0xf * BYTES);
        let is_nan = magnitudes.subtract_bytes_saturating(NAN as u8 - 1);
        let nan = is_nan.look_up(&[0, NAN as u8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        let sign = codes & I32::splat(i32::MIN | 0x0080_8080);
        let upper = (exponents.look_up(&tables.upper) | first.look_up(&tables.first_upper)) | (nan | sign);
        let kept = I32::splat(BYTES.wrapping_mul(0x100 - (1 << (8 - kept_bits))));
        let lower = (codes.shift_left(8 - kept_bits) & kept) ^ first.look_up(&tables.first_lower);
        I32::zip_bytes(lower, upper)
    }

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
