//! The two matrix products of a tile with AMX, for up to 16 rows. 16 pairs of dims by 16 tokens of a block's keys, and 8 pairs of tokens by
//! 16 dims of its values, are operands of `tdpbf16ps` as the cache stores them.
//!
//! INVARIANT: a score is one chain of `tdpbf16ps` over ascending blocks of 32 dims, and a weighted value one chain for each tile over its
//! ascending blocks of tokens, for every number of rows. The instruction rounds unlike `vdpbf16ps`, so attention with AMX always uses it.

use super::TILE;
use super::buffer::{Line, room};
use super::cache::BLOCK;
use super::softmax::{MAX_ROWS, State, TileRows};
use super::tile::{BLOCKS, Blocks};
use crate::cpu::Amx;
use crate::element::{Element, GROUP};
use crate::registers::{REGISTER_BYTES, REGISTER_ROWS, Registers};
use crate::simd::{F32, I32, LANES};
use std::arch::asm;
use std::cell::RefCell;

thread_local! {
    /// The queries of a unit, contiguous.
    static QUERIES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
    /// The values of a block that the tile has only the first tokens of.
    static LAST_VALUES: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// Bytes of a row of a register of scores, of a pair of dims of a block's keys, and of a pair of tokens by 16 dims of its values.
const ROW: usize = REGISTER_BYTES;
/// Dims of a step of the chain of scores, and the bytes of a block's keys that it reads.
const STEP: usize = ROW / size_of::<Element>();
const STEP_BYTES: usize = STEP * BLOCK * size_of::<Element>();
/// Vectors of values per chain: a register of sums for each.
const VECTORS: usize = 4;

/// The addresses of a tile's blocks, and of the blocks that are prefetched at the same pace, as the chains read them.
#[repr(C)]
struct Addresses {
    here: [*const Element; BLOCKS],
    next: [*const Element; BLOCKS],
}

/// Chains of scores with some blocks: for each its register of sums, the offsets of its two addresses, and the offset of its scores.
macro_rules! scores_of {
    ($queries:expr, $head_dim:expr, $addresses:expr, $scores:expr,
     $([$sum:literal $here:literal $next:literal $place:literal])*) => {
        asm!(
            $(concat!("tilezero tmm", $sum),)*
            "cmp {at}, {end}",
            "je 3f",
            "2:",
            "tileloadd tmm4, [{queries} + {stride}]",
            $(
                concat!("mov {pointer}, [{addresses} + ", $here, "]"),
                "add {pointer}, {at}",
                "tileloadd tmm5, [{pointer} + {row}]",
                concat!("tdpbf16ps tmm", $sum, ", tmm4, tmm5"),
                concat!("mov {pointer}, [{addresses} + ", $next, "]"),
                "prefetcht1 [{pointer} + {at}]",
                "prefetcht1 [{pointer} + {at} + 64]",
                "prefetcht1 [{pointer} + {at} + 128]",
                "prefetcht1 [{pointer} + {at} + 192]",
                "prefetcht1 [{pointer} + {at} + 256]",
                "prefetcht1 [{pointer} + {at} + 320]",
                "prefetcht1 [{pointer} + {at} + 384]",
                "prefetcht1 [{pointer} + {at} + 448]",
                "prefetcht1 [{pointer} + {at} + 512]",
                "prefetcht1 [{pointer} + {at} + 576]",
                "prefetcht1 [{pointer} + {at} + 640]",
                "prefetcht1 [{pointer} + {at} + 704]",
                "prefetcht1 [{pointer} + {at} + 768]",
                "prefetcht1 [{pointer} + {at} + 832]",
                "prefetcht1 [{pointer} + {at} + 896]",
                "prefetcht1 [{pointer} + {at} + 960]",
            )*
            "add {queries}, 64",
            "add {at}, 1024",
            "cmp {at}, {end}",
            "jne 2b",
            "3:",
            "test {half}, {half}",
            "jz 4f",
            "tileloadd tmm6, [{queries} + {stride}]",
            $(
                concat!("mov {pointer}, [{addresses} + ", $here, "]"),
                "add {pointer}, {at}",
                "tileloadd tmm7, [{pointer} + {row}]",
                concat!("tdpbf16ps tmm", $sum, ", tmm6, tmm7"),
            )*
            "4:",
            $(concat!("tilestored [{scores} + {pitch} + ", $place, "], tmm", $sum),)*
            queries = inout(reg) $queries => _,
            stride = in(reg) $head_dim * size_of::<Element>(),
            addresses = in(reg) &raw const $addresses,
            at = inout(reg) 0usize => _,
            end = in(reg) $head_dim / STEP * STEP_BYTES,
            half = in(reg) $head_dim % STEP,
            row = in(reg) ROW,
            scores = in(reg) $scores,
            pitch = in(reg) TILE * size_of::<f32>(),
            pointer = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Chains of weighted values with some vectors of them: for each its register of sums and its offset.
macro_rules! products_of {
    ($chunk:expr, $addresses:expr, $products:expr, $([$sum:literal $place:literal])*) => {{
        let here = &raw const $addresses.here;
        asm!(
            $(concat!("tilezero tmm", $sum),)*
            "2:",
            "tileloadd tmm6, [{weights} + {pitch}]",
            "mov {pointer}, [{addresses}]",
            "add {pointer}, {at}",
            $(
                concat!("tileloadd tmm7, [{pointer} + {stride} + ", $place, "]"),
                concat!("tdpbf16ps tmm", $sum, ", tmm6, tmm7"),
            )*
            "mov {pointer}, [{addresses} + 32]",
            "add {pointer}, {at}",
            "mov {count}, 8",
            "3:",
            $(concat!("prefetcht1 [{pointer} + ", $place, "]"),)*
            "add {pointer}, {stride}",
            "dec {count}",
            "jnz 3b",
            "add {weights}, 32",
            "add {addresses}, 8",
            "cmp {addresses}, {end}",
            "jne 2b",
            $(concat!("tilestored [{products} + {row} + ", $place, "], tmm", $sum),)*
            weights = inout(reg) $chunk.weights => _,
            pitch = in(reg) TILE * size_of::<Element>(),
            addresses = inout(reg) here => _,
            end = in(reg) here.cast::<*const Element>().add($chunk.num_blocks),
            at = in(reg) $chunk.first * GROUP * size_of::<Element>(),
            stride = in(reg) $chunk.value_dim * GROUP * size_of::<Element>(),
            products = in(reg) &raw mut $products,
            row = in(reg) VECTORS * LANES * size_of::<f32>(),
            pointer = out(reg) _,
            count = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    }};
}

/// The tile registers, configured for a unit's rows: tmm0 to tmm3 are sums, tmm4 is a step of queries and tmm5 of keys; tmm6 and tmm7 are
/// half a step, or a block of weights and of values.
pub(super) struct Tiles {
    _registers: Registers,
    /// Weighted values of the current tile.
    products: Products,
}

#[repr(C, align(64))]
struct Products([[f32; VECTORS * LANES]; MAX_ROWS]);

impl Tiles {
    /// Rows that share the loads of keys and values.
    pub(super) const ROWS: usize = REGISTER_ROWS;

    /// Configures the registers for groups of a unit's `num_rows` rows; `None` without AMX.
    pub(super) fn configure(amx: Option<Amx>, num_rows: usize) -> Option<Tiles> {
        let (rows, half) = (num_rows.min(REGISTER_ROWS), ROW / 2);
        let mut shapes = [(rows, ROW); 8];
        (shapes[5], shapes[6], shapes[7]) = ((STEP / GROUP, ROW), (rows, half), (BLOCK / GROUP, ROW));
        let products = Products([[0.0; VECTORS * LANES]; MAX_ROWS]);
        amx.map(|amx| Tiles { _registers: Registers::configure(amx, shapes), products })
    }

    /// Copies the queries of `num_tokens` tokens, `dim` elements each, so that the distance between rows is constant, and groups of rows
    /// are readable as whole registers. The copy is valid until this thread makes the next one.
    ///
    /// # Safety
    /// The queries must be readable.
    pub(super) unsafe fn gather(
        queries: *const Element,
        stride: usize,
        num_tokens: usize,
        dim: usize,
        head_dim: usize,
    ) -> *const Element {
        let rows = (num_tokens * dim / head_dim).next_multiple_of(REGISTER_ROWS);
        let copy = room(&QUERIES, rows * head_dim);
        for token in 0..num_tokens {
            // SAFETY: the caller vouches for the queries; the buffer has room for all rows.
            unsafe { queries.add(token * stride).copy_to_nonoverlapping(copy.add(token * dim), dim) };
        }
        copy
    }

    /// Writes q·k of a group of rows with the tile's tokens to `scores` [MAX_ROWS][TILE].
    ///
    /// # Safety
    /// `queries` must be rows of `gather`, `head_dim` elements apart.
    pub(super) unsafe fn score(&mut self, queries: *const Element, blocks: &Blocks, scores: *mut f32) {
        let addresses = Addresses { here: blocks.here.keys, next: blocks.next.keys };
        // SAFETY: guaranteed by the caller.
        unsafe {
            match blocks.num_tokens.div_ceil(BLOCK) {
                1 => scores_of!(queries, blocks.head_dim, addresses, scores, [0 0 32 0]),
                2 => scores_of!(queries, blocks.head_dim, addresses, scores, [0 0 32 0] [1 8 40 64]),
                3 => scores_of!(queries, blocks.head_dim, addresses, scores, [0 0 32 0] [1 8 40 64] [2 16 48 128]),
                _ => scores_of!(
                    queries, blocks.head_dim, addresses, scores,
                    [0 0 32 0] [1 8 40 64] [2 16 48 128] [3 24 56 192]
                ),
            }
        }
    }

    /// sums = sums · factor + weights · values, for a group of rows of a state. The tile's blocks begin with its token `first`.
    ///
    /// # Safety
    /// The rows must be rows of the state.
    pub(super) unsafe fn weigh(&mut self, rows: &TileRows, first: usize, blocks: &Blocks, state: State) {
        let mut values = Addresses { here: blocks.here.values, next: blocks.next.values };
        let (num_blocks, rest) = (blocks.num_tokens.div_ceil(BLOCK), blocks.num_tokens % BLOCK);
        // SAFETY: guaranteed by the caller; the chunks of vectors are inside the values.
        unsafe {
            if rest > 0 {
                values.here[num_blocks - 1] = first_tokens(values.here[num_blocks - 1], blocks.value_dim, rest);
            }
            let weights = rows.weights[0].as_ptr().add(first).cast();
            for dim in (0..blocks.value_dim).step_by(VECTORS * LANES) {
                let num_vectors = VECTORS.min((blocks.value_dim - dim) / LANES);
                let chunk = Chunk { weights, first: dim, value_dim: blocks.value_dim, num_blocks };
                match num_vectors {
                    1 => products_of!(chunk, values, self.products, [0 0]),
                    2 => products_of!(chunk, values, self.products, [0 0] [1 64]),
                    3 => products_of!(chunk, values, self.products, [0 0] [1 64] [2 128]),
                    _ => products_of!(chunk, values, self.products, [0 0] [1 64] [2 128] [3 192]),
                }
                for row in 0..rows.count {
                    let sums = state.values(rows.first + row).add(dim);
                    let factor = F32::splat(rows.factors[row]);
                    for lane in (0..num_vectors * LANES).step_by(LANES) {
                        let product = F32::load(self.products.0[row][lane..].as_ptr());
                        F32::load(sums.add(lane)).mul_add(factor, product).store(sums.add(lane));
                    }
                }
            }
        }
    }
}

/// Some vectors of a tile's values.
struct Chunk {
    /// Attention weights of the tile's first row, from the first block on.
    weights: *const Element,
    /// The first dim.
    first: usize,
    value_dim: usize,
    num_blocks: usize,
}

/// The first tokens of a block's values, followed by zeros: what a block holds behind its last token may be NaN.
///
/// # Safety
/// The block's values must be readable.
unsafe fn first_tokens(values: *const Element, value_dim: usize, num_tokens: usize) -> *const Element {
    let copy = room(&LAST_VALUES, BLOCK * value_dim);
    for group in 0..BLOCK / GROUP {
        let kept = I32::splat(match num_tokens.saturating_sub(group * GROUP) {
            0 => 0,
            1 => 0xffff,
            _ => -1,
        });
        for dim in (0..value_dim).step_by(LANES) {
            let place = (group * value_dim + dim) * GROUP;
            // SAFETY: the caller vouches for the values; the buffer has room for a block of them.
            unsafe { (I32::load(values.add(place).cast()) & kept).store(copy.add(place).cast()) };
        }
    }
    copy
}
