//! Several generations of one request: which of them is the answer, and what all of them cost.

use super::running::Finished;
use crate::telemetry::RequestSummary;

/// How the answer is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    /// The first is the answer, all others come along.
    First,
    /// The best is the answer; of the others, so many of the best come along that there are `num_kept` in all.
    Best { num_kept: usize },
}

impl Choice {
    /// `best_of` says how many are ranked, `n` how many are wanted of them.
    pub(super) fn new(best_of: Option<usize>, n: Option<usize>) -> Self {
        match best_of {
            Some(best_of) if best_of > 1 => Self::Best { num_kept: n.unwrap_or(best_of) },
            _ => Self::First,
        }
    }
}

/// The answer first, then the others in their order. COMPAT: as in TGI the best has the highest mean logprob of its
/// tokens; of equals it is the first.
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

/// What is not a number is worse than anything.
fn mean_logprob(finished: &Finished) -> f64 {
    let sum: f64 = finished.tokens.iter().map(|token| f64::from(token.logprob)).sum();
    let num_tokens = u32::try_from(finished.tokens.len()).unwrap_or(u32::MAX);
    let mean = sum / f64::from(num_tokens);
    if mean.is_nan() { f64::NEG_INFINITY } else { mean }
}

/// The prompt counts once, whatever is generated from it.
pub(super) fn cost(finished: &[Finished]) -> RequestSummary {
    let mut all = RequestSummary::default();
    finished.iter().for_each(|finished| all.add(&finished.summary()));
    if let Some(first) = finished.first().map(Finished::summary) {
        all.num_prompt_tokens = first.num_prompt_tokens;
        all.num_cached_tokens = first.num_cached_tokens;
    }
    all
}
