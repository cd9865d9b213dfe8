//! How likely a sequence's drafts are right, and how many are worth their rows.
//!
//! Pure, and without influence on tokens: it decides only how fast they come.

/// What is assumed of a sequence that has verified no draft.
const PRIOR: f64 = 0.7;
/// Weight of the newest verified draft token.
const LEARNING_RATE: f64 = 1.0 / 8.0;
/// Share of the way back to `PRIOR` in a step without drafts, so that a sequence whose drafts were wrong tries again.
const RECOVERY_RATE: f64 = 1.0 / 64.0;

/// The moving average of a sequence's right drafts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acceptance(f64);

impl Default for Acceptance {
    fn default() -> Self {
        Self(PRIOR)
    }
}

impl Acceptance {
    /// Learns from a step that verified `num_drafts` draft tokens, of which the first `num_right` were right. Those after
    /// the first wrong one tell nothing.
    pub(crate) fn observe(&mut self, num_right: u32, num_drafts: u32) {
        for _ in 0..num_right {
            self.0 += (1.0 - self.0) * LEARNING_RATE;
        }
        if num_right < num_drafts {
            self.0 -= self.0 * LEARNING_RATE;
        }
    }

    /// Notes a step in which the sequence was given no drafts.
    pub(crate) fn recover(&mut self) {
        self.0 += (PRIOR - self.0) * RECOVERY_RATE;
    }

    /// The most draft tokens, up to `most`, of which the last is still right with at least this probability.
    pub(crate) fn num_worthwhile(&self, least_probability: f64, most: u32) -> u32 {
        let mut probability = 1.0;
        let is_worthwhile = |_: &u32| {
            probability *= self.0;
            probability >= least_probability
        };
        (0..most).take_while(is_worthwhile).count() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(outcomes: &[(u32, u32)]) -> Acceptance {
        let mut acceptance = Acceptance::default();
        outcomes.iter().for_each(|(num_right, num_drafts)| acceptance.observe(*num_right, *num_drafts));
        acceptance
    }

    #[test]
    fn right_drafts_make_longer_ones_worthwhile_and_wrong_ones_shorter() {
        assert_eq!(Acceptance::default().num_worthwhile(0.3, 8), 3);
        assert_eq!(after(&[(8, 8), (8, 8)]).num_worthwhile(0.3, 8), 8);
        assert_eq!(after(&[(0, 8); 20]).num_worthwhile(0.3, 8), 0);
        // Drafts after the first wrong one do not count.
        assert_eq!(after(&[(0, 8)]).0, after(&[(0, 1)]).0);
    }

    #[test]
    fn a_right_draft_closes_an_eighth_of_the_distance_to_certainty() {
        assert!((after(&[(1, 1)]).0 - 0.7375).abs() < 1e-12);
        assert!((after(&[(1, 2)]).0 - 0.7375 * 7.0 / 8.0).abs() < 1e-12);
    }

    #[test]
    fn free_drafts_are_always_worthwhile() {
        assert_eq!(after(&[(0, 1); 1000]).num_worthwhile(0.0, 5), 5);
    }

    #[test]
    fn a_sequence_tries_again_after_a_while() {
        let mut acceptance = after(&[(0, 1); 20]);
        let num_steps = (0..).take_while(|_| {
            acceptance.recover();
            acceptance.num_worthwhile(0.5, 1) == 0
        });
        assert!((32..128).contains(&num_steps.count()));
    }
}
