//! TGI's choice of the answer among several generations of one request.

use crate::generation::Finished;

/// How the answer is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The first generation is the answer; the others are returned with it.
    First,
    /// The best generation is the answer; the next best are returned with it, `num_kept` in all.
    Best { num_kept: usize },
}

impl Choice {
    /// `best_of` generations are ranked, `n` of them are kept.
    pub(super) fn new(best_of: Option<usize>, n: Option<usize>) -> Self {
        match best_of {
            Some(best_of) if best_of > 1 => Self::Best { num_kept: n.unwrap_or(best_of) },
            _ => Self::First,
        }
    }
}

/// The answer first, then the others in their order. COMPAT: as in TGI, the best generation has the highest mean logprob;
/// of equals the first wins.
pub(super) fn choose(finished: Vec<Finished>, choice: Choice) -> Vec<Finished> {
    let Choice::Best { num_kept } = choice else { return finished };
    let mut ranked: Vec<_> = finished.into_iter().enumerate().collect();
    ranked.sort_by(|(_, one), (_, other)| mean_logprob(other).total_cmp(&mean_logprob(one)));
    ranked.truncate(num_kept);
    if let Some((_, others)) = ranked.split_first_mut() {
        others.sort_by_key(|&(index, _)| index);
    }
    ranked.into_iter().map(|(_, finished)| finished).collect()
}

/// The mean logprob of the tokens; NaN ranks last.
fn mean_logprob(finished: &Finished) -> f64 {
    let sum: f64 = finished.tokens.iter().map(|token| f64::from(token.logprob)).sum();
    let num_tokens = u32::try_from(finished.tokens.len()).unwrap_or(u32::MAX);
    let mean = sum / f64::from(num_tokens);
    if mean.is_nan() { f64::NEG_INFINITY } else { mean }
}
