//! The register tile: up to 6 rows by one panel of 32 columns, with the sums over all input features in registers.

use super::UNIT;
use super::activation::Layout;
use super::pack::{Number, Numbers, PANEL, Panel, SUPER_GROUP};
use crate::linear::epilogue::{self, Outcome};
use crate::simd::{F32, LANES, with_constant};
use std::arch::x86_64::*;

/// Vectors per row of a panel.
const VECTORS: usize = PANEL / LANES;
type Sums<const R: usize> = epilogue::Sums<R, VECTORS>;

/// Quantized rows, one after the other.
#[derive(Clone, Copy)]
pub(super) struct Input {
    pub(super) address: *const u8,
    pub(super) layout: Layout,
}

/// Computes a tile of `height` (1 to 6) rows.
///
/// # Safety
/// `height` rows must be readable at `input`, `outcome` writable for them, and the panel made for as many units.
pub(super) unsafe fn apply(height: usize, input: Input, panel: Panel, outcome: Outcome) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_constant!(height, [1, 2, 3, 4, 5; 6], plain(input, panel, outcome)) }
}

/// Like `apply`, for a gate panel and the panel that it gates.
///
/// # Safety
/// As for `apply`.
pub(super) unsafe fn apply_gated(height: usize, input: Input, panels: [Panel; 2], outcome: Outcome) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_constant!(height, [1, 2, 3, 4, 5; 6], gated(input, panels, outcome)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")]
unsafe fn plain<const R: usize>(input: Input, panel: Panel, outcome: Outcome) {
    // SAFETY: the caller of `apply` vouches for all addresses.
    unsafe { epilogue::store(&product::<R>(input, &panel), outcome) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")]
unsafe fn gated<const R: usize>(input: Input, panels: [Panel; 2], outcome: Outcome) {
    // SAFETY: the caller of `apply_gated` vouches for all addresses.
    unsafe {
        let (gates, ups) = (product::<R>(input, &panels[0]), product::<R>(input, &panels[1]));
        epilogue::store_gated(&gates, &ups, outcome);
    }
}

/// The sums of R rows with one panel, bias included.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")]
unsafe fn product<const R: usize>(input: Input, panel: &Panel) -> Sums<R> {
    let splits_units = panel.format.group < UNIT;
    // SAFETY: the caller of `apply` vouches for all addresses.
    unsafe {
        let mut sums = match (panel.format.bits, splits_units) {
            (2, false) => accumulate::<R, 2, 1>(input, panel),
            (2, true) => accumulate::<R, 2, 2>(input, panel),
            (3, false) => accumulate::<R, 3, 1>(input, panel),
            (3, true) => accumulate::<R, 3, 2>(input, panel),
            (4, false) => accumulate::<R, 4, 1>(input, panel),
            (4, true) => accumulate::<R, 4, 2>(input, panel),
            (5, false) => accumulate::<R, 5, 1>(input, panel),
            (5, true) => accumulate::<R, 5, 2>(input, panel),
            (6, false) => accumulate::<R, 6, 1>(input, panel),
            (6, true) => accumulate::<R, 6, 2>(input, panel),
            (_, false) => accumulate::<R, 8, 1>(input, panel),
            (_, true) => accumulate::<R, 8, 2>(input, panel),
        };
        epilogue::add_bias(&mut sums, panel.bias);
        sums
    }
}

/// `SPLIT`: integer products per unit, 2 if a group is half a unit.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")]
unsafe fn accumulate<const R: usize, const BITS: usize, const SPLIT: usize>(input: Input, panel: &Panel) -> Sums<R> {
    let format = panel.format;
    let layout = input.layout;
    let unit_bytes = BITS * PANEL * UNIT / 8;
    let groups_per_unit = SPLIT;
    let units_per_group = (format.group / UNIT).max(1);
    let row = |row: usize| input.address.wrapping_add(row * layout.row_bytes());
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; R];
    let mut scales = [_mm512_setzero_ps(); VECTORS];
    let mut mins = [_mm512_setzero_ps(); VECTORS];
    for unit in 0..layout.num_units {
        let base = panel.codes.wrapping_add(unit * unit_bytes);
        for split in 0..SPLIT {
            // SAFETY: the caller of `apply` vouches for R rows and a panel of as many units; panels are 64-byte aligned.
            unsafe {
                if unit % units_per_group == 0 {
                    let group = unit / units_per_group * groups_per_unit + split;
                    let super_group = unit / (SUPER_GROUP / UNIT);
                    scales = numbers(panel.scales, format.number, group, super_group);
                    if format.has_mins {
                        mins = numbers(panel.mins, format.number, group, super_group);
                    }
                }
                // The inputs' sums of the part of the unit that this group covers.
                let mut totals = [0; R];
                for index in 0..R {
                    let halves = row(index).add(layout.sums() + unit * 8).cast::<i32>();
                    totals[index] = if SPLIT == 2 {
                        halves.add(split).read_unaligned()
                    } else {
                        halves.read_unaligned() + halves.add(1).read_unaligned()
                    };
                }
                let mut products = [[_mm512_setzero_si512(); VECTORS]; R];
                if layout.num_planes == 2 {
                    add_products::<R, BITS, SPLIT>(&mut products, base, row, unit * UNIT, split);
                    for index in 0..R {
                        for vector in 0..VECTORS {
                            products[index][vector] = _mm512_slli_epi32::<8>(products[index][vector]);
                        }
                    }
                }
                if !format.has_mins {
                    for index in 0..R {
                        let shift = _mm512_set1_epi32(-format.offset * totals[index]);
                        for vector in 0..VECTORS {
                            products[index][vector] = _mm512_add_epi32(products[index][vector], shift);
                        }
                    }
                }
                let low = layout.plane(layout.num_planes - 1);
                add_products::<R, BITS, SPLIT>(&mut products, base, row, low + unit * UNIT, split);
                for index in 0..R {
                    let scale = row(index).add(layout.scales() + unit * 4).cast::<f32>().read_unaligned();
                    let input_scale = _mm512_set1_ps(scale);
                    let total = _mm512_set1_ps(scale * totals[index] as f32);
                    for vector in 0..VECTORS {
                        let product = _mm512_cvtepi32_ps(products[index][vector]);
                        let both = _mm512_mul_ps(scales[vector], input_scale);
                        sums[index][vector] = _mm512_fmadd_ps(product, both, sums[index][vector]);
                        if format.has_mins {
                            sums[index][vector] = _mm512_fmadd_ps(mins[vector], total, sums[index][vector]);
                        }
                    }
                }
            }
        }
    }
    // SAFETY: the same 512 bits.
    sums.map(|row| row.map(|sum| unsafe { std::mem::transmute::<__m512, F32>(sum) }))
}

/// Adds the products of a unit, or of one half of it, with a plane of the inputs that starts `offset` bytes into each row.
///
/// # Safety
/// As for `apply`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")]
unsafe fn add_products<const R: usize, const BITS: usize, const SPLIT: usize>(
    products: &mut [[__m512i; VECTORS]; R],
    base: *const u8,
    row: impl Fn(usize) -> *const u8,
    offset: usize,
    split: usize,
) {
    for quad in 0..4 {
        for half in if SPLIT == 2 { split..split + 1 } else { 0..2 } {
            // SAFETY: the caller vouches for the unit and the rows.
            unsafe {
                let mut weights = [_mm512_setzero_si512(); VECTORS];
                for vector in 0..VECTORS {
                    weights[vector] = codes::<BITS>(base, half, quad, vector);
                }
                for index in 0..R {
                    let features = row(index).add(offset + half * 16 + quad * 4).cast::<i32>();
                    let features = _mm512_set1_epi32(features.read_unaligned());
                    for vector in 0..VECTORS {
                        products[index][vector] =
                            _mm512_dpbusd_epi32(products[index][vector], weights[vector], features);
                    }
                }
            }
        }
    }
}

/// 4 features of 16 columns, as unsigned bytes.
///
/// # Safety
/// `base` must be a unit of a panel of this many bits.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")]
unsafe fn codes<const BITS: usize>(base: *const u8, half: usize, quad: usize, vector: usize) -> __m512i {
    let line = |index: usize| base.wrapping_add(index * 64);
    // SAFETY: the caller vouches for the unit, which is 64-byte aligned but for the planes of single bits, whose words are read alone.
    unsafe {
        let mut codes = _mm512_setzero_si512();
        if BITS == 8 {
            return _mm512_load_si512(line((half * 4 + quad) * 2 + vector).cast());
        }
        if BITS & 4 != 0 {
            let both = _mm512_load_si512(line(quad * 2 + vector).cast());
            let nibbles = if half == 0 { both } else { _mm512_srli_epi16::<4>(both) };
            codes = _mm512_and_si512(nibbles, _mm512_set1_epi8(0xf));
        }
        let lines_before = if BITS & 4 != 0 { 8 } else { 0 };
        if BITS & 2 != 0 {
            let pairs = _mm512_load_si512(line(lines_before + half * 2 + vector).cast());
            let pairs = _mm512_srl_epi16(pairs, _mm_cvtsi32_si128(quad as i32 * 2));
            let pairs = _mm512_and_si512(pairs, _mm512_set1_epi8(3));
            codes = if BITS & 4 != 0 { _mm512_or_si512(codes, _mm512_slli_epi16::<4>(pairs)) } else { pairs };
        }
        if BITS & 1 != 0 {
            let lines_before = lines_before + if BITS & 2 != 0 { 4 } else { 0 };
            let mask = line(lines_before).cast::<u64>().add((half * 4 + quad) * 2 + vector).read();
            let bit = _mm512_set1_epi8(if BITS & 4 != 0 { 16 } else { 4 });
            codes = _mm512_or_si512(codes, _mm512_maskz_mov_epi8(mask, bit));
        }
        codes
    }
}

/// The scales or mins of a group of a panel.
///
/// # Safety
/// The panel must have the group.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx512vnni")]
unsafe fn numbers(of: Numbers, kind: Number, group: usize, super_group: usize) -> [__m512; VECTORS] {
    let mut numbers = [_mm512_setzero_ps(); VECTORS];
    for vector in 0..VECTORS {
        let index = group * PANEL + vector * LANES;
        // SAFETY: the caller vouches for the group.
        numbers[vector] = unsafe {
            match kind {
                Number::F16 => _mm512_cvtph_ps(_mm256_loadu_si256(of.numbers.cast::<u16>().add(index).cast())),
                Number::F32 => _mm512_loadu_ps(of.numbers.cast::<f32>().add(index)),
                Number::I8 => {
                    let factors = of.factors.add(super_group * PANEL + vector * LANES);
                    let levels = _mm512_cvtepi8_epi32(_mm_loadu_si128(of.numbers.add(index).cast()));
                    _mm512_mul_ps(_mm512_cvtepi32_ps(levels), _mm512_cvtph_ps(_mm256_loadu_si256(factors.cast())))
                }
            }
        };
    }
    numbers
}
