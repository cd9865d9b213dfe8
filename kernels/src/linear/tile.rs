//! The register tile: some rows by one panel of columns, with the sums over all input features in registers.

use super::epilogue::{self, Outcome, Sums};
use crate::element::{Element, GROUP};
use crate::product::{self, Factor, LINE, Operand, STEP, WIDTH};
use crate::simd::{self, F32, LANES, SUMS, with_constant};
use std::array::from_fn;

/// Vectors per panel row.
pub(super) const VECTORS: usize = if SUMS < 24 { 1 } else { 3 };
/// Output columns per panel.
pub(crate) const PANEL: usize = VECTORS * LANES;
/// Rows per register tile.
pub(super) const TILE_ROWS: usize = if SUMS < 8 { SUMS } else { 8 };

/// Prefetch distance in bytes while a tile streams a panel, into the second-level cache. PERF: 8 and 16 rows of a layer of 3072 × 576, which
/// the last-level cache has, took 90 and 140 µs with this distance, 102 to 106 and 161 to 164 µs with 2 to 16 KiB into the first-level cache
/// (Zen 4, 2 threads).
pub(super) const STREAM_AHEAD_BYTES: usize = 8192;
/// Like `STREAM_AHEAD_BYTES`, but past the second-level cache, for a panel that no other tile reads. PERF: what is read
/// once does not displace what the next operators need (docs/adr/kernels.md). 2 or 8 KiB are slower (Zen 5, 2 threads).
const ONCE_AHEAD_BYTES: usize = 4096;

/// What one pass over a panel prefetches: itself, or its share of a later panel.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    pub(super) pass: usize,
    pub(super) num_passes: usize,
    /// Panels from the one that is multiplied to the one that is prefetched.
    pub(super) panels: usize,
    is_stream: bool,
    /// Whether no other pass reads the panel.
    is_only: bool,
}

impl Ahead {
    /// The prefetches of pass `pass` of `num_passes` over the same panel. `is_cold`: it is the first one of a thread's part. PERF: no pass
    /// over another panel has prefetched that one, so its own first pass does. Layers of 576 to 3072 columns then took 0.80 to 0.97 of
    /// the time at 3 to 64 rows (AVX2, Zen 3, 2 threads).
    pub(crate) fn plan(pass: usize, num_passes: usize, panels: usize, is_cold: bool) -> Ahead {
        if num_passes == 1 || (is_cold && pass == 0) {
            return Ahead { pass: 0, num_passes: 1, panels: 0, is_stream: true, is_only: num_passes == 1 };
        }
        let num_streams = usize::from(is_cold);
        Ahead {
            pass: pass - num_streams,
            num_passes: num_passes - num_streams,
            panels,
            is_stream: false,
            is_only: false,
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
    /// The address where the prefetches of pass `pass` begin, if `num_passes` share a panel's memory. `stream`: bytes
    /// that a stream prefetches ahead.
    pub(super) fn ahead_from(&self, pass: usize, num_passes: usize, stream: usize) -> *const i8 {
        let distance = if self.ahead.is_stream { stream } else { self.bytes * self.ahead.panels };
        self.weights.cast::<i8>().wrapping_add(distance + self.bytes * pass / num_passes)
    }
}

/// The factors of a tile's rows.
#[derive(Clone, Copy)]
pub(crate) struct Input {
    pub(crate) rows: *const Factor,
    /// Factors from row to row.
    pub(crate) stride: usize,
    pub(crate) in_features: usize,
}

impl Input {
    /// The input from a later row on.
    pub(super) fn below(self, num_rows: usize) -> Input {
        Input { rows: self.rows.wrapping_add(num_rows * self.stride), ..self }
    }
}

/// Computes a tile of `height` (1 to `TILE_ROWS`) rows.
///
/// # Safety
/// `height` rows must be readable at `input`, `outcome` writable for them, and the panel made for `input.in_features`.
pub(crate) unsafe fn apply(height: usize, input: Input, panel: Panel, outcome: Outcome) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_constant!(height, [1, 2, 3, 4, 5, 6, 7; 8], plain(input, panel, outcome)) }
}

/// Like `apply`, for a gate panel and the panel that it gates.
///
/// # Safety
/// As for `apply`.
pub(crate) unsafe fn apply_gated(height: usize, input: Input, panels: [Panel; 2], outcome: Outcome) {
    // SAFETY: guaranteed by the caller.
    unsafe { with_constant!(height, [1, 2, 3, 4, 5, 6, 7; 8], gated(input, panels, outcome)) }
}

unsafe fn plain<const R: usize>(input: Input, panel: Panel, outcome: Outcome) {
    if const { R <= TILE_ROWS } {
        // SAFETY: the caller of `apply` vouches for all addresses.
        unsafe { epilogue::store(&product::<R>(input, panel), outcome) };
    }
}

unsafe fn gated<const R: usize>(input: Input, panels: [Panel; 2], outcome: Outcome) {
    if const { R <= TILE_ROWS } {
        // SAFETY: the caller of `apply_gated` vouches for all addresses.
        unsafe {
            // PERF: `panels.map` would copy the sums, which took 3 % of a prompt's time.
            let gates = product::<R>(input, panels[0]);
            let ups = product::<R>(input, panels[1]);
            epilogue::store_gated(&gates, &ups, outcome);
        }
    }
}

/// The sums of R rows with a panel, bias included.
#[inline(always)]
unsafe fn product<const R: usize>(input: Input, panel: Panel) -> Sums<R, VECTORS> {
    let Ahead { pass, num_passes, .. } = panel.ahead;
    let num_prefetches = VECTORS.div_ceil(num_passes);
    // PERF: all passes prefetch alike, each less than a line per step. Where the first ones did it for all, 8 rows took 1.2 times as long.
    let gap = LINE * VECTORS / num_passes / num_prefetches;
    let stream = if panel.ahead.is_only { ONCE_AHEAD_BYTES } else { STREAM_AHEAD_BYTES };
    let ahead = panel.ahead_from(pass, num_passes, stream);
    // SAFETY: the caller of `apply` vouches for all addresses; the bias covers the panel.
    unsafe {
        let mut sums = match num_prefetches {
            VECTORS if panel.ahead.is_only => accumulate::<R, VECTORS, true>(input, panel.weights, ahead, gap),
            VECTORS => accumulate::<R, VECTORS, false>(input, panel.weights, ahead, gap),
            2 => accumulate::<R, 2, false>(input, panel.weights, ahead, gap),
            _ => accumulate::<R, 1, false>(input, panel.weights, ahead, gap),
        };
        epilogue::add_bias(&mut sums, panel.bias);
        sums
    }
}

/// Prefetches N times per step, every `gap` bytes. `ONCE`: what no other pass reads.
#[inline(always)]
unsafe fn accumulate<const R: usize, const N: usize, const ONCE: bool>(
    input: Input,
    weights: *const Element,
    ahead: *const i8,
    gap: usize,
) -> Sums<R, VECTORS> {
    let mut sums = [[F32::splat(0.0); VECTORS]; R];
    let num_steps = input.in_features / STEP;
    let columns = |feature: usize| -> [Operand; VECTORS] {
        // SAFETY: as below.
        from_fn(|vector| unsafe { product::columns(weights.add(vector * LANES * GROUP), PANEL, feature) })
    };
    // SAFETY: the caller of `apply` vouches for R rows and a panel with all their features. Prefetching touches nothing.
    unsafe {
        for step in 0..num_steps {
            for number in 0..N {
                let address = ahead.wrapping_add((step * N + number) * gap);
                if ONCE { simd::prefetch_once(address) } else { simd::prefetch(address) }
            }
            for operation in 0..STEP / WIDTH {
                let feature = step * STEP + operation * WIDTH;
                let factors = |row: usize| product::splat(input.rows.add(row * input.stride + feature));
                product::add(&mut sums, columns(feature), factors);
            }
        }
        if !input.in_features.is_multiple_of(STEP) {
            let feature = num_steps * STEP;
            let factors = |row: usize| product::splat_last(input.rows.add(row * input.stride + feature));
            product::add(&mut sums, columns(feature), factors);
        }
    }
    sums
}
