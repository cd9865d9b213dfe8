//! Arrays, for every CPU: the compiler turns their loops into the vectors of the architecture's baseline (SSE2, NEON).

use super::LANES;
use std::array::from_fn;
use std::ops::{Add, BitAnd, BitOr, BitXor, Div, Mul, Sub};

/// Vectors of sums that fit into the registers alongside the operands of a loop.
pub(crate) const SUMS: usize = if cfg!(target_arch = "aarch64") { 6 } else { 2 };

/// 16 numbers in float32.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct F32([f32; LANES]);

/// 16 integers of 32 bits, or 64 bytes.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct I32([i32; LANES]);

/// 16 words of 16 bits: bf16 or float16 as they are in memory.
#[derive(Clone, Copy)]
#[repr(align(32))]
pub(crate) struct U16([u16; LANES]);

/// A choice of lanes: -1 or 0.
#[derive(Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Mask([i32; LANES]);

macro_rules! operators {
    ($($type:ident: $($operator:ident $method:ident $function:expr),*;)*) => {$($(
        impl $operator for $type {
            type Output = $type;
            #[inline(always)]
            fn $method(self, other: $type) -> $type {
                $type(from_fn(|lane| $function(self.0[lane], other.0[lane])))
            }
        }
    )*)*};
}
operators! {
    F32: Add add f32::add, Sub sub f32::sub, Mul mul f32::mul, Div div f32::div;
    I32: Add add i32::wrapping_add, Sub sub i32::wrapping_sub, Mul mul i32::wrapping_mul,
        BitAnd bitand i32::bitand, BitOr bitor i32::bitor, BitXor bitxor i32::bitxor;
    Mask: BitAnd bitand i32::bitand;
}

impl Mask {
    #[inline(always)]
    fn of(is_set: impl Fn(usize) -> bool) -> Mask {
        Mask(from_fn(|lane| -i32::from(is_set(lane))))
    }

    /// The first `count` lanes; all from 16 on.
    #[inline(always)]
    pub(crate) fn first(count: usize) -> Mask {
        let count = count.min(LANES) as i32;
        Mask::of(|lane| (lane as i32) < count)
    }

    /// One bit per lane, the lowest first.
    #[inline(always)]
    pub(crate) fn from_bits(bits: u16) -> Mask {
        Mask::of(|lane| bits & 1 << lane != 0)
    }

    #[inline(always)]
    pub(crate) fn bits(self) -> u16 {
        (0..LANES).fold(0, |bits, lane| bits | (self.0[lane] as u16 & 1) << lane)
    }
}

/// Added to a number below 2^22 and subtracted, it rounds to an integer.
const ROUNDING: f32 = 12_582_912.0;

impl F32 {
    #[inline(always)]
    pub(crate) fn splat(value: f32) -> F32 {
        F32([value; LANES])
    }

    /// # Safety
    /// 16 floats must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(address: *const f32) -> F32 {
        // SAFETY: guaranteed by the caller.
        F32(unsafe { address.cast::<[f32; LANES]>().read_unaligned() })
    }

    /// The first `count` floats, and zeros.
    ///
    /// # Safety
    /// At least `count` floats, or 16, must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_first(address: *const f32, count: usize) -> F32 {
        // SAFETY: guaranteed by the caller.
        F32(unsafe { load_first(address, count) })
    }

    /// # Safety
    /// 16 floats must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store(self, address: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { address.cast::<[f32; LANES]>().write_unaligned(self.0) };
    }

    /// Stores the first `count` lanes.
    ///
    /// # Safety
    /// At least `count` floats, or 16, must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_first(self, address: *mut f32, count: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { store_first(&self.0, address, count) };
    }

    #[inline(always)]
    fn map<T>(self, function: impl Fn(f32) -> T) -> [T; LANES] {
        from_fn(|lane| function(self.0[lane]))
    }

    /// self · factor + addend, rounded once where the CPU can.
    #[inline(always)]
    pub(crate) fn mul_add(self, factor: F32, addend: F32) -> F32 {
        if cfg!(any(target_feature = "fma", target_arch = "aarch64")) {
            F32(from_fn(|lane| self.0[lane].mul_add(factor.0[lane], addend.0[lane])))
        } else {
            // Without the instruction, `f32::mul_add` is a call for each lane.
            self * factor + addend
        }
    }

    /// The greater; `other` if one is NaN.
    #[inline(always)]
    pub(crate) fn max(self, other: F32) -> F32 {
        F32(from_fn(|lane| if self.0[lane] > other.0[lane] { self.0[lane] } else { other.0[lane] }))
    }

    /// The lesser; `other` if one is NaN.
    #[inline(always)]
    pub(crate) fn min(self, other: F32) -> F32 {
        F32(from_fn(|lane| if self.0[lane] < other.0[lane] { self.0[lane] } else { other.0[lane] }))
    }

    /// Rounds to the nearest integer, ties to even; beyond ± 2^22, to an integer nearby.
    #[inline(always)]
    pub(crate) fn round(self) -> F32 {
        F32(self.map(|x| x + ROUNDING - ROUNDING))
    }

    /// self · 2^power, for integers from -160 on; NaN if one of the two is NaN.
    #[inline(always)]
    pub(crate) fn scale_by_power(self, power: F32) -> F32 {
        super::math::scale_by_power(self, power.min(F32::splat(256.0)).to_i32())
    }

    #[inline(always)]
    pub(crate) fn greater(self, other: F32) -> Mask {
        Mask::of(|lane| self.0[lane] > other.0[lane])
    }

    #[inline(always)]
    pub(crate) fn equal(self, other: F32) -> Mask {
        Mask::of(|lane| self.0[lane] == other.0[lane])
    }

    /// Lanes of `self` where the mask is set, and of `other`.
    #[inline(always)]
    pub(crate) fn select(self, mask: Mask, other: F32) -> F32 {
        F32::from_bits(self.to_bits().select(mask, other.to_bits()))
    }

    #[inline(always)]
    pub(crate) fn reduce_max(self) -> f32 {
        reduce(self.0, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    pub(crate) fn reduce_sum(self) -> f32 {
        reduce(self.0, f32::add)
    }

    #[inline(always)]
    pub(crate) fn to_array(self) -> [f32; LANES] {
        self.0
    }

    /// The bits of each number.
    #[inline(always)]
    pub(crate) fn to_bits(self) -> I32 {
        I32(self.map(|x| x.to_bits() as i32))
    }

    #[inline(always)]
    pub(crate) fn from_bits(bits: I32) -> F32 {
        F32(bits.map(|bits| f32::from_bits(bits as u32)))
    }

    /// Rounds to the nearest integers, ties to even, for numbers up to ± 2^22.
    #[inline(always)]
    pub(crate) fn to_i32(self) -> I32 {
        I32(self.map(|x| ((x + ROUNDING).to_bits() as i32).wrapping_sub(ROUNDING.to_bits() as i32)))
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
        F32(from_fn(|lane| super::math::from_f16(words.0[lane])))
    }

    /// Rounded to float16, to nearest even.
    #[inline(always)]
    pub(crate) fn to_f16(self) -> U16 {
        U16(self.map(super::math::to_f16))
    }
}

impl I32 {
    #[inline(always)]
    pub(crate) fn splat(value: i32) -> I32 {
        I32([value; LANES])
    }

    /// The number of each lane: 0 to 15.
    #[inline(always)]
    pub(crate) fn lane_numbers() -> I32 {
        I32(from_fn(|lane| lane as i32))
    }

    /// # Safety
    /// 64 bytes must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(address: *const i32) -> I32 {
        // SAFETY: guaranteed by the caller.
        I32(unsafe { address.cast::<[i32; LANES]>().read_unaligned() })
    }

    /// # Safety
    /// 64 bytes must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store(self, address: *mut i32) {
        // SAFETY: guaranteed by the caller.
        unsafe { address.cast::<[i32; LANES]>().write_unaligned(self.0) };
    }

    #[inline(always)]
    pub(crate) fn to_array(self) -> [i32; LANES] {
        self.0
    }

    #[inline(always)]
    fn map<T>(self, function: impl Fn(i32) -> T) -> [T; LANES] {
        from_fn(|lane| function(self.0[lane]))
    }

    #[inline(always)]
    pub(crate) fn max(self, other: I32) -> I32 {
        I32(from_fn(|lane| self.0[lane].max(other.0[lane])))
    }

    #[inline(always)]
    pub(crate) fn min(self, other: I32) -> I32 {
        I32(from_fn(|lane| self.0[lane].min(other.0[lane])))
    }

    #[inline(always)]
    pub(crate) fn shift_left(self, bits: i32) -> I32 {
        I32(self.map(|x| x << bits))
    }

    /// Shifts zeros in.
    #[inline(always)]
    pub(crate) fn shift_right(self, bits: i32) -> I32 {
        I32(self.map(|x| (x as u32 >> bits) as i32))
    }

    /// Halves, towards -∞.
    #[inline(always)]
    pub(super) fn halve(self) -> I32 {
        I32(self.map(|x| x >> 1))
    }

    #[inline(always)]
    pub(crate) fn equal(self, other: I32) -> Mask {
        Mask::of(|lane| self.0[lane] == other.0[lane])
    }

    /// Lanes of `self` where the mask is set, and of `other`.
    #[inline(always)]
    pub(crate) fn select(self, mask: Mask, other: I32) -> I32 {
        I32(from_fn(|lane| self.0[lane] & mask.0[lane] | other.0[lane] & !mask.0[lane]))
    }

    #[inline(always)]
    pub(crate) fn to_f32(self) -> F32 {
        F32(self.map(|x| x as f32))
    }

    /// The greatest lane.
    #[inline(always)]
    pub(crate) fn reduce_max(self) -> i32 {
        self.0.into_iter().fold(i32::MIN, i32::max)
    }

    #[inline(always)]
    pub(crate) fn reduce_sum(self) -> i32 {
        self.0.into_iter().sum()
    }

    /// 16 signed bytes, widened.
    ///
    /// # Safety
    /// They must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_bytes(address: *const i8) -> I32 {
        // SAFETY: guaranteed by the caller.
        I32(unsafe { address.cast::<[i8; LANES]>().read() }.map(i32::from))
    }

    /// Stores the lowest byte of each lane.
    ///
    /// # Safety
    /// 16 bytes must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_bytes(self, address: *mut u8) {
        // SAFETY: guaranteed by the caller.
        unsafe { address.cast::<[u8; LANES]>().write(self.map(|lane| lane as u8)) };
    }

    /// 64 bytes: 0xff where a bit is set, the lowest bit first, else 0.
    #[inline(always)]
    pub(crate) fn bytes_where(bits: u64) -> I32 {
        // Four bits of a lane, each moved to the lowest bit of its byte.
        let spread = |four: u32| (four & 1 | (four & 2) << 7 | (four & 4) << 14 | (four & 8) << 21) * 0xff;
        I32(from_fn(|lane| spread((bits >> (4 * lane)) as u32 & 15) as i32))
    }

    /// The byte of the table at the lowest 4 bits of each byte, or 0 if its highest bit is set.
    #[inline(always)]
    pub(crate) fn look_up(self, table: &[u8; 16]) -> I32 {
        self.map_bytes(|byte| if byte < 0x80 { table[usize::from(byte & 15)] } else { 0 })
    }

    #[inline(always)]
    fn map_bytes(self, function: impl Fn(u8) -> u8) -> I32 {
        I32(self.map(|lane| i32::from_le_bytes(lane.to_le_bytes().map(&function))))
    }

    /// The sum of each byte, unsigned, and `other`, at most 255.
    #[inline(always)]
    pub(crate) fn add_bytes_saturating(self, other: u8) -> I32 {
        self.map_bytes(|byte| byte.saturating_add(other))
    }

    /// The difference of each byte, unsigned, and `other`, at least 0.
    #[inline(always)]
    pub(crate) fn subtract_bytes_saturating(self, other: u8) -> I32 {
        self.map_bytes(|byte| byte.saturating_sub(other))
    }

    /// 64 bytes in an order of this instruction set, which `zip_bytes` undoes.
    ///
    /// # Safety
    /// They must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_to_zip(address: *const u8) -> I32 {
        // SAFETY: guaranteed by the caller.
        unsafe { I32::load(address.cast()) }
    }

    /// 64 words in the order of memory, of the lower and the upper bytes that were made of `load_to_zip`.
    #[inline(always)]
    pub(crate) fn zip_bytes(low: I32, high: I32) -> [I32; 2] {
        from_fn(|half| {
            I32(from_fn(|lane| {
                let (quad, pair) = (half * LANES / 2 + lane / 2, lane % 2 * 2);
                let (low, high) = (low.0[quad].to_le_bytes(), high.0[quad].to_le_bytes());
                i32::from_le_bytes([low[pair], high[pair], low[pair + 1], high[pair + 1]])
            }))
        })
    }

    /// self + the sum of the products of 4 unsigned bytes of `codes` with 4 signed bytes of `inputs`, per lane; exact.
    #[inline(always)]
    pub(crate) fn dot_bytes(self, codes: I32, inputs: I32) -> I32 {
        I32(from_fn(|lane| {
            let (codes, inputs) = (codes.0[lane].to_le_bytes(), inputs.0[lane].to_le_bytes());
            (0..4).fold(self.0[lane], |sum, byte| sum + i32::from(codes[byte]) * i32::from(inputs[byte] as i8))
        }))
    }

    /// self + the products of vectors of 4 codes per lane with as many groups of 4 signed bytes of `inputs`, one for all lanes; exact.
    /// Codes are unsigned bytes of at most `_greatest`, a constant.
    ///
    /// # Safety
    /// 4 bytes must be readable for each vector.
    #[inline(always)]
    pub(crate) unsafe fn dot_codes(self, codes: &[I32], inputs: *const i32, _greatest: i32) -> I32 {
        let mut sum = self;
        for (index, &codes) in codes.iter().enumerate() {
            // SAFETY: guaranteed by the caller.
            sum = sum.dot_bytes(codes, I32::splat(unsafe { inputs.add(index).read_unaligned() }));
        }
        sum
    }

    /// The lower half of each lane.
    #[inline(always)]
    pub(crate) fn narrow(self) -> U16 {
        U16(self.map(|x| x as u16))
    }
}

impl I32 {
    /// Swaps the second and the third of the four words of each pair of lanes.
    #[inline(always)]
    pub(crate) fn swap_inner_words(self) -> I32 {
        I32(from_fn(|lane| {
            let (first, second) = (self.0[lane & !1] as u32, self.0[lane | 1] as u32);
            let (low, high) =
                if lane % 2 == 0 { (first & 0xffff, second << 16) } else { (first >> 16, second & !0xffff) };
            (low | high) as i32
        }))
    }

    /// Pair of lanes i of row j becomes pair j of row i.
    #[inline(always)]
    pub(crate) fn transpose_pairs(rows: [I32; LANES / 2]) -> [I32; LANES / 2] {
        from_fn(|column| I32(from_fn(|lane| rows[lane / 2].0[column * 2 + lane % 2])))
    }

    /// Lane i of row j becomes lane j of row i.
    #[inline(always)]
    pub(crate) fn transpose(rows: [I32; LANES]) -> [I32; LANES] {
        from_fn(|column| I32(from_fn(|row| rows[row].0[column])))
    }
}

impl U16 {
    /// # Safety
    /// 16 words must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load(address: *const u16) -> U16 {
        // SAFETY: guaranteed by the caller.
        U16(unsafe { address.cast::<[u16; LANES]>().read_unaligned() })
    }

    /// The first `count` words, and zeros.
    ///
    /// # Safety
    /// At least `count` words, or 16, must be readable.
    #[inline(always)]
    pub(crate) unsafe fn load_first(address: *const u16, count: usize) -> U16 {
        // SAFETY: guaranteed by the caller.
        U16(unsafe { load_first(address, count) })
    }

    /// # Safety
    /// 16 words must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store(self, address: *mut u16) {
        // SAFETY: guaranteed by the caller.
        unsafe { address.cast::<[u16; LANES]>().write_unaligned(self.0) };
    }

    /// Stores the first `count` lanes.
    ///
    /// # Safety
    /// At least `count` words, or 16, must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_first(self, address: *mut u16, count: usize) {
        // SAFETY: guaranteed by the caller.
        unsafe { store_first(&self.0, address, count) };
    }

    /// Stores the words at every second place, and leaves the words between them unchanged.
    ///
    /// # Safety
    /// The 16 places must be writable.
    #[inline(always)]
    pub(crate) unsafe fn store_apart(self, address: *mut u16) {
        for (index, word) in self.0.into_iter().enumerate() {
            // SAFETY: guaranteed by the caller.
            unsafe { address.add(2 * index).write(word) };
        }
    }

    /// Each word, followed by zeros, as 32 bits.
    #[inline(always)]
    pub(crate) fn widen(self) -> I32 {
        I32(from_fn(|lane| i32::from(self.0[lane])))
    }
}

/// Combines lane i with lane i + 8, then i + 4, 2 and 1.
#[inline(always)]
fn reduce(lanes: [f32; LANES], combine: impl Fn(f32, f32) -> f32) -> f32 {
    let eight: [f32; 8] = from_fn(|lane| combine(lanes[lane], lanes[lane + 8]));
    let four: [f32; 4] = from_fn(|lane| combine(eight[lane], eight[lane + 4]));
    combine(combine(four[0], four[2]), combine(four[1], four[3]))
}

#[inline(always)]
unsafe fn load_first<T: Copy + Default>(address: *const T, count: usize) -> [T; LANES] {
    // SAFETY: the caller vouches for `count` elements, or 16.
    unsafe {
        if count >= LANES {
            return address.cast::<[T; LANES]>().read_unaligned();
        }
        let mut lanes = [T::default(); LANES];
        address.copy_to_nonoverlapping(lanes.as_mut_ptr(), count);
        lanes
    }
}

#[inline(always)]
unsafe fn store_first<T: Copy>(lanes: &[T; LANES], address: *mut T, count: usize) {
    // SAFETY: the caller vouches for `count` elements, or 16.
    unsafe {
        if count >= LANES {
            return address.cast::<[T; LANES]>().write_unaligned(*lanes);
        }
        address.copy_from_nonoverlapping(lanes.as_ptr(), count);
    }
}
