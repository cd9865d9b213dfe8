//! The register tile: up to 8 rows by one panel of 48 columns, with the sums over all input features in registers.

use super::epilogue::{self, Outcome};
use crate::element::Element;
use crate::simd::{self, LANES, with_constant};
use std::arch::x86_64::*;

/// Output columns per panel.
pub(crate) const PANEL: usize = 48;
/// Vectors per panel row.
pub(super) const VECTORS: usize = PANEL / LANES;
/// bf16 elements of a panel per input pair.
pub(super) const PAIR: usize = PANEL * 2;

/// Prefetch distance in bytes while a single tile streams a panel. PERF: 8 and 16 rows of 3072 × 576 took 90 and 140 µs with this
/// distance into the second-level cache, 102 to 106 and 161 to 164 µs with 2 to 16 KiB into the first (Zen 4, 2 threads).
const STREAM_AHEAD_BYTES: usize = 8192;
const LINE: usize = 64;

/// The prefetches during a tile.
#[derive(Clone, Copy)]
pub(crate) enum Ahead {
    Nothing,
    /// Prefetch the stream of panels a fixed distance ahead: three lines per pair.
    Stream,
    /// Prefetch a share of the panel that comes `panels` later: one line per pair, from this line on.
    Share {
        tile: usize,
        lines_per_pair: usize,
        panels: usize,
    },
}

impl Ahead {
    /// The prefetches of tile `tile` of `num_tiles` on the same panel. The first three tiles share the next panel's lines.
    pub(crate) fn plan(tile: usize, num_tiles: usize, panels: usize) -> Ahead {
        match num_tiles {
            1 => Ahead::Stream,
            2 => Ahead::Share { tile, lines_per_pair: 2, panels },
            _ if tile < VECTORS => Ahead::Share { tile, lines_per_pair: 1, panels },
            _ => Ahead::Nothing,
        }
    }
}

/// The addresses of one panel.
#[derive(Clone, Copy)]
pub(crate) struct Panel {
    pub(crate) weights: *const Element,
    pub(crate) bias: *const f32,
    pub(crate) ahead: Ahead,
    pub(crate) bytes: usize,
}

impl Panel {
    /// Where a tile's prefetches begin, and their number of lines per pair.
    pub(super) fn prefetches(&self) -> (*const i8, usize) {
        let start = self.weights.cast::<i8>();
        match self.ahead {
            Ahead::Nothing => (start, 0),
            Ahead::Stream => (start.wrapping_add(STREAM_AHEAD_BYTES), VECTORS),
            Ahead::Share { tile, lines_per_pair, panels } => {
                let share = self.bytes / VECTORS * lines_per_pair;
                (start.wrapping_add(self.bytes * panels + tile * share), lines_per_pair)
            }
        }
    }
}

/// The input's shape.
#[derive(Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) stride: usize,
    pub(crate) in_features: usize,
}

type Sums<const R: usize> = epilogue::Sums<R, VECTORS>;

/// Computes a tile of `height` (1 to 8) rows.
///
/// # Safety
/// `height` rows of `shape` must be readable at `input`, `outcome` writable for them, and the panel made for `shape.in_features`.
pub(crate) unsafe fn apply(height: usize, input: *const Element, shape: Shape, panel: Panel, outcome: Outcome) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_constant!(height, [1, 2, 3, 4, 5, 6, 7; 8], plain(input, shape, panel, outcome)) }
}

/// Like `apply`, for a gate panel and the panel that it gates.
///
/// # Safety
/// As for `apply`.
pub(crate) unsafe fn apply_gated(
    height: usize,
    input: *const Element,
    shape: Shape,
    panels: [Panel; 2],
    outcome: Outcome,
) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_constant!(height, [1, 2, 3, 4, 5, 6, 7; 8], gated(input, shape, panels, outcome)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn plain<const R: usize>(input: *const Element, shape: Shape, panel: Panel, outcome: Outcome) {
    // SAFETY: the caller of `apply` vouches for all addresses.
    unsafe {
        epilogue::store(&product::<R>(input, shape, panel), outcome);
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn gated<const R: usize>(input: *const Element, shape: Shape, panels: [Panel; 2], outcome: Outcome) {
    // SAFETY: the caller of `apply_gated` vouches for all addresses.
    unsafe {
        let gates = product::<R>(input, shape, panels[0]);
        let ups = product::<R>(input, shape, panels[1]);
        epilogue::store_gated(&gates, &ups, outcome);
    }
}

/// The sums of R rows with one panel, bias included.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn product<const R: usize>(input: *const Element, shape: Shape, panel: Panel) -> Sums<R> {
    let pairs = shape.in_features / 2;
    let (ahead, lines) = panel.prefetches();
    // SAFETY: the caller of `apply` vouches for all addresses; prefetching touches nothing.
    let mut sums = unsafe { with_constant!(lines, [0, 1, 2; 3], accumulate::<R>(input, shape, panel.weights, ahead)) };
    if shape.in_features % 2 == 1 {
        // SAFETY: as above; the second half of the pair does not exist in the input and is replaced by zero.
        unsafe {
            for row in 0..R {
                let last = input.add(row * shape.stride + pairs * 2).read();
                for vector in 0..VECTORS {
                    let weights = _mm512_load_si512(panel.weights.add(pairs * PAIR + vector * LANES * 2).cast());
                    sums[row][vector] =
                        simd::dot_pairs(sums[row][vector], _mm512_set1_epi32(i32::from(last.bits())), weights);
                }
            }
        }
    }
    // SAFETY: the bias covers the panel.
    unsafe { epilogue::add_bias(&mut sums, panel.bias) };
    sums
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
unsafe fn accumulate<const R: usize, const LINES: usize>(
    input: *const Element,
    shape: Shape,
    weights: *const Element,
    ahead: *const i8,
) -> Sums<R> {
    let mut sums = [[_mm512_setzero_ps(); VECTORS]; R];
    for pair in 0..shape.in_features / 2 {
        // SAFETY: the caller of `apply` vouches for R rows and a panel with that many pairs; panels are 64-byte aligned.
        unsafe {
            let base = weights.add(pair * PAIR);
            let mut columns = [_mm512_setzero_si512(); VECTORS];
            for vector in 0..VECTORS {
                columns[vector] = _mm512_load_si512(base.add(vector * LANES * 2).cast());
            }
            for line in 0..LINES {
                _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add((pair * LINES + line) * LINE));
            }
            for row in 0..R {
                let both = simd::broadcast_pair(input.add(row * shape.stride + pair * 2));
                for vector in 0..VECTORS {
                    sums[row][vector] = simd::dot_pairs(sums[row][vector], both, columns[vector]);
                }
            }
        }
    }
    sums
}
