//! The shape of one layer's attention.

use super::Layout;
use crate::cpu::Amx;
use crate::pool::Source;
use crate::simd::LANES;

/// Largest head size in elements.
pub(crate) const MAX_DIM: usize = 1024;

/// The part of an encoder–decoder sequence that a query sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Part {
    /// Everything up to its own position; for models without an encoder.
    #[default]
    Context,
    /// The source, from any position: all of it, or a window on both sides of the query.
    Source,
    /// Everything after the source, up to its own position.
    Answer,
}

/// The interval of positions that a query sees. It ends with the query's own position, except for `Part::Source`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub(crate) struct AttentionMask {
    /// Sliding window in tokens, the query's own included; for `Part::Source` on both sides.
    pub(crate) window: Option<usize>,
    /// Chunk size in tokens: a query sees only its own chunk.
    pub(crate) chunk: Option<usize>,
    pub(crate) part: Part,
}

impl AttentionMask {
    /// First visible position of the query at `position`. Monotonic in `position`.
    pub(crate) fn first(&self, position: usize, source_len: usize) -> usize {
        let part = match self.part {
            Part::Context | Part::Source => 0,
            Part::Answer => source_len,
        };
        let window = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let chunk = self.chunk.map_or(0, |chunk| position - position % chunk);
        part.max(window).max(chunk)
    }

    /// Upper bound on the positions that one query sees, counted back from its own; `None`: unbounded.
    pub(crate) fn max_span(&self) -> Option<usize> {
        self.window.into_iter().chain(self.chunk).filter(|_| self.part != Part::Source).min()
    }

    /// End of the visible interval, exclusive. Monotonic in `position`.
    pub(crate) fn end(&self, position: usize, source_len: usize) -> usize {
        match (self.part, self.window) {
            (Part::Source, Some(window)) => source_len.min(position + window),
            (Part::Source, None) => source_len,
            _ => position + 1,
        }
    }
}

/// ALiBi: a head's slope times the key's position, added to the score (<https://arxiv.org/abs/2108.12409>).
#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub(crate) struct Alibi {
    /// One per head.
    pub(crate) slopes: Vec<f32>,
    /// Whether the bias is added before scores are scaled.
    pub(crate) is_scaled: bool,
    /// Whether slope, position and product are rounded to bf16.
    pub(crate) is_bfloat16: bool,
}

/// A learned bias on scores by relative position (T5): [heads][2 · reach + 1], for key minus query from -reach to reach.
/// Larger distances are clamped.
#[derive(Clone, Copy)]
pub(crate) struct DistanceBias {
    pub(crate) table: Source<f32>,
    pub(crate) reach: usize,
}

/// Attention of one shape: scores are q·k · scale, then soft-capped, then biased.
#[derive(Clone, Debug)]
pub(crate) struct Attention {
    pub(crate) layout: Layout,
    pub(crate) mask: AttentionMask,
    /// Scores become cap · tanh(score / cap).
    pub(crate) soft_cap: Option<f32>,
    pub(crate) alibi: Option<Alibi>,
    /// Whether every call has a `DistanceBias`.
    pub(crate) has_relative_bias: bool,
    /// Present if its products use AMX.
    pub(crate) amx: Option<Amx>,
}

impl Attention {
    /// Causal attention.
    #[cfg(test)]
    pub(crate) fn plain(layout: Layout, amx: Option<Amx>) -> Attention {
        let mask = AttentionMask::default();
        Attention { layout, mask, soft_cap: None, alibi: None, has_relative_bias: false, amx }
    }

    /// Validates the shape. The error names the inconsistent sizes.
    pub(crate) fn checked(self) -> Result<Attention, String> {
        let Attention { layout, mask, soft_cap, alibi, .. } = &self;
        let &Layout { num_heads, num_kv_heads, head_dim, value_dim, values_in_keys, .. } = layout;
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            return Err(format!("{num_heads} heads do not divide among {num_kv_heads} kv heads"));
        }
        for (name, dim) in [("head_dim", head_dim), ("value_dim", value_dim)] {
            if dim == 0 || !dim.is_multiple_of(LANES) || dim > MAX_DIM {
                return Err(format!("{name} is {dim}, must be a multiple of {LANES} up to {MAX_DIM}"));
            }
        }
        if values_in_keys && value_dim > head_dim {
            return Err(format!(
                "value_dim is {value_dim}, must be at most head_dim, {head_dim}, when values are in keys"
            ));
        }
        if mask.window == Some(0) || mask.chunk == Some(0) {
            return Err("window or chunk is 0, must be at least 1".to_owned());
        }
        if let Some(cap) = soft_cap.filter(|cap| cap.is_nan() || *cap <= 0.0) {
            return Err(format!("soft_cap is {cap}, must be more than 0"));
        }
        if let Some(alibi) = alibi.as_ref().filter(|alibi| alibi.slopes.len() != num_heads) {
            return Err(format!("{} slopes for {num_heads} heads", alibi.slopes.len()));
        }
        Ok(self)
    }

    /// Whether scores are just q·k · scale.
    pub(super) fn has_plain_scores(&self) -> bool {
        self.soft_cap.is_none() && self.alibi.is_none() && !self.has_relative_bias
    }

    /// Whether this is plain causal attention.
    pub(super) fn is_plain(&self) -> bool {
        self.mask == AttentionMask::default() && self.has_plain_scores()
    }
}
