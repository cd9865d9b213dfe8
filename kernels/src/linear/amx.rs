//! Dense layers with AMX: up to 32 rows by one panel of 48 columns, with the sums over all input features in tile registers. 16 input
//! pairs by 16 columns of a panel are an operand of `tdpbf16ps` as they are, so the packed weight is that of the AVX-512 tiles.
//!
//! INVARIANT: every output element is one chain of `tdpbf16ps` over ascending blocks of 32 input features. The instruction sums even and
//! odd features apart, unlike `vdpbf16ps`, so a CPU with AMX takes this path for every number of rows.

use super::epilogue::{self, Outcome, Sums};
use super::pack::PADDING;
use super::tile::{Ahead, PANEL, Panel, STREAM_AHEAD_BYTES, VECTORS};
use crate::cpu::Amx;
use crate::element::Element;
use crate::registers::{REGISTER_BYTES, REGISTER_ROWS, Registers};
use crate::simd::{F32, LANES};
use std::arch::asm;

/// Input features per step of the chain: a row of a tile register.
const STEP: usize = PADDING;
/// Rows per tile: two registers of input with each register of weights.
pub(super) const TILE_ROWS: usize = 2 * REGISTER_ROWS;
/// Bytes of a pair of a panel, and of a row of sums.
const ROW_BYTES: usize = PANEL * 4;

/// The input's shape; `stride` is in elements.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) stride: usize,
    pub(super) in_features: usize,
}

/// The sums of a tile with one panel.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
struct Block([[f32; PANEL]; TILE_ROWS]);

/// The features of a tile's rows that do not fill a step, followed by zeros.
#[repr(C, align(64))]
struct Tail([[Element; STEP]; TILE_ROWS]);

/// Consecutive steps of a tile's input, as both registers of input read them.
#[repr(C)]
struct Segment {
    upper: *const Element,
    lower: *const Element,
    stride_bytes: usize,
    num_steps: usize,
}

/// The tile registers, configured for tiles of one height, and their results.
pub(super) struct Tiles {
    _registers: Registers,
    num_rows: usize,
    sums: [Block; 2],
    tail: Tail,
}

impl Tiles {
    /// Configures the registers for tiles of `num_rows` (1 to `TILE_ROWS`) rows.
    pub(super) fn configure(amx: Amx, num_rows: usize) -> Tiles {
        debug_assert!((1..=TILE_ROWS).contains(&num_rows));
        let mut shapes = [(register_rows(num_rows), REGISTER_BYTES); 8];
        shapes[7].0 = REGISTER_ROWS;
        Tiles {
            _registers: Registers::configure(amx, shapes),
            num_rows,
            sums: [Block([[0.0; PANEL]; TILE_ROWS]); 2],
            tail: Tail([[Element::default(); STEP]; TILE_ROWS]),
        }
    }

    /// Computes a tile, and stores its rows from `skip` on. `outcome` is the place of the first stored row.
    ///
    /// # Safety
    /// The tile's rows of `shape` must be readable at `input`, `outcome` writable for the rows from `skip` on, and the panel made for
    /// `shape.in_features`.
    pub(super) unsafe fn apply(
        &mut self,
        input: *const Element,
        shape: Shape,
        panel: Panel,
        skip: usize,
        outcome: Outcome,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.multiply(0, input, shape, panel);
            for row in skip..self.num_rows {
                store(&self.sums[0].0[row], panel.bias, outcome.below(row - skip));
            }
        }
    }

    /// Like `apply`, for a gate panel and the panel that it gates.
    ///
    /// # Safety
    /// As for `apply`.
    pub(super) unsafe fn apply_gated(
        &mut self,
        input: *const Element,
        shape: Shape,
        [gate, up]: [Panel; 2],
        skip: usize,
        outcome: Outcome,
    ) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            self.multiply(0, input, shape, gate);
            self.multiply(1, input, shape, up);
            let [gates, ups] = &self.sums;
            for row in skip..self.num_rows {
                let outcome = outcome.below(row - skip);
                store_gated([&gates.0[row], &ups.0[row]], [gate.bias, up.bias], outcome);
            }
        }
    }

    /// Computes the sums with a panel, without its bias, as block `place`.
    ///
    /// # Safety
    /// As for `apply`.
    unsafe fn multiply(&mut self, place: usize, input: *const Element, shape: Shape, panel: Panel) {
        let lower_row = self.num_rows - register_rows(self.num_rows);
        let segment = |address: *const Element, stride: usize, num_steps: usize| Segment {
            upper: address,
            lower: address.wrapping_add(lower_row * stride),
            stride_bytes: stride * 2,
            num_steps,
        };
        let (num_steps, rest) = (shape.in_features / STEP, shape.in_features % STEP);
        if rest > 0 {
            for (row, features) in self.tail.0[..self.num_rows].iter_mut().enumerate() {
                let source = input.wrapping_add(row * shape.stride + num_steps * STEP);
                // SAFETY: the caller vouches for the row's features.
                unsafe { source.copy_to_nonoverlapping(features.as_mut_ptr(), rest) };
            }
        }
        let segments = [segment(input, shape.stride, num_steps), segment(self.tail.0.as_ptr().cast(), STEP, 1)];
        let segments = &segments[usize::from(num_steps == 0)..1 + usize::from(rest > 0)];
        let sums = self.sums[place].0.as_mut_ptr();
        // SAFETY: the segments are the tile's rows, the panel has as many steps, and the block has room for the rows.
        unsafe {
            if lower_row == 0 {
                chain_of_one(segments, panel, sums);
            } else {
                chain_of_two(segments, panel, sums, sums.add(lower_row));
            }
        }
    }
}

/// Rows per register of input and sums, of a tile of `num_rows`. The two registers of an odd number of rows have a row in common.
fn register_rows(num_rows: usize) -> usize {
    num_rows.div_ceil(num_rows.div_ceil(REGISTER_ROWS))
}

/// The address where a pass's prefetches begin, and the number of cache lines that it prefetches per line of a row of
/// tiles. PERF: no register is left for a gap between them, so the first passes prefetch whole lines for all.
fn prefetches(panel: &Panel) -> (*const i8, usize) {
    let Ahead { pass, num_passes, .. } = panel.ahead;
    let lines_per_pass = VECTORS.div_ceil(num_passes);
    let [before, after] = [pass, pass + 1].map(|pass| VECTORS.min(pass * lines_per_pass));
    (panel.ahead_from(before, VECTORS, STREAM_AHEAD_BYTES), after - before)
}

/// The loop of a chain over all steps of all segments: `zero` the sums, `multiply` a step, `store` the sums. Prefetches some lines after
/// every step.
macro_rules! chain {
    (
        $segments:ident, $panel:ident,
        zero: [$($zero:literal)*], multiply: [$($multiply:literal)*], store: [$($store:literal)*],
        $($sums:ident),*
    ) => {{
        let range = $segments.as_ptr_range();
        let (ahead, lines_per_pair) = prefetches(&$panel);
        asm!(
            $($zero,)*
            "2:",
            "mov {upper}, [{segment}]",
            "mov {lower}, [{segment} + 8]",
            "mov {stride}, [{segment} + 16]",
            "mov {steps}, [{segment} + 24]",
            "3:",
            $($multiply,)*
            "add {upper}, 64",
            "add {lower}, 64",
            "add {weights}, 3072",
            "mov {line}, {lines}",
            "jmp 5f",
            "4:",
            "prefetcht1 [{ahead}]",
            "add {ahead}, 64",
            "5:",
            "dec {line}",
            "jns 4b",
            "dec {steps}",
            "jnz 3b",
            "add {segment}, 32",
            "cmp {segment}, {end}",
            "jne 2b",
            $($store,)*
            segment = inout(reg) range.start => _,
            end = in(reg) range.end,
            weights = inout(reg) $panel.weights => _,
            row = in(reg) ROW_BYTES,
            ahead = inout(reg) ahead => _,
            lines = in(reg) lines_per_pair * STEP / 2,
            $($sums = in(reg) $sums,)*
            upper = out(reg) _,
            lower = out(reg) _,
            stride = out(reg) _,
            steps = out(reg) _,
            line = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }};
}

/// The chains of one register of input: tmm0 to tmm2 are sums, tmm6 is input, tmm7 weights.
///
/// # Safety
/// There must be at least one segment. The registers must be configured for the rows of `upper` in the segments, the
/// panel must have all their steps, and the sums must have room for the rows.
unsafe fn chain_of_one(segments: &[Segment], panel: Panel, sums: *mut [f32; PANEL]) {
    // SAFETY: guaranteed by the caller. Prefetching touches nothing.
    unsafe {
        chain!(
            segments, panel,
            zero: ["tilezero tmm0" "tilezero tmm1" "tilezero tmm2"],
            multiply: [
                "tileloadd tmm6, [{upper} + {stride}]"
                "tileloadd tmm7, [{weights} + {row}]"
                "tdpbf16ps tmm0, tmm6, tmm7"
                "tileloadd tmm7, [{weights} + {row} + 64]"
                "tdpbf16ps tmm1, tmm6, tmm7"
                "tileloadd tmm7, [{weights} + {row} + 128]"
                "tdpbf16ps tmm2, tmm6, tmm7"
            ],
            store: [
                "tilestored [{sums} + {row}], tmm0"
                "tilestored [{sums} + {row} + 64], tmm1"
                "tilestored [{sums} + {row} + 128], tmm2"
            ],
            sums
        );
    }
}

/// The chains of two registers of input. tmm0 to tmm2 are sums of the upper rows, tmm3 to tmm5 of the lower rows; tmm6 is input, tmm7
/// weights.
///
/// # Safety
/// As for `chain_of_one`, for the rows of `upper` and of `lower`.
unsafe fn chain_of_two(
    segments: &[Segment],
    panel: Panel,
    upper_sums: *mut [f32; PANEL],
    lower_sums: *mut [f32; PANEL],
) {
    // SAFETY: guaranteed by the caller. Prefetching touches nothing.
    unsafe {
        chain!(
            segments, panel,
            zero: [
                "tilezero tmm0" "tilezero tmm1" "tilezero tmm2"
                "tilezero tmm3" "tilezero tmm4" "tilezero tmm5"
            ],
            multiply: [
                "tileloadd tmm6, [{upper} + {stride}]"
                "tileloadd tmm7, [{weights} + {row}]"
                "tdpbf16ps tmm0, tmm6, tmm7"
                "tileloadd tmm7, [{weights} + {row} + 64]"
                "tdpbf16ps tmm1, tmm6, tmm7"
                "tileloadd tmm7, [{weights} + {row} + 128]"
                "tdpbf16ps tmm2, tmm6, tmm7"
                "tileloadd tmm6, [{lower} + {stride}]"
                "tdpbf16ps tmm5, tmm6, tmm7"
                "tileloadd tmm7, [{weights} + {row} + 64]"
                "tdpbf16ps tmm4, tmm6, tmm7"
                "tileloadd tmm7, [{weights} + {row}]"
                "tdpbf16ps tmm3, tmm6, tmm7"
            ],
            store: [
                "tilestored [{upper_sums} + {row}], tmm0"
                "tilestored [{upper_sums} + {row} + 64], tmm1"
                "tilestored [{upper_sums} + {row} + 128], tmm2"
                "tilestored [{lower_sums} + {row}], tmm3"
                "tilestored [{lower_sums} + {row} + 64], tmm4"
                "tilestored [{lower_sums} + {row} + 128], tmm5"
            ],
            upper_sums, lower_sums
        );
    }
}

/// A row of sums as vectors, with the bias.
///
/// # Safety
/// The bias must be null or cover the panel.
#[inline(always)]
unsafe fn load(sums: &[f32; PANEL], bias: *const f32) -> Sums<1, VECTORS> {
    // SAFETY: the vectors are those of the row; the caller vouches for the bias.
    unsafe {
        let mut row = [std::array::from_fn(|vector| F32::load(sums[vector * LANES..].as_ptr()))];
        epilogue::add_bias(&mut row, bias);
        row
    }
}

unsafe fn store(sums: &[f32; PANEL], bias: *const f32, outcome: Outcome) {
    // SAFETY: the caller of `apply` vouches for the bias and the outcome.
    unsafe { epilogue::store(&load(sums, bias), outcome) };
}

unsafe fn store_gated([gates, ups]: [&[f32; PANEL]; 2], [gate_bias, up_bias]: [*const f32; 2], outcome: Outcome) {
    // SAFETY: the caller of `apply_gated` vouches for the biases and the outcome.
    unsafe { epilogue::store_gated(&load(gates, gate_bias), &load(ups, up_bias), outcome) };
}
