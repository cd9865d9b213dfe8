//! Routing of a mixture of experts: which experts process a row, and with what weights.

use crate::element::Element;

/// How experts and weights follow from a row's logits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routing {
    pub(crate) num_experts: usize,
    /// Experts of a row, from 1 to `num_experts`.
    pub(crate) top_k: usize,
    /// Whether the softmax is over the chosen experts instead of all.
    pub(crate) over_chosen: bool,
    /// Added to the sum of the chosen experts' weights, which they are then divided by; `None`: they are not.
    pub(crate) norm_epsilon: Option<f64>,
    /// Factor of the weights, applied last.
    pub(crate) scale: f64,
}

impl Routing {
    /// Writes the experts of a row, the highest logit first, the lower number first of equals, and their weights.
    ///
    /// # Safety
    /// `logits` must have `num_experts` elements; `experts` and `weights` room for `top_k`.
    pub(crate) unsafe fn apply_row(&self, logits: *const Element, experts: *mut i64, weights: *mut f32) {
        // SAFETY: the caller vouches for the logits.
        let logit = |expert: usize| f64::from(unsafe { logits.add(expert).read() }.to_f32());
        let mut left: Vec<usize> = (0..self.num_experts).collect();
        let mut chosen = Vec::with_capacity(self.top_k);
        while chosen.len() < self.top_k {
            let best = (1..left.len()).fold(0, |best, at| if logit(left[at]) > logit(left[best]) { at } else { best });
            chosen.push(left.remove(best));
        }
        let highest = logit(chosen[0]);
        let exponential = |expert: usize| (logit(expert) - highest).exp();
        let total: f64 = if self.over_chosen {
            chosen.iter().map(|&expert| exponential(expert)).sum()
        } else {
            (0..self.num_experts).map(exponential).sum()
        };
        let probabilities: Vec<f64> = chosen.iter().map(|&expert| exponential(expert) / total).collect();
        let divisor = self.norm_epsilon.map_or(1.0, |epsilon| probabilities.iter().sum::<f64>() + epsilon);
        for (place, (&expert, probability)) in chosen.iter().zip(probabilities).enumerate() {
            // SAFETY: the caller vouches for the room.
            unsafe {
                experts.add(place).write(expert as i64);
                weights.add(place).write((probability / divisor * self.scale) as f32);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(routing: &Routing, logits: &[f32]) -> (Vec<i64>, Vec<f32>) {
        let logits: Vec<Element> = logits.iter().map(|&logit| Element::from_f32(logit)).collect();
        let (mut experts, mut weights) = (vec![-1; routing.top_k], vec![f32::NAN; routing.top_k]);
        // SAFETY: there is a logit for each expert, and room for the chosen ones.
        unsafe { routing.apply_row(logits.as_ptr(), experts.as_mut_ptr(), weights.as_mut_ptr()) };
        (experts, weights)
    }

    const TWO_OF_FOUR: Routing =
        Routing { num_experts: 4, top_k: 2, over_chosen: false, norm_epsilon: None, scale: 1.0 };

    #[test]
    fn the_highest_are_chosen_and_the_first_of_equals() {
        assert_eq!(route(&TWO_OF_FOUR, &[1.0, 3.0, 2.0, 3.0]).0, [1, 3]);
        assert_eq!(route(&TWO_OF_FOUR, &[0.0; 4]), (vec![0, 1], vec![0.25; 2]));
    }

    #[test]
    fn weights_are_a_softmax_over_all_or_the_chosen_or_normalized() {
        let logits = [0.0, 1.0, 0.0, 1.0];
        let e = std::f32::consts::E;
        assert_eq!(route(&Routing { scale: 2.0, ..TWO_OF_FOUR }, &logits).1, [2.0 * e / (2.0 + 2.0 * e); 2]);
        assert_eq!(route(&Routing { over_chosen: true, ..TWO_OF_FOUR }, &logits).1, [0.5; 2]);
        assert_eq!(route(&Routing { norm_epsilon: Some(0.0), ..TWO_OF_FOUR }, &logits).1, [0.5; 2]);
    }

    #[test]
    fn a_row_with_nan_has_different_experts() {
        let (mut experts, weights) = route(&TWO_OF_FOUR, &[f32::NAN; 4]);
        experts.dedup();
        assert_eq!(experts.len(), 2);
        assert!(weights.iter().all(|weight| weight.is_nan()));
    }
}
