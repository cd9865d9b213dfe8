//! The register tile: some rows by one panel of 48 columns, with the sums over all input features in registers. Where registers are
//! few, a tile of more rows goes over its panel once for each vector of columns.

use super::epilogue::{self, Outcome, Sums};
use crate::element::{Element, GROUP};
use crate::product::{self, Factor, LINE, Operand, STEP, WIDTH};
use crate::simd::{self, F32, LANES, SUMS, with_constant};
use std::array::from_fn;

/// Output columns per panel.
pub(crate) const PANEL: usize = 48;
/// Vectors per panel row.
pub(super) const VECTORS: usize = PANEL / LANES;
/// Largest number of rows whose sums with a whole panel fit the registers.
const WIDE_ROWS: usize = SUMS / VECTORS;
/// Rows per register tile.
pub(super) const TILE_ROWS: usize = if WIDE_ROWS < 8 { SUMS } else { 8 };

/// Prefetch distance in bytes while a single tile streams a panel. PERF: 8 and 16 rows of 3072 × 576 took 90 and 140 µs with this
/// distance into the second-level cache, 102 to 106 and 161 to 164 µs with 2 to 16 KiB into the first (Zen 4, 2 threads).
const STREAM_AHEAD_BYTES: usize = 8192;

/// The prefetches during one pass over a panel.
#[derive(Clone, Copy)]
pub(crate) struct Ahead {
    pass: usize,
    num_passes: usize,
    /// How much later the panel comes that is prefetched.
    panels: usize,
    /// No pass over another panel has prefetched this one, so its own first pass does. PERF: layers of 576 to 3072 columns then take 0.80
    /// to 0.97 of the time at 3 to 64 rows (AVX2, Zen 3, 2 threads).
    is_cold: bool,
}

impl Ahead {
    /// The prefetches of pass `pass` of `num_passes` over the same panel. `is_cold`: it is the first one of a thread's part.
    pub(crate) fn plan(pass: usize, num_passes: usize, panels: usize, is_cold: bool) -> Ahead {
        Ahead { pass, num_passes, panels, is_cold }
    }

    /// Those of a later pass of the same tile.
    fn after(self, num_passes: usize) -> Ahead {
        Ahead { pass: self.pass + num_passes, ..self }
    }

    /// Whether the panel itself is prefetched, a fixed distance ahead: all lines of a step.
    fn is_stream(self) -> bool {
        self.num_passes == 1 || (self.is_cold && self.pass == 0)
    }

    /// Lines of a step of the later panel that are prefetched before a pass. The first passes share them.
    fn lines_before(self, pass: usize) -> usize {
        let num_streams = usize::from(self.is_cold);
        let lines_per_step = VECTORS.div_ceil(self.num_passes - num_streams);
        VECTORS.min((pass - num_streams) * lines_per_step)
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
    /// Where a pass's prefetches begin, and their number of lines per step.
    pub(super) fn prefetches(&self) -> (*const i8, usize) {
        let (start, ahead) = (self.weights.cast::<i8>(), self.ahead);
        if ahead.is_stream() {
            return (start.wrapping_add(STREAM_AHEAD_BYTES), VECTORS);
        }
        let [before, after] = [ahead.pass, ahead.pass + 1].map(|pass| ahead.lines_before(pass));
        (start.wrapping_add(self.bytes * ahead.panels + self.bytes / VECTORS * before), after - before)
    }
}

/// The factors of a tile's rows.
#[derive(Clone, Copy)]
pub(crate) struct Input {
    pub(crate) rows: *const Factor,
    /// From row to row.
    pub(crate) stride: usize,
    pub(crate) in_features: usize,
}

impl Input {
    /// The input from a later row on.
    pub(super) fn below(self, num_rows: usize) -> Input {
        Input { rows: self.rows.wrapping_add(num_rows * self.stride), ..self }
    }
}

/// Vectors of a panel that a tile of `height` rows computes at a time, in as many passes as that takes.
const fn vectors(height: usize) -> usize {
    if height <= WIDE_ROWS { VECTORS } else { 1 }
}

/// Passes of a tile of `height` rows over its panel.
pub(super) fn num_passes(height: usize) -> usize {
    VECTORS / vectors(height)
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
    // SAFETY: guaranteed by the caller.
    unsafe {
        if const { R <= WIDE_ROWS } {
            plain_passes::<R, VECTORS>(input, panel, outcome);
        } else if const { R <= TILE_ROWS } {
            plain_passes::<R, 1>(input, panel, outcome);
        }
    }
}

unsafe fn gated<const R: usize>(input: Input, panels: [Panel; 2], outcome: Outcome) {
    // SAFETY: guaranteed by the caller.
    unsafe {
        if const { R <= WIDE_ROWS } {
            gated_passes::<R, VECTORS>(input, panels, outcome);
        } else if const { R <= TILE_ROWS } {
            gated_passes::<R, 1>(input, panels, outcome);
        }
    }
}

#[inline(always)]
unsafe fn plain_passes<const R: usize, const V: usize>(input: Input, panel: Panel, outcome: Outcome) {
    for pass in 0..VECTORS / V {
        // SAFETY: the caller of `apply` vouches for all addresses.
        unsafe { epilogue::store(&product::<R, V>(input, panel, pass), outcome.right_of(pass * V * LANES)) };
    }
}

#[inline(always)]
unsafe fn gated_passes<const R: usize, const V: usize>(input: Input, panels: [Panel; 2], outcome: Outcome) {
    for pass in 0..VECTORS / V {
        // SAFETY: the caller of `apply_gated` vouches for all addresses.
        unsafe {
            let [gates, ups] = panels.map(|panel| product::<R, V>(input, panel, pass));
            epilogue::store_gated(&gates, &ups, outcome.right_of(pass * V * LANES));
        }
    }
}

/// The sums of R rows with V vectors of a panel, bias included.
#[inline(always)]
unsafe fn product<const R: usize, const V: usize>(input: Input, panel: Panel, pass: usize) -> Sums<R, V> {
    let column = pass * V * LANES;
    let (ahead, lines) = Panel { ahead: panel.ahead.after(pass), ..panel }.prefetches();
    // SAFETY: the caller of `apply` vouches for all addresses; the bias covers the panel.
    unsafe {
        let weights = panel.weights.add(column * GROUP);
        let mut sums = match lines {
            0 => accumulate::<R, V, 0>(input, weights, ahead),
            1 => accumulate::<R, V, 1>(input, weights, ahead),
            2 => accumulate::<R, V, 2>(input, weights, ahead),
            _ => accumulate::<R, V, VECTORS>(input, weights, ahead),
        };
        epilogue::add_bias(&mut sums, if panel.bias.is_null() { panel.bias } else { panel.bias.add(column) });
        sums
    }
}

#[inline(always)]
unsafe fn accumulate<const R: usize, const V: usize, const LINES: usize>(
    input: Input,
    weights: *const Element,
    ahead: *const i8,
) -> Sums<R, V> {
    let mut sums = [[F32::splat(0.0); V]; R];
    let num_steps = input.in_features / STEP;
    let columns = |feature: usize| -> [Operand; V] {
        // SAFETY: as below.
        from_fn(|vector| unsafe { product::columns(weights.add(vector * LANES * GROUP), PANEL, feature) })
    };
    // SAFETY: the caller of `apply` vouches for R rows and a panel with all their features. Prefetching touches nothing.
    unsafe {
        for step in 0..num_steps {
            for line in 0..LINES {
                simd::prefetch(ahead.wrapping_add((step * LINES + line) * LINE));
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
