//! What attention of one layer is made of.

use super::Layout;
use crate::pool::Source;
use crate::simd::LANES;

/// Numbers of a head, at most.
pub const MAX_DIM: usize = 1024;

/// Of a sequence that begins with a source (encoder and decoder): what a query sees.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Part {
    /// Everything up to its own position; of most models, which have no sources.
    #[default]
    Context,
    /// The whole source, from anywhere.
    Source,
    /// What stands behind the source, up to its own position.
    Answer,
}

/// What a query sees of its context: an interval of positions. It ends with the query's own, but for sources.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Sight {
    /// The last so many positions, its own included.
    pub window: Option<usize>,
    /// Those of its own chunk of so many.
    pub chunk: Option<usize>,
    pub part: Part,
}

impl Sight {
    /// Where the interval of the query at this position begins, in a sequence with such a source. It never descends from one
    /// position to the next.
    pub fn first(&self, position: usize, source_len: usize) -> usize {
        let part = match self.part {
            Part::Context => 0,
            Part::Source => return 0,
            Part::Answer => source_len,
        };
        let window = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let chunk = self.chunk.map_or(0, |chunk| position - position % chunk);
        part.max(window).max(chunk)
    }

    /// Where it stops; nor does that descend.
    pub fn end(&self, position: usize, source_len: usize) -> usize {
        if self.part == Part::Source { source_len } else { position + 1 }
    }
}

/// A bias on scores: a head's slope times the key's position (<https://arxiv.org/abs/2108.12409>).
#[derive(Clone, Debug)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Alibi {
    /// One for each head.
    pub slopes: Vec<f32>,
    /// Added before scores are scaled, so scaled with them.
    pub is_scaled: bool,
    /// Slope, position and product are rounded to bf16.
    pub is_bfloat16: bool,
}

/// A bias on scores that was learned, by how many positions a key is ahead of its query (T5). [heads][2 · reach + 1], from
/// -reach to reach; what is farther counts as the farthest.
#[derive(Clone, Copy)]
pub struct DistanceBias {
    pub table: Source<f32>,
    pub reach: usize,
}

/// Attention of one shape: scores are q·k · scale, then capped, then biased.
#[derive(Clone, Debug)]
pub struct Attention {
    pub layout: Layout,
    pub sight: Sight,
    /// Scores become cap · tanh(score / cap).
    pub soft_cap: Option<f32>,
    pub alibi: Option<Alibi>,
    /// Whether every call brings a `DistanceBias`.
    pub has_bias: bool,
}

impl Attention {
    /// Causal attention.
    pub fn plain(layout: Layout) -> Attention {
        Attention { layout, sight: Sight::default(), soft_cap: None, alibi: None, has_bias: false }
    }

    /// Itself, if it fits together, or what does not.
    pub fn checked(self) -> Result<Attention, String> {
        let Attention { layout, sight, soft_cap, alibi, .. } = &self;
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
        if sight.window == Some(0) || sight.chunk == Some(0) {
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

    /// Whether scores are q·k · scale and nothing else.
    pub(super) fn has_plain_scores(&self) -> bool {
        self.soft_cap.is_none() && self.alibi.is_none() && !self.has_bias
    }

    /// Whether it is causal attention and nothing else.
    pub(super) fn is_plain(&self) -> bool {
        self.sight == Sight::default() && self.has_plain_scores()
    }
}
