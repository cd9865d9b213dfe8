//! Routing of a mixture of experts: which experts process a row, and with what weights. All arithmetic is in float64.

/// Scores of experts from their logits. The experts with the highest scores are chosen, and these scores are weights.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scoring {
    /// A softmax over all experts.
    Softmax,
    /// The logits. Weights are their softmax over the chosen experts.
    SoftmaxChosen,
    Sigmoid,
    /// The logits, one after the other: a weight is a softmax over the experts that were not chosen before and are close to the best one,
    /// by a relative distance of at most 2 · `jitter` (<https://arxiv.org/abs/2409.12136>).
    SparseMixer {
        jitter: f64,
    },
}

/// Experts are chosen from the best groups only. A group is consecutive experts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Groups {
    pub(crate) num_groups: usize,
    /// Groups that experts are chosen from, 1 to `num_groups`.
    pub(crate) top_groups: usize,
    /// Best experts of a group whose scores are added to the group's: 1 or 2.
    pub(crate) num_summed: usize,
}

/// Divisor of the chosen experts' weights: their norm plus `epsilon`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct WeightNorm {
    pub(crate) power: f64,
    pub(crate) epsilon: f64,
}

/// How experts and weights follow from a row's logits.
#[derive(Clone, Debug)]
pub(crate) struct Routing {
    pub(crate) num_experts: usize,
    /// Experts of a row, from 1 to `num_experts`.
    pub(crate) top_k: usize,
    pub(crate) scoring: Scoring,
    /// Added to the scores for the choice only; empty, or one per expert.
    pub(crate) correction: Vec<f32>,
    pub(crate) groups: Option<Groups>,
    pub(crate) norm: Option<WeightNorm>,
    /// Factor of the weights, applied last.
    pub(crate) scale: f64,
    /// Whether weights are factors of the experts' inputs, not of their outputs.
    pub(crate) scales_inputs: bool,
}

impl Routing {
    /// Every row goes to the `top_k` experts with the highest logits, with the softmax over all as weights.
    #[cfg(test)]
    pub(crate) fn plain(num_experts: usize, top_k: usize) -> Routing {
        let (correction, groups, norm) = (Vec::new(), None, None);
        let (scoring, scale, scales_inputs) = (Scoring::Softmax, 1.0, false);
        Routing { num_experts, top_k, scoring, correction, groups, norm, scale, scales_inputs }
    }

    /// Validates the sizes. The error names those that do not fit together.
    pub(crate) fn checked(self) -> Result<Routing, String> {
        let Routing { num_experts, top_k, .. } = self;
        if !(1..=num_experts).contains(&top_k) {
            return Err(format!("a row cannot go to {top_k} of {num_experts} experts"));
        }
        if !self.correction.is_empty() && self.correction.len() != num_experts {
            return Err(format!("there are {} corrections for {num_experts} experts", self.correction.len()));
        }
        if let Some(Groups { num_groups, top_groups, num_summed }) = self.groups {
            let is_divisible = num_groups > 0 && num_experts.is_multiple_of(num_groups);
            if !is_divisible || !(1..=num_groups).contains(&top_groups) || !(1..=2).contains(&num_summed) {
                return Err(format!(
                    "{num_experts} experts cannot be chosen from {top_groups} of {num_groups} groups by {num_summed}"
                ));
            }
            let per_group = num_experts / num_groups;
            if top_groups * per_group < top_k || per_group < num_summed {
                return Err(format!("{top_k} experts cannot be chosen from {top_groups} groups of {per_group}"));
            }
        }
        Ok(self)
    }

    /// Writes the experts of a row, the best first, the lower number first of equals, and their weights. `logit`: of an expert.
    ///
    /// # Safety
    /// `experts` and `weights` must have room for `top_k`.
    pub(crate) unsafe fn apply_row(&self, logit: impl Fn(usize) -> f64, experts: *mut i64, weights: *mut f32) {
        let logits: Vec<f64> = (0..self.num_experts).map(logit).collect();
        let chosen = match self.scoring {
            Scoring::SparseMixer { jitter } => self.one_by_one(&logits, jitter),
            _ => self.by_scores(&logits),
        };
        for (place, (expert, weight)) in chosen.into_iter().enumerate() {
            // SAFETY: the caller vouches for the room.
            unsafe {
                experts.add(place).write(expert as i64);
                weights.add(place).write((weight * self.scale) as f32);
            }
        }
    }

    /// The experts of a row and their weights, before the scale.
    fn by_scores(&self, logits: &[f64]) -> Vec<(usize, f64)> {
        let scores = match self.scoring {
            Scoring::Softmax => softmax(logits),
            Scoring::Sigmoid => logits.iter().map(|logit| 1.0 / (1.0 + (-logit).exp())).collect(),
            Scoring::SoftmaxChosen | Scoring::SparseMixer { .. } => logits.to_vec(),
        };
        let mut ranks = scores.clone();
        ranks.iter_mut().zip(&self.correction).for_each(|(rank, &correction)| *rank += f64::from(correction));
        if let Some(groups) = self.groups {
            groups.keep_best(&mut ranks);
        }
        let chosen = highest(&ranks, self.top_k);
        let mut weights: Vec<f64> = chosen.iter().map(|&expert| scores[expert]).collect();
        if self.scoring == Scoring::SoftmaxChosen {
            weights = softmax(&weights);
        }
        if let Some(WeightNorm { power, epsilon }) = self.norm {
            let sum: f64 = weights.iter().map(|weight| weight.powf(power)).sum();
            let divisor = sum.powf(1.0 / power) + epsilon;
            weights.iter_mut().for_each(|weight| *weight /= divisor);
        }
        chosen.into_iter().zip(weights).collect()
    }

    /// The same of SparseMixer.
    fn one_by_one(&self, logits: &[f64], jitter: f64) -> Vec<(usize, f64)> {
        let chosen = highest(logits, self.top_k);
        let weight = |place: usize| {
            let best = logits[chosen[place]];
            let is_left = |expert: &usize| !chosen[..place].contains(expert);
            let is_far = |&expert: &usize| (best - logits[expert]) / logits[expert].abs().max(best) > 2.0 * jitter;
            let close = (0..logits.len()).filter(is_left).filter(|expert| !is_far(expert));
            1.0 / close.map(|expert| (logits[expert] - best).exp()).sum::<f64>()
        };
        chosen.iter().enumerate().map(|(place, &expert)| (expert, weight(place))).collect()
    }
}

impl Groups {
    /// Sets the ranks outside of the best groups to -infinity.
    fn keep_best(self, ranks: &mut [f64]) {
        let per_group = ranks.len() / self.num_groups;
        let rank = |group: &[f64]| highest(group, self.num_summed).into_iter().map(|expert| group[expert]).sum();
        let of_groups: Vec<f64> = ranks.chunks(per_group).map(rank).collect();
        let best = highest(&of_groups, self.top_groups);
        for (group, ranks) in ranks.chunks_mut(per_group).enumerate() {
            if !best.contains(&group) {
                ranks.fill(f64::NEG_INFINITY);
            }
        }
    }
}

/// The places of the `count` highest numbers, the highest first, the first of equals. There are as many places if some are NaN.
fn highest(numbers: &[f64], count: usize) -> Vec<usize> {
    let mut left: Vec<usize> = (0..numbers.len()).collect();
    let next = |_| {
        let best = (1..left.len()).fold(0, |best, at| if numbers[left[at]] > numbers[left[best]] { at } else { best });
        left.remove(best)
    };
    (0..count).map(next).collect()
}

fn softmax(logits: &[f64]) -> Vec<f64> {
    let highest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let exponentials = logits.iter().map(|logit| (logit - highest).exp());
    let total: f64 = exponentials.clone().sum();
    exponentials.map(|exponential| exponential / total).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(routing: &Routing, logits: &[f64]) -> (Vec<i64>, Vec<f32>) {
        let (mut experts, mut weights) = (vec![-1; routing.top_k], vec![f32::NAN; routing.top_k]);
        // SAFETY: there is room for the chosen ones.
        unsafe { routing.apply_row(|expert| logits[expert], experts.as_mut_ptr(), weights.as_mut_ptr()) };
        (experts, weights)
    }

    fn sigmoid(logit: f64) -> f32 {
        (1.0 / (1.0 + (-logit).exp())) as f32
    }

    #[test]
    fn the_highest_are_chosen_and_the_first_of_equals() {
        assert_eq!(route(&Routing::plain(4, 2), &[1.0, 3.0, 2.0, 3.0]).0, [1, 3]);
        assert_eq!(route(&Routing::plain(4, 2), &[0.0; 4]), (vec![0, 1], vec![0.25; 2]));
    }

    #[test]
    fn weights_are_a_softmax_over_all_or_the_chosen_or_normalized() {
        let logits = [0.0, 1.0, 0.0, 1.0];
        let e = std::f32::consts::E;
        assert_eq!(route(&Routing { scale: 2.0, ..Routing::plain(4, 2) }, &logits).1, [2.0 * e / (2.0 + 2.0 * e); 2]);
        assert_eq!(route(&Routing { scoring: Scoring::SoftmaxChosen, ..Routing::plain(4, 2) }, &logits).1, [0.5; 2]);
        for (power, weight) in [(1.0, 0.5), (2.0, 0.5f32.sqrt())] {
            let norm = Some(WeightNorm { power, epsilon: 0.0 });
            assert_eq!(route(&Routing { norm, ..Routing::plain(4, 2) }, &logits).1, [weight; 2]);
        }
    }

    #[test]
    fn a_correction_changes_the_choice_but_not_the_weights() {
        let correction = vec![0.0, -1.0, 0.0, 0.9];
        let routing = Routing { scoring: Scoring::Sigmoid, correction, ..Routing::plain(4, 2) };
        let (experts, weights) = route(&routing, &[2.0, 1.0, 0.0, -1.0]);
        assert_eq!((experts, weights), (vec![3, 0], vec![sigmoid(-1.0), sigmoid(2.0)]));
    }

    #[test]
    fn experts_outside_of_the_best_groups_are_not_chosen() {
        let of = |num_summed| {
            let groups = Some(Groups { num_groups: 3, top_groups: 1, num_summed });
            route(
                &Routing { groups, scoring: Scoring::Sigmoid, ..Routing::plain(6, 2) },
                &[3.0, -9.0, 1.0, 2.0, 0.0, 2.5],
            )
        };
        assert_eq!(of(1).0, [0, 1]);
        assert_eq!(of(2).0, [3, 2]);
    }

    #[test]
    fn sparsemixer_gives_a_distant_best_expert_the_whole_weight() {
        let routing = Routing { scoring: Scoring::SparseMixer { jitter: 0.01 }, ..Routing::plain(4, 2) };
        let (experts, weights) = route(&routing, &[1.0, 4.0, 3.0, 2.99]);
        assert_eq!((experts, weights), (vec![1, 2], vec![1.0, sigmoid(0.01)]));
    }

    #[test]
    fn a_row_with_nan_has_different_experts() {
        let groups = Some(Groups { num_groups: 2, top_groups: 1, num_summed: 2 });
        for routing in [
            Routing::plain(4, 2),
            Routing { groups, scoring: Scoring::Sigmoid, ..Routing::plain(4, 2) },
            Routing { scoring: Scoring::SparseMixer { jitter: 0.1 }, ..Routing::plain(4, 2) },
        ] {
            let (experts, weights) = route(&routing, &[f64::NAN; 4]);
            assert_ne!(experts[0], experts[1], "{routing:?}");
            assert!(weights.iter().all(|weight| weight.is_nan()), "{routing:?}");
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        let groups = |num_groups, top_groups, num_summed| Some(Groups { num_groups, top_groups, num_summed });
        for wrong in [
            Routing::plain(4, 0),
            Routing::plain(4, 5),
            Routing { correction: vec![0.0; 3], ..Routing::plain(4, 1) },
            Routing { groups: groups(0, 0, 1), ..Routing::plain(4, 1) },
            Routing { groups: groups(3, 1, 1), ..Routing::plain(4, 1) },
            Routing { groups: groups(2, 3, 1), ..Routing::plain(4, 1) },
            Routing { groups: groups(2, 1, 3), ..Routing::plain(4, 1) },
            Routing { groups: groups(4, 1, 2), ..Routing::plain(4, 1) },
            Routing { groups: groups(2, 1, 1), ..Routing::plain(4, 3) },
        ] {
            assert!(wrong.clone().checked().is_err(), "{wrong:?}");
        }
        assert!(Routing { groups: groups(2, 1, 2), ..Routing::plain(4, 2) }.checked().is_ok());
    }
}
