//! Learns how long a step takes: a linear model with non-negative coefficients over what the step computes. Recent
//! steps weigh most, because the relation is not really linear: small steps are bound by memory, large ones by
//! arithmetic.
//!
//! Pure: durations are arguments. The model influences only speed, never correctness.

use std::time::Duration;

/// Features of a step.
const NUM_TERMS: usize = 5;
/// 1 for every step that computes anything.
const FIXED: usize = 0;
/// Sequences that decode.
const DECODES: usize = 1;
/// Tokens that the decodes attend to.
const DECODE_CONTEXT: usize = 2;
/// Prompt tokens.
const PREFILL_TOKENS: usize = 3;
/// Tokens that the prompt tokens attend to, summed over them.
const PREFILL_CONTEXT: usize = 4;
/// Terms in the order in which they absorb an error: where the evidence is ambiguous, the first one takes it.
const ORDER: [usize; NUM_TERMS] = [PREFILL_TOKENS, FIXED, DECODES, PREFILL_CONTEXT, DECODE_CONTEXT];

/// Steps of one kind after which a step's weight has decayed to 1/e.
const MEMORY_STEPS: f64 = 64.0;
/// A duration is clamped to between 1/`MAX_SURPRISE` and `MAX_SURPRISE` times what was expected, so that a page fault
/// or a busy neighbour has little influence.
const MAX_SURPRISE: f64 = 2.0;
/// After this many surprises in a row, durations are no longer clamped: the model is wrong.
const MAX_SURPRISES: u32 = 3;
/// Weight of steps without decodes. They are evidence for steps with decodes too, but weak evidence.
const PREFILL_ALONE_WEIGHT: f64 = 0.1;
/// Below this many rows, the model also learns the time of steps of decodes alone for each number of rows. A kernel that computes
/// several rows in a pass, or a recorded step on a GPU, takes as long for one row as for some, and the terms are only a line. Steps
/// with drafts have a multiple of the rows of those without, and both are in the table.
const END_OF_ROWS: usize = 512;
/// Weight of the newest step with a number of rows.
const RATIO_RATE: f64 = 1.0 / 8.0;
/// Share of the way back to the line, for all other numbers of rows, so that a number that seemed slow is tried again.
const RATIO_RECOVERY: f64 = 1.0 / 512.0;
/// Coordinate-descent sweeps after each step; they continue from the last coefficients.
const NUM_SWEEPS: usize = 150;

/// What a step computes, in the terms of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Work {
    terms: [f64; NUM_TERMS],
}

/// What is expected of a planned step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Estimate {
    pub(crate) work: Work,
    pub(crate) seconds: f64,
    /// Target duration in seconds; `None` when no running sequence decodes, so that prompts delay no token, or when
    /// nothing is known yet.
    pub(crate) target_seconds: Option<f64>,
}

impl Work {
    /// Adds a decode of a sequence with `num_computed_tokens`.
    pub(crate) fn add_decode(&mut self, num_computed_tokens: u32) {
        self.terms[FIXED] = 1.0;
        self.terms[DECODES] += 1.0;
        self.terms[DECODE_CONTEXT] += f64::from(num_computed_tokens);
    }

    /// Adds draft tokens to the decodes: each is a row of the model, as a decode is.
    pub(crate) fn add_drafts(&mut self, num_tokens: u32) {
        *self = self.with_decodes(num_tokens as usize);
    }

    pub(crate) fn num_decodes(&self) -> f64 {
        self.terms[DECODES]
    }

    /// The same work with `num_more` decodes more, of the same mean context.
    pub(crate) fn with_decodes(mut self, num_more: usize) -> Self {
        let growth = (self.terms[DECODES] + num_more as f64) / self.terms[DECODES];
        self.terms[DECODES] *= growth;
        self.terms[DECODE_CONTEXT] *= growth;
        self
    }

    /// The same work, split into `num_steps` steps.
    pub(crate) fn in_steps(mut self, num_steps: u32) -> Self {
        self.terms[FIXED] = f64::from(num_steps);
        self
    }

    /// Adds `num_tokens` prompt tokens that follow `num_computed_tokens`.
    pub(crate) fn add_prefill(&mut self, num_computed_tokens: u32, num_tokens: u32) {
        let (context, tokens) = (f64::from(num_computed_tokens), f64::from(num_tokens));
        self.terms[FIXED] = 1.0;
        self.terms[PREFILL_TOKENS] += tokens;
        self.terms[PREFILL_CONTEXT] += tokens * (context + tokens / 2.0);
    }

    pub(crate) fn has_decodes(&self) -> bool {
        self.terms[DECODES] > 0.0
    }

    pub(crate) fn has_prefills(&self) -> bool {
        self.terms[PREFILL_TOKENS] > 0.0
    }

    /// 0: empty, 1: decodes only, 2: prompts only, 3: both.
    fn kind(&self) -> usize {
        usize::from(self.has_decodes()) + 2 * usize::from(self.has_prefills())
    }
}

/// Weighted sums over the steps of one kind: all that a least-squares fit needs of them.
///
/// Each kind decays only with its own steps, so that an hour of decodes does not erase what is known about prompts.
#[derive(Clone, Copy, Debug, Default)]
struct Evidence {
    products: [[f64; NUM_TERMS]; NUM_TERMS],
    targets: [f64; NUM_TERMS],
    num_steps: f64,
}

impl Evidence {
    fn add(&mut self, terms: &[f64; NUM_TERMS], seconds: f64, scale: f64) {
        let keep = 1.0 - 1.0 / MEMORY_STEPS;
        // Relative errors count: a millisecond too much is worse in a short step than in a long one.
        let weight = 1.0 / (scale * scale);
        for (row, (products, target)) in self.products.iter_mut().zip(&mut self.targets).enumerate() {
            *target = *target * keep + weight * terms[row] * seconds;
            for (product, term) in products.iter_mut().zip(terms) {
                *product = *product * keep + weight * terms[row] * term;
            }
        }
        self.num_steps = self.num_steps * keep + 1.0;
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct CostModel {
    /// Seconds for each unit of a term.
    coefficients: [f64; NUM_TERMS],
    /// By `Work::kind`.
    evidence: [Evidence; 4],
    num_surprises: u32,
    /// By number of rows, how much longer than by the terms steps of decodes alone take, less one.
    excess: Vec<f64>,
}

impl CostModel {
    /// Whether any step has been observed.
    pub(crate) fn is_informed(&self) -> bool {
        self.evidence.iter().any(|evidence| evidence.num_steps > 0.0)
    }

    /// Learns from a finished step, in constant time.
    pub(crate) fn observe(&mut self, work: &Work, duration: Duration) {
        let seconds = duration.as_secs_f64();
        if work.kind() == 0 || seconds <= 0.0 {
            return;
        }
        let expected = self.seconds(work);
        let plausible = seconds.clamp(expected / MAX_SURPRISE, expected * MAX_SURPRISE);
        self.num_surprises = if plausible == seconds { 0 } else { self.num_surprises + 1 };
        if work.kind() == 1 && expected > 0.0 {
            self.learn_rows(work.num_decodes() as usize, plausible / expected - 1.0);
        }
        let evidence = &mut self.evidence[work.kind()];
        let is_new = evidence.num_steps < f64::from(MAX_SURPRISES);
        if is_new || self.num_surprises > MAX_SURPRISES {
            evidence.add(&work.terms, seconds, seconds);
        } else {
            evidence.add(&work.terms, plausible, expected);
        }
        self.fit();
    }

    fn learn_rows(&mut self, num_rows: usize, excess: f64) {
        if (self.excess.len()..END_OF_ROWS).contains(&num_rows) {
            self.excess.resize(num_rows + 1, 0.0);
        }
        for (rows, known) in self.excess.iter_mut().enumerate() {
            if rows == num_rows {
                *known += (excess - *known) * RATIO_RATE;
            } else {
                *known -= *known * RATIO_RECOVERY;
            }
        }
    }

    /// Moves towards the non-negative coefficients that explain the evidence best, by coordinate descent. Where the
    /// evidence is ambiguous (always the same number of decodes and nothing else, say), the coefficients stay near the
    /// previous ones.
    fn fit(&mut self) {
        let weights = [0.0, 1.0, PREFILL_ALONE_WEIGHT, 1.0];
        let mut sum = Evidence::default();
        for (evidence, weight) in self.evidence.iter().zip(weights) {
            for row in 0..NUM_TERMS {
                sum.targets[row] += weight * evidence.targets[row];
                for column in 0..NUM_TERMS {
                    sum.products[row][column] += weight * evidence.products[row][column];
                }
            }
        }
        for _ in 0..NUM_SWEEPS {
            for term in ORDER {
                let own = sum.products[term][term];
                if own > 0.0 {
                    let explained: f64 = sum.products[term].iter().zip(&self.coefficients).map(|(a, b)| a * b).sum();
                    let coefficient = self.coefficients[term] + (sum.targets[term] - explained) / own;
                    self.coefficients[term] = coefficient.max(0.0);
                }
            }
        }
    }

    /// Expected seconds of a step; 0 when nothing is known.
    pub(crate) fn seconds(&self, work: &Work) -> f64 {
        work.terms.iter().zip(&self.coefficients).map(|(term, coefficient)| term * coefficient).sum()
    }

    /// Like `seconds`, for decodes alone, corrected by what was measured with this number of rows.
    pub(crate) fn seconds_of_rows(&self, work: &Work) -> f64 {
        let excess = self.excess.get(work.num_decodes() as usize).copied().unwrap_or(0.0);
        self.seconds(work) * (1.0 + excess)
    }

    /// Prompt tokens after `num_computed_tokens` that can be computed in `seconds`. 0 while nothing is known about
    /// prompts.
    pub(crate) fn prefill_tokens(&self, seconds: f64, num_computed_tokens: u32) -> u32 {
        let is_known = self.evidence.iter().any(|evidence| evidence.products[PREFILL_TOKENS][PREFILL_TOKENS] > 0.0);
        if seconds <= 0.0 || !is_known {
            return 0;
        }
        let by_context = self.coefficients[PREFILL_CONTEXT];
        let first = self.coefficients[PREFILL_TOKENS] + by_context * f64::from(num_computed_tokens);
        // The root of by_context / 2 · n² + first · n = seconds, in the form that also holds without the square. If
        // tokens cost nothing this is infinite: an `as` from f64 saturates.
        (2.0 * seconds / (first + (first * first + 2.0 * by_context * seconds).sqrt())) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decodes(num: usize) -> Work {
        let mut work = Work::default();
        work.add_decode(100);
        work.with_decodes(num - 1)
    }

    /// Seven decodes and `num_tokens` prompt tokens, and what they take without other processes: 10 ms, and 0.5 ms for each prompt token.
    fn mixed(num_tokens: u32) -> (Work, Duration) {
        let mut work = decodes(7);
        if num_tokens > 0 {
            work.add_prefill(0, num_tokens);
        }
        (work, Duration::from_micros(10_000 + 500 * u64::from(num_tokens)))
    }

    /// Prompt tokens that fit into a step of 40 ms with seven decodes.
    fn affordable(cost: &CostModel) -> u32 {
        cost.prefill_tokens(0.04 - cost.seconds(&decodes(7)), 0)
    }

    /// Runs `num_steps` steps that take `slowdown` times as long as without other processes. Every fourth one has as many prompt
    /// tokens as seem to fit.
    fn learn(cost: &mut CostModel, num_steps: u32, slowdown: f64) {
        for step in 0..num_steps {
            let num_tokens = if step % 4 == 0 { affordable(cost).clamp(16, 128) } else { 0 };
            let (work, duration) = mixed(num_tokens);
            cost.observe(&work, duration.mul_f64(slowdown));
        }
    }

    /// Other processes make steps slower, and then end. `affordable` is within a tenth of what it was before them after at most 128
    /// steps with prompts.
    #[test]
    fn prompts_get_their_tokens_back_after_other_processes_have_ended() {
        for slowdown in [1.25, 1.5, 2.0, 3.0, 5.0] {
            let mut cost = CostModel::default();
            learn(&mut cost, 400, 1.0);
            let before = f64::from(affordable(&cost));
            learn(&mut cost, 400, slowdown);
            let beside = f64::from(affordable(&cost));
            assert!(beside < 0.9 * before, "{slowdown} times: {beside} tokens beside them, {before} before");
            let num_steps = (0..).find(|_| {
                let is_back = f64::from(affordable(&cost)) >= 0.9 * before;
                learn(&mut cost, 4, 1.0);
                is_back
            });
            assert!(num_steps.is_some_and(|num| num <= 128), "{slowdown} times: {num_steps:?} steps with prompts");
        }
    }

    #[test]
    fn steps_whose_rows_cost_much_at_once_are_known_by_their_number() {
        let seconds = |num: usize| if num <= 2 { 0.013 } else { 0.021 };
        let mut cost = CostModel::default();
        for round in 0..400 {
            let num = 1 + round % 6;
            cost.observe(&decodes(num), Duration::from_secs_f64(seconds(num)));
        }
        for num in 1..=6 {
            let found = cost.seconds_of_rows(&decodes(num));
            assert!((found / seconds(num) - 1.0).abs() < 0.05, "{num} rows: {found}");
        }
        // Beyond them, and where there are prompts, the terms alone count.
        assert_eq!(cost.seconds_of_rows(&decodes(END_OF_ROWS)), cost.seconds(&decodes(END_OF_ROWS)));
    }
}
