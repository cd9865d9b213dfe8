//! What attention of one layer is made of.

use super::Layout;

/// What a query sees of its context: an interval of positions that ends with its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "python", derive(pyo3::FromPyObject))]
pub struct Sight {
    /// The last so many positions, its own included.
    pub window: Option<usize>,
    /// Those of its own chunk of so many.
    pub chunk: Option<usize>,
}

impl Sight {
    /// Where the interval of the query at this position begins; it never descends from one position to the next.
    pub fn first(&self, position: usize) -> usize {
        let window = self.window.map_or(0, |window| (position + 1).saturating_sub(window));
        let chunk = self.chunk.map_or(0, |chunk| position - position % chunk);
        window.max(chunk)
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

/// Attention of one shape: scores are q·k · scale, then capped, then biased.
#[derive(Clone, Debug)]
pub struct Attention {
    pub layout: Layout,
    pub sight: Sight,
    /// Scores become cap · tanh(score / cap).
    pub soft_cap: Option<f32>,
    pub alibi: Option<Alibi>,
}

impl Attention {
    /// What fits together, or what does not.
    pub fn new(layout: Layout, sight: Sight, soft_cap: Option<f32>, alibi: Option<Alibi>) -> Result<Attention, String> {
        let Layout { num_heads, num_kv_heads, head_dim, .. } = layout;
        if num_kv_heads == 0 || !num_heads.is_multiple_of(num_kv_heads) {
            return Err(format!("{num_heads} heads do not divide among {num_kv_heads} kv heads"));
        }
        if head_dim == 0 || !head_dim.is_multiple_of(16) || head_dim > 256 {
            return Err(format!("head_dim is {head_dim}, must be a multiple of 16 up to 256"));
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
        Ok(Attention { layout, sight, soft_cap, alibi })
    }

    /// Whether scores are q·k · scale and nothing else.
    pub(super) fn has_plain_scores(&self) -> bool {
        self.soft_cap.is_none() && self.alibi.is_none()
    }

    /// Whether it is causal attention and nothing else.
    pub(super) fn is_plain(&self) -> bool {
        self.sight == Sight::default() && self.has_plain_scores()
    }
}
