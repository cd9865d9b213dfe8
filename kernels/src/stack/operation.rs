//! What a stack consists of.

use super::Step;
use super::experts::Experts;
use super::register::{PerRegister, Register};
use crate::activation::Activation;
use crate::attention::{KvScales, Layout, NewTokens};
use crate::collective::Collective;
use crate::element::Element;
use crate::linear::{Combine, Linear};
use crate::low_rank::Adapted;
use crate::norm::Norm;
use crate::pool::{Source, Target};
use crate::recurrence::Recurrence;
use crate::rotate::{Angles, Heads, Pairs, rotate_token};
use crate::row;
use std::ops::Range;
use std::sync::Arc;

/// A kernel, or a series of row operations.
pub(super) enum Operation {
    Linear {
        linear: Arc<Linear>,
        from: Register,
        to: Register,
        combine: Combine,
    },
    /// Adds to `to` what the rows' adapters add to the layers from `from` to it, then a series of row operations. PERF: with enough rows,
    /// all are one phase.
    Adapt {
        /// One site for each head, or one site.
        sites: Range<usize>,
        from: Register,
        to: Register,
        /// Elements from a head's columns to the next head's, in `from` and in `to`.
        steps: [usize; 2],
        /// Elements of a row of `from` and of `to`.
        widths: [usize; 2],
        then: Vec<RowOperation>,
    },
    /// PERF: a barrier costs more than most row operations, so a series of them is one phase.
    Rows(Vec<RowOperation>),
    /// Attention of the queries in `Qkv`, whose rows have `stride` elements, over a cache, to `Attended`.
    Attend {
        cache: usize,
        /// Its number in the stack, and the scales of the cache.
        attention: usize,
        scales: KvScales,
        stride: usize,
        /// A logit for each head.
        sinks: Option<Source<Element>>,
    },
    /// Advances the states of the sequences in a cache.
    AdvanceStates {
        net: Arc<dyn Recurrence>,
        cache: usize,
        from: Vec<Register>,
        to: Register,
    },
    /// Joins the ranks' columns of `from` in `to`. `widths`: bytes of a row on each rank.
    Gather {
        collective: Arc<Collective>,
        widths: Vec<usize>,
        from: Register,
        to: Register,
    },
    Experts(Experts),
    /// A dense linear layer for each head, from consecutive columns of `from` to columns of `to` that begin `step` apart.
    Heads {
        linears: Vec<Arc<Linear>>,
        from: Register,
        to: Register,
        step: usize,
        /// Elements of a row of `from` and of `to`.
        widths: [usize; 2],
    },
    /// Keeps the sampled rows of these registers, given with their widths, and no other register.
    Select(Vec<(Register, usize)>),
}

impl Operation {
    /// Most phases that it takes of a section for this number of rows.
    pub(super) fn max_phases(&self, num_rows: usize) -> usize {
        match self {
            Operation::Experts(experts) => experts.max_phases(num_rows),
            // Inputs may be quantized first; segments of a context may have to be merged.
            Operation::Linear { .. } | Operation::Attend { .. } => 2,
            Operation::Adapt { sites, .. } => Adapted::NUM_PHASES * sites.len() + 1,
            Operation::AdvanceStates { .. }
            | Operation::Rows(_)
            | Operation::Gather { .. }
            | Operation::Heads { .. }
            | Operation::Select(_) => 1,
        }
    }

    /// Bytes of scratch for this number of rows.
    pub(super) fn scratch_bytes(&self, num_rows: usize) -> usize {
        match self {
            Operation::Linear { linear, .. } => linear.scratch_bytes(num_rows),
            Operation::Experts(experts) => experts.scratch_bytes(num_rows),
            _ => 0,
        }
    }

    /// Whether it writes to a cache.
    pub(super) fn writes(&self) -> bool {
        let of_row = match self {
            Operation::Rows(of_row) | Operation::Adapt { then: of_row, .. } => of_row,
            Operation::AdvanceStates { .. } => return true,
            _ => return false,
        };
        of_row.iter().any(|each| matches!(each, RowOperation::Write { .. }))
    }
}

/// An operation on the registers of one row. `width` is the number of elements.
pub(super) enum RowOperation {
    Norm {
        norm: Arc<Norm>,
        from: Register,
        to: Register,
    },
    /// Norms heads in place, from column `first` on. A norm over all heads together has one group.
    NormHeads {
        norm: Arc<Norm>,
        register: Register,
        first: usize,
        num_groups: usize,
        stride: usize,
    },
    Activate {
        activation: Activation,
        from: Register,
        to: Register,
        width: usize,
    },
    Scale {
        register: Register,
        factor: f32,
        width: usize,
    },
    /// Multiplies the queries, the first `width` columns of `Qkv`, by the factor of their position,
    /// `factors[(position + 1) / period]`.
    ScaleQueries {
        factors: Source<f32>,
        period: usize,
        width: usize,
        stride: usize,
    },
    Clamp {
        register: Register,
        bound: f32,
        width: usize,
    },
    Add {
        from: Register,
        to: Register,
        width: usize,
    },
    /// to *= activation(from)
    Gate {
        activation: Activation,
        from: Register,
        to: Register,
        width: usize,
    },
    /// Copies `count` pieces of `width` elements.
    Copy {
        from: Pieces,
        to: Pieces,
        count: usize,
        width: usize,
    },
    /// Copies `count` heads of `width` elements to heads of `step` elements, which end with zeros.
    Pad {
        from: Register,
        to: Register,
        count: usize,
        width: usize,
        step: usize,
    },
    /// Column i of `to` is column `order[i]` of `from`.
    Reorder {
        order: Arc<[u32]>,
        width: usize,
        from: Register,
        to: Register,
    },
    /// Rotates the first `num_heads` heads of `Qkv`, each from its element `first` on.
    Rotate {
        tables: Tables,
        first: usize,
        num_heads: usize,
        head_dim: usize,
        stride: usize,
    },
    /// Stores keys and values of `Qkv`.
    Write {
        layout: Layout,
        cache: usize,
        stride: usize,
        scales: KvScales,
    },
}

/// Pieces of a row: `first` is the column of the first one, `step` the columns from one to the next, `stride` the
/// elements of the row.
#[derive(Clone, Copy)]
pub(super) struct Pieces {
    pub(super) register: Register,
    pub(super) first: usize,
    pub(super) step: usize,
    pub(super) stride: usize,
}

/// Cosines and sines [positions, half].
#[derive(Clone, Copy)]
pub(super) struct Tables {
    pub(super) cos: Source<f32>,
    pub(super) sin: Source<f32>,
    pub(super) half: usize,
    pub(super) pairs: Pairs,
}

/// What row operations know of a step.
pub(super) struct TokenContext<'a> {
    pub(super) step: &'a Step<'a>,
    pub(super) registers: &'a PerRegister<Target<Element>>,
}

impl RowOperation {
    /// The elements of a row that a norm could compute in the same time.
    pub(super) fn numbers(&self) -> usize {
        match self {
            RowOperation::Norm { norm, .. } => norm.dim(),
            RowOperation::NormHeads { norm, num_groups, .. } => num_groups * norm.dim(),
            RowOperation::Activate { width, .. }
            | RowOperation::Gate { width, .. }
            | RowOperation::Scale { width, .. }
            | RowOperation::ScaleQueries { width, .. }
            | RowOperation::Clamp { width, .. }
            | RowOperation::Add { width, .. } => *width,
            RowOperation::Copy { count, width, .. } => count * width,
            RowOperation::Pad { count, step, .. } => count * step,
            // One element at a time.
            RowOperation::Reorder { order, .. } => 8 * order.len(),
            RowOperation::Rotate { tables, num_heads, .. } => 4 * num_heads * tables.half,
            RowOperation::Write { layout, .. } => 2 * layout.num_kv_heads * (layout.head_dim + layout.value_dim),
        }
    }

    /// Applies the operation to a row.
    ///
    /// # Safety
    /// The registers must have the row at its widths; `ScaleQueries`, `Rotate` and `Write` need a row of the step.
    pub(super) unsafe fn apply(&self, row: usize, context: &TokenContext<'_>) {
        let at = |register: Register, width: usize| context.registers[register as usize].at(row * width);
        let qkv = context.registers[Register::Qkv as usize];
        // SAFETY: guaranteed by the caller.
        unsafe {
            match *self {
                RowOperation::Norm { ref norm, from, to } => {
                    norm.apply_row(1, at(from, norm.dim()), at(to, norm.dim()));
                }
                RowOperation::NormHeads { ref norm, register, first, num_groups, stride } => {
                    let heads = at(register, stride).wrapping_add(first);
                    norm.apply_row(num_groups, heads, heads);
                }
                RowOperation::Activate { activation, from, to, width } => {
                    let columns = activation.output_columns(width);
                    activation.apply_row(at(from, width), at(to, columns), width);
                }
                RowOperation::Scale { register, factor, width } => row::scale(at(register, width), factor, width),
                RowOperation::ScaleQueries { factors, period, width, stride } => {
                    let position = *context.step.positions.at(row) as usize;
                    row::scale(at(Register::Qkv, stride), *factors.at((position + 1) / period), width);
                }
                RowOperation::Clamp { register, bound, width } => row::clamp(at(register, width), bound, width),
                RowOperation::Add { from, to, width } => row::add(at(from, width), at(to, width), width),
                RowOperation::Gate { activation, from, to, width } => {
                    activation.apply_row(at(from, width), at(from, width), width);
                    row::multiply(at(from, width), at(to, width), width);
                }
                RowOperation::Copy { from, to, count, width } => {
                    let place = |of: Pieces, index: usize| at(of.register, of.stride).add(of.first + index * of.step);
                    for index in 0..count {
                        place(to, index).copy_from_nonoverlapping(place(from, index), width);
                    }
                }
                RowOperation::Pad { from, to, count, width, step } => {
                    let (from, to) = (at(from, count * width), at(to, count * step));
                    for head in 0..count {
                        let target = to.add(head * step);
                        target.copy_from_nonoverlapping(from.add(head * width), width);
                        target.add(width).write_bytes(0, step - width);
                    }
                }
                RowOperation::Reorder { ref order, width, from, to } => {
                    let (from, to) = (at(from, width), at(to, order.len()));
                    for (index, &column) in order.iter().enumerate() {
                        to.add(index).write(from.add(column as usize).read());
                    }
                }
                RowOperation::Rotate {
                    tables: Tables { cos, sin, half, pairs },
                    first,
                    num_heads,
                    head_dim,
                    stride,
                } => {
                    let angles = Angles { cos, sin, positions: context.step.positions, half, pairs };
                    let address = Target::new(qkv.at(first));
                    rotate_token(&angles, &Heads { address, stride, num_heads, head_dim }, row);
                }
                RowOperation::Write { layout, cache, stride, scales } => {
                    let Layout { num_heads, num_kv_heads, head_dim, .. } = layout;
                    let tokens = NewTokens {
                        keys: Source::new(qkv.at(num_heads * head_dim)),
                        keys_stride: stride,
                        values: Source::new(qkv.at((num_heads + num_kv_heads) * head_dim)),
                        values_stride: stride,
                        slots: context.step.slots,
                        num_tokens: context.step.num_tokens,
                        scales,
                    };
                    layout.write_token(context.step.caches[cache], &tokens, row);
                }
            }
        }
    }
}
