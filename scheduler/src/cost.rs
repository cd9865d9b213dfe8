//! How long a step takes, learned from the steps that were taken: seconds as a sum of non-negative prices times what is in
//! the step. A line is not the truth (small steps wait for memory, large ones for arithmetic), so recent steps count
//! most, and those that a bound is chosen for count more than prompts that are computed alone.
//!
//! Pure: durations are arguments. Nothing here decides what is right, only what is quick.

use std::time::Duration;

/// What is in a step, in the units that are paid for.
const NUM_TERMS: usize = 5;
/// Anything at all.
const FIXED: usize = 0;
/// Sequences that decode.
const DECODES: usize = 1;
/// Tokens that those look back on.
const DECODE_CONTEXT: usize = 2;
/// Tokens of prompts.
const PREFILL_TOKENS: usize = 3;
/// Tokens that each of those looks back on, added up.
const PREFILL_CONTEXT: usize = 4;
/// What a step that says little about it is put down to: the first that can explain it.
const ORDER: [usize; NUM_TERMS] = [PREFILL_TOKENS, FIXED, DECODES, PREFILL_CONTEXT, DECODE_CONTEXT];

/// Steps of a kind after which one counts for 1/e.
const MEMORY_STEPS: f64 = 64.0;
/// A step that took more than so many times what was expected, or less than that part of it, counts as if it had taken
/// just so long: a page fault or a busy neighbour is forgotten.
const MAX_SURPRISE: f64 = 2.0;
/// After so many surprises in a row the steps are right and the model is wrong.
const MAX_DISBELIEF: u32 = 3;
/// What a step of prompts alone says about one with decodes, in steps with decodes.
const PREFILL_ALONE_WEIGHT: f64 = 0.1;
/// Passes over the prices after each step; they go on from where the last ones ended.
const NUM_SWEEPS: usize = 150;

/// What a step computes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Work {
    terms: [f64; NUM_TERMS],
}

impl Work {
    /// One more sequence decodes, with `num_computed_tokens` behind it.
    pub fn add_decode(&mut self, num_computed_tokens: u32) {
        self.terms[FIXED] = 1.0;
        self.terms[DECODES] += 1.0;
        self.terms[DECODE_CONTEXT] += f64::from(num_computed_tokens);
    }

    /// The same with so many more decodes, of the same context in the mean.
    pub fn with_decodes(mut self, num_more: usize) -> Self {
        let growth = (self.terms[DECODES] + num_more as f64) / self.terms[DECODES];
        self.terms[DECODES] *= growth;
        self.terms[DECODE_CONTEXT] *= growth;
        self
    }

    /// `num_tokens` more of a prompt, with `num_computed_tokens` behind them.
    pub fn add_prefill(&mut self, num_computed_tokens: u32, num_tokens: u32) {
        let (context, tokens) = (f64::from(num_computed_tokens), f64::from(num_tokens));
        self.terms[FIXED] = 1.0;
        self.terms[PREFILL_TOKENS] += tokens;
        self.terms[PREFILL_CONTEXT] += tokens * (context + tokens / 2.0);
    }

    pub fn has_decodes(&self) -> bool {
        self.terms[DECODES] > 0.0
    }

    pub fn has_prefills(&self) -> bool {
        self.terms[PREFILL_TOKENS] > 0.0
    }

    fn kind(&self) -> usize {
        usize::from(self.has_decodes()) + 2 * usize::from(self.has_prefills())
    }
}

/// Weighted sums over the steps of one kind: all that a least-squares fit needs of them.
///
/// Each kind forgets by its own steps only, so that an hour of decodes does not wash out what a prompt costs.
#[derive(Clone, Copy, Debug, Default)]
struct Evidence {
    products: [[f64; NUM_TERMS]; NUM_TERMS],
    targets: [f64; NUM_TERMS],
    num_steps: f64,
}

impl Evidence {
    fn add(&mut self, terms: &[f64; NUM_TERMS], seconds: f64, scale: f64) {
        let keep = 1.0 - 1.0 / MEMORY_STEPS;
        // Relative errors count: a wrong millisecond in a short step is worse than in a long one.
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
    prices: [f64; NUM_TERMS],
    /// Of steps with decodes, with prefills, with both; nothing is known of those with neither.
    evidence: [Evidence; 4],
    num_surprises: u32,
}

impl CostModel {
    /// Whether any step has been seen.
    pub fn is_informed(&self) -> bool {
        self.evidence.iter().any(|evidence| evidence.num_steps > 0.0)
    }

    /// Learns from a step that was done. Constant time.
    pub fn observe(&mut self, work: &Work, duration: Duration) {
        let seconds = duration.as_secs_f64();
        if work.kind() == 0 || seconds <= 0.0 {
            return;
        }
        let expected = self.seconds(work);
        let plausible = seconds.clamp(expected / MAX_SURPRISE, expected * MAX_SURPRISE);
        self.num_surprises = if plausible == seconds { 0 } else { self.num_surprises + 1 };
        let evidence = &mut self.evidence[work.kind()];
        let is_new = evidence.num_steps < f64::from(MAX_DISBELIEF);
        if is_new || self.num_surprises > MAX_DISBELIEF {
            evidence.add(&work.terms, seconds, seconds);
        } else {
            evidence.add(&work.terms, plausible, expected);
        }
        self.fit();
    }

    /// Goes on toward the non-negative prices that explain the evidence best, one price at a time. Where the evidence
    /// leaves a choice (decodes only, always of the same number) this stays near the prices it came from.
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
                    let explained: f64 = sum.products[term].iter().zip(&self.prices).map(|(a, b)| a * b).sum();
                    let price = self.prices[term] + (sum.targets[term] - explained) / own;
                    self.prices[term] = price.max(0.0);
                }
            }
        }
    }

    /// Seconds that a step should take; 0 when nothing is known.
    pub fn seconds(&self, work: &Work) -> f64 {
        work.terms.iter().zip(&self.prices).map(|(term, price)| term * price).sum()
    }

    /// Tokens of a prompt, with `num_computed_tokens` behind them, that can be computed in so many seconds. None while
    /// nothing is known about prompts.
    pub fn prefill_tokens(&self, seconds: f64, num_computed_tokens: u32) -> u32 {
        let is_known = self.evidence.iter().any(|evidence| evidence.products[PREFILL_TOKENS][PREFILL_TOKENS] > 0.0);
        if seconds <= 0.0 || !is_known {
            return 0;
        }
        let by_context = self.prices[PREFILL_CONTEXT];
        let first = self.prices[PREFILL_TOKENS] + by_context * f64::from(num_computed_tokens);
        // The root of by_context / 2 · n² + first · n = seconds, in the form that also holds without a square. What costs
        // nothing is without end: an `as` from f64 saturates.
        (2.0 * seconds / (first + (first * first + 2.0 * by_context * seconds).sqrt())) as u32
    }
}
