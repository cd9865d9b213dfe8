//! How likely a sequence's drafts are right, and how many are worth their rows.
//!
//! Drafts cost the rows that verify them, and the time of making them: little for lookups on a CPU, more where a GPU waits
//! for the host meanwhile, and most for a model that drafts.
//!
//! Pure, and without influence on tokens: it decides only how fast they come.

use std::time::Duration;

/// What is assumed of a sequence that has verified no draft.
const PRIOR: f64 = 0.7;
/// Weight of the newest verified draft token.
const LEARNING_RATE: f64 = 1.0 / 8.0;
/// Share of the way back to `PRIOR` in a step without drafts, so that a sequence whose drafts were wrong tries again. A try costs
/// the row whose share the probability has just reached, and lowers the probability by `LEARNING_RATE` of that share. So tries
/// of a sequence whose drafts are always wrong take at most PRIOR · RECOVERY_RATE / LEARNING_RATE of its time, about 1 %.
const RECOVERY_RATE: f64 = 1.0 / 512.0;
/// Recovery rate of the hit rate of lookups.
const FINDING_RATE: f64 = 1.0 / 64.0;

/// Share of the time that steps may take which draft only to measure it: with a model, and by lookup.
const PROBE_SHARE: f64 = 0.02;
/// Shares of a step below this are noise: a lookup that takes less counts as free.
const LEAST_SHARE: f64 = 0.01;
/// Length of a probe. A draft model first catches up on tokens; each step without a draft extends the probe by one, up to
/// `MAX_PROBE_STEPS`.
const NUM_PROBE_STEPS: u32 = 2;
const MAX_PROBE_STEPS: u32 = 16;

/// The source of a step's drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Drafting {
    /// The sequences' own texts, and their grammars.
    #[default]
    Lookup,
    /// A draft model or heads, in addition to lookup.
    Model,
    /// Like `Model`, but only to measure it.
    Probe,
    /// Like `Lookup`, but only to measure it.
    LookupProbe,
    /// No drafts: they are not expected to save what they cost.
    None,
}

impl Drafting {
    pub(crate) fn uses_model(self) -> bool {
        matches!(self, Self::Model | Self::Probe)
    }
}

/// What it costs to make drafts, which is measured again from time to time.
#[derive(Debug, Default)]
pub(crate) struct DraftingCost {
    /// The time for a draft token of each sequence, as a share of a step without drafts. `None`: not measured yet.
    share: Option<f64>,
    /// Seconds that probes may take now: at most those of one probe. May be negative.
    probe_seconds: f64,
    /// Steps of the probe that are not planned yet, and all that were planned.
    num_probe_steps: u32,
    num_planned_probe_steps: u32,
    /// The time of looking up the drafts of all sequences, as a share of a step without drafts.
    lookup_share: f64,
    /// Like `probe_seconds`, for lookups.
    lookup_probe_seconds: f64,
}

impl DraftingCost {
    /// Learns from a step of `seconds` without its drafts, which were made in `duration`; by a model one after another.
    /// `num_drafts`: the most for one sequence. `is_catching_up`: the model has not read all tokens yet, so that sequences got
    /// none.
    pub(crate) fn observe(
        &mut self,
        drafting: Drafting,
        seconds: f64,
        num_drafts: u32,
        duration: Duration,
        is_catching_up: bool,
    ) {
        let most_seconds = (1.0 + self.lookup_share) * seconds;
        self.lookup_probe_seconds = (self.lookup_probe_seconds + PROBE_SHARE * seconds).min(most_seconds);
        if !drafting.uses_model() && num_drafts > 0 && seconds > 0.0 {
            let share = duration.as_secs_f64() / seconds;
            self.lookup_share = learned(self.lookup_share, share);
        }
        self.probe_seconds = (self.probe_seconds + PROBE_SHARE * seconds).min(self.seconds_of_probe(seconds));
        if drafting == Drafting::Probe {
            self.probe_seconds -= seconds + duration.as_secs_f64();
            if is_catching_up && self.num_planned_probe_steps < MAX_PROBE_STEPS {
                self.num_probe_steps += 1;
            }
        }
        if !drafting.uses_model() || num_drafts == 0 || is_catching_up || seconds <= 0.0 {
            return;
        }
        let share = duration.as_secs_f64() / (seconds * f64::from(num_drafts));
        self.share = Some(self.share.map_or(share, |known| learned(known, share)));
    }

    fn seconds_of_probe(&self, seconds: f64) -> f64 {
        f64::from(NUM_PROBE_STEPS) * (1.0 + self.share()) * seconds
    }

    pub(crate) fn share(&self) -> f64 {
        self.share.unwrap_or(0.0)
    }

    /// As a share of a step; 0: lookups are free.
    pub(crate) fn lookup_share(&self) -> f64 {
        if self.lookup_share < LEAST_SHARE { 0.0 } else { self.lookup_share }
    }

    /// Whether the next step, of `seconds`, looks up a draft for each sequence only to measure it. `row_share`: of a row for
    /// each sequence in these seconds.
    pub(crate) fn begins_lookup_probe(&mut self, seconds: f64, row_share: f64) -> bool {
        let seconds_of_probe = (self.lookup_share + row_share) * seconds;
        let is_probe = self.lookup_probe_seconds >= seconds_of_probe;
        if is_probe {
            self.lookup_probe_seconds -= seconds_of_probe;
        }
        is_probe
    }

    /// Whether the next step, of `seconds`, is to be a probe. `is_probing`: one is in flight.
    pub(crate) fn begins_probe(&mut self, seconds: f64, is_probing: bool) -> bool {
        if self.num_probe_steps == 0 && !is_probing {
            self.num_planned_probe_steps = 0;
            if self.share.is_none() || self.probe_seconds >= self.seconds_of_probe(seconds) {
                self.num_probe_steps = NUM_PROBE_STEPS;
            }
        }
        let is_probe = self.num_probe_steps > 0;
        self.num_probe_steps = self.num_probe_steps.saturating_sub(1);
        self.num_planned_probe_steps += u32::from(is_probe);
        is_probe
    }
}

/// A share that was `known` after it was measured as `share`. One step that took long, as one in which single sequences
/// catch up, counts for little.
fn learned(known: f64, share: f64) -> f64 {
    known + (share.min(2.0 * known.max(LEAST_SHARE)) - known) * LEARNING_RATE
}

/// Moving averages of a sequence's drafts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Acceptance {
    /// That a draft token is right if those before it are.
    probability: f64,
    /// Share of the steps that allowed drafts in which there was one.
    found: f64,
}

impl Default for Acceptance {
    fn default() -> Self {
        Self { probability: PRIOR, found: 1.0 }
    }
}

impl Acceptance {
    /// Learns from a step that verified `num_drafts` draft tokens, of which the first `num_right` were right. Those after
    /// the first wrong one tell nothing.
    pub(crate) fn observe(&mut self, num_right: u32, num_drafts: u32) {
        for _ in 0..num_right {
            self.probability += (1.0 - self.probability) * LEARNING_RATE;
        }
        if num_right < num_drafts {
            self.probability -= self.probability * LEARNING_RATE;
        }
        self.found += (f64::from(u8::from(num_drafts > 0)) - self.found) * LEARNING_RATE;
    }

    /// Share of the steps that allowed drafts in which there was one.
    pub(crate) fn found(&self) -> f64 {
        self.found
    }

    /// Notes a step in which a model had no draft for the sequence: most often because it has to read a long text first,
    /// so it says little.
    pub(crate) fn miss(&mut self) {
        self.found -= self.found * FINDING_RATE;
    }

    /// Notes a step in which the sequence was given no such drafts.
    pub(crate) fn recover(&mut self) {
        self.probability += (PRIOR - self.probability) * RECOVERY_RATE;
        self.found += (1.0 - self.found) * FINDING_RATE;
    }

    /// Tokens that draft tokens are expected to save, of which each number costs as much time as `row_costs` tokens for the rows
    /// (the first cost is that of one draft token), and making each one as much as `drafting_share`.
    pub(crate) fn worth(&self, row_costs: &[f64], drafting_share: f64) -> f64 {
        let num_drafts = self.num_worthwhile(row_costs, drafting_share);
        let Some(row_cost) = num_drafts.checked_sub(1).map(|last| row_costs[last]) else { return 0.0 };
        let num_right: f64 = (1..=num_drafts).map(|num| self.probability.powi(num as i32)).sum();
        self.found * (num_right - row_cost) - drafting_share * num_drafts as f64
    }

    /// The number of draft tokens that saves most if they are found: the largest of equal ones. Costs as of `worth`.
    pub(crate) fn num_worthwhile(&self, row_costs: &[f64], drafting_share: f64) -> usize {
        let (mut best, mut most_saved) = (0, 0.0);
        let (mut probability, mut num_right) = (1.0, 0.0);
        for (num, row_cost) in (1..).zip(row_costs) {
            probability *= self.probability;
            num_right += probability;
            let saved = num_right - row_cost - drafting_share * f64::from(num);
            if saved >= most_saved {
                (best, most_saved) = (num, saved);
            }
        }
        best as usize
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

    /// Costs of one to eight draft tokens, if each costs `share`.
    fn costs(share: f64) -> [f64; 8] {
        std::array::from_fn(|index| share * (index + 1) as f64)
    }

    #[test]
    fn right_drafts_make_longer_ones_worthwhile_and_wrong_ones_shorter() {
        assert_eq!(Acceptance::default().num_worthwhile(&costs(0.3), 0.0), 3);
        assert_eq!(Acceptance::default().num_worthwhile(&costs(0.2), 0.1), 3);
        assert_eq!(after(&[(8, 8), (8, 8)]).num_worthwhile(&costs(0.3), 0.0), 8);
        assert_eq!(after(&[(0, 8); 20]).num_worthwhile(&costs(0.3), 0.0), 0);
        // Drafts after the first wrong one do not count.
        assert_eq!(after(&[(0, 8)]).probability, after(&[(0, 1)]).probability);
    }

    #[test]
    fn a_right_draft_closes_an_eighth_of_the_distance_to_certainty() {
        assert!((after(&[(1, 1)]).probability - 0.7375).abs() < 1e-12);
        assert!((after(&[(1, 2)]).probability - 0.7375 * 7.0 / 8.0).abs() < 1e-12);
    }

    #[test]
    fn free_drafts_are_always_worthwhile() {
        assert_eq!(after(&[(0, 1); 1000]).num_worthwhile(&[0.0; 5], 0.0), 5);
    }

    #[test]
    fn rows_that_cost_much_at_once_are_taken_together_or_not_at_all() {
        let costs = [0.05, 0.6, 0.6, 0.65, 2.0];
        let known = |probability| Acceptance { probability, found: 1.0 };
        assert_eq!(known(0.4).num_worthwhile(&costs, 0.0), 1);
        assert_eq!(known(0.9).num_worthwhile(&costs, 0.0), 4);
        assert_eq!(known(0.04).num_worthwhile(&costs, 0.0), 0);
    }

    #[test]
    fn one_long_wait_does_not_end_lookups() {
        let mut cost = DraftingCost::default();
        cost.observe(Drafting::Lookup, 0.01, 3, Duration::from_secs(9), false);
        assert_eq!(cost.lookup_share(), 0.0);
    }

    /// After many steps of 10 ms whose drafts took this share of them.
    fn measured(drafting: Drafting, share: f64) -> DraftingCost {
        let mut cost = DraftingCost::default();
        for _ in 0..200 {
            cost.observe(drafting, 0.01, 1, Duration::from_secs_f64(0.01 * share), false);
        }
        cost
    }

    #[test]
    fn measuring_lookups_takes_two_percent_of_the_time() {
        let mut cost = measured(Drafting::Lookup, 0.5);
        assert!((cost.lookup_share() - 0.5).abs() < 1e-6);
        let probes = (0..10_000).filter(|_| {
            cost.observe(Drafting::None, 0.01, 0, Duration::ZERO, false);
            cost.begins_lookup_probe(0.01, 0.3)
        });
        // Each takes 0.8 of a step.
        assert!((249..=252).contains(&probes.count()));
    }

    #[test]
    fn measuring_a_model_takes_two_percent_of_the_time() {
        let mut cost = measured(Drafting::Model, 0.5);
        assert!((cost.share() - 0.5).abs() < 1e-6);
        let mut num_probe_steps = 0;
        for _ in 0..10_000 {
            if cost.begins_probe(0.01, false) {
                num_probe_steps += 1;
                cost.observe(Drafting::Probe, 0.01, 1, Duration::from_millis(5), false);
            } else {
                cost.observe(Drafting::None, 0.01, 0, Duration::ZERO, false);
            }
        }
        // Each takes one and a half steps, and there are two of them in a probe.
        assert!((132..=136).contains(&num_probe_steps) && num_probe_steps % 2 == 0, "{num_probe_steps}");
    }

    #[test]
    fn what_may_be_spent_on_measuring_is_for_one_probe_only() {
        let mut cost = measured(Drafting::Lookup, 0.5);
        cost.share = Some(0.5);
        for _ in 0..10_000 {
            cost.observe(Drafting::None, 0.01, 0, Duration::ZERO, false);
        }
        assert!(cost.begins_lookup_probe(0.01, 0.7) && !cost.begins_lookup_probe(0.01, 0.7));
        assert!(cost.begins_probe(0.01, false) && cost.begins_probe(0.01, false));
        cost.observe(Drafting::Probe, 0.01, 1, Duration::from_millis(5), false);
        cost.observe(Drafting::Probe, 0.01, 1, Duration::from_millis(5), false);
        assert!(!cost.begins_probe(0.01, false));
    }

    #[test]
    fn a_model_that_was_measured_is_measured_again_when_the_time_of_a_probe_has_been_saved() {
        let mut cost = DraftingCost { share: Some(0.5), ..Default::default() };
        let is_saving = |_: &u32| {
            cost.observe(Drafting::None, 0.01, 0, Duration::ZERO, false);
            !cost.begins_probe(0.01, false)
        };
        // Two steps of 15 ms, by 0.2 ms a step.
        assert!((148..=150).contains(&(0..).take_while(is_saving).count()));
    }

    #[test]
    fn lookups_are_free_below_a_hundredth_of_a_step() {
        let cost = |lookup_share| DraftingCost { lookup_share, ..Default::default() };
        assert_eq!([0.0099, 0.01, 0.5].map(|share| cost(share).lookup_share()), [0.0, 0.01, 0.5]);
    }

    #[test]
    fn a_probe_waits_for_a_model_that_catches_up_but_not_for_ever() {
        let mut cost = DraftingCost::default();
        let mut num_steps = 0;
        while cost.begins_probe(0.01, num_steps > 0) {
            num_steps += 1;
            cost.observe(Drafting::Probe, 0.01, 1, Duration::from_millis(5), true);
        }
        // The step after the last one that adds a step had been planned before.
        assert_eq!(num_steps, MAX_PROBE_STEPS + 1);
        assert_eq!(cost.share, None, "a model that catches up says nothing of its speed");
        assert!(cost.begins_probe(0.01, false), "it has still to be measured");
    }

    #[test]
    fn steps_without_time_or_drafts_measure_nothing() {
        let mut cost = DraftingCost::default();
        for drafting in [Drafting::Lookup, Drafting::Model] {
            cost.observe(drafting, 0.0, 1, Duration::from_millis(1), false);
            cost.observe(drafting, 0.01, 0, Duration::from_millis(1), false);
        }
        assert_eq!((cost.share, cost.lookup_share), (None, 0.0));
        cost.observe(Drafting::Model, 0.01, 4, Duration::from_millis(2), false);
        assert!((cost.share() - 0.05).abs() < 1e-12, "the time of one draft token");
    }

    #[test]
    fn finds_and_misses_are_soon_forgotten() {
        let mut acceptance = after(&[(0, 0)]);
        assert!((acceptance.found() - 7.0 / 8.0).abs() < 1e-12);
        acceptance.miss();
        assert!((acceptance.found() - 7.0 / 8.0 * 63.0 / 64.0).abs() < 1e-12);
        let mut never = Acceptance { probability: 0.0, found: 0.0 };
        never.recover();
        assert!((never.found() - 1.0 / 64.0).abs() < 1e-12);
        assert!((never.probability - 0.7 / 512.0).abs() < 1e-12);
    }

    #[test]
    fn drafts_are_worth_what_they_save_less_what_they_and_their_making_cost() {
        let acceptance = Acceptance { probability: 0.5, found: 0.8 };
        // Two drafts are right 0.5 + 0.25 times; their rows cost 0.3 if they are found, and making them 0.1 always.
        assert!((acceptance.worth(&[0.2, 0.3], 0.05) - (0.8 * (0.75 - 0.3) - 0.1)).abs() < 1e-12);
        assert_eq!(acceptance.worth(&[0.9, 0.9], 0.0), 0.0);
    }

    #[test]
    fn drafts_that_are_always_wrong_take_less_than_two_percent_whatever_their_rows_cost() {
        for row_cost in [0.01, 0.03, 0.1, 0.3, 0.5, 0.65] {
            let (mut acceptance, mut seconds) = (after(&[(0, 1); 30]), 0.0);
            for _ in 0..10_000 {
                let num_drafts = acceptance.num_worthwhile(&costs(row_cost), 0.0);
                seconds += 1.0 + row_cost * num_drafts as f64;
                if num_drafts > 0 { acceptance.observe(0, num_drafts as u32) } else { acceptance.recover() }
            }
            assert!(seconds < 10_000.0 / 0.98, "{row_cost}: {seconds}");
        }
    }

    /// Steps without drafts until a draft that costs half of a step is tried again.
    fn steps_to_next_try(mut acceptance: Acceptance) -> usize {
        let is_waiting = |_: &u32| {
            acceptance.recover();
            acceptance.num_worthwhile(&[0.5], 0.0) == 0
        };
        (0..).take_while(is_waiting).count()
    }

    #[test]
    fn a_sequence_tries_again_after_a_while() {
        let num_wrong = (0..).find(|num| after(&vec![(0, 1); *num]).num_worthwhile(&[0.5], 0.0) == 0).unwrap();
        assert!((32..128).contains(&steps_to_next_try(after(&vec![(0, 1); num_wrong]))));
        // As after steps whose rows were cheaper.
        assert!((128..640).contains(&steps_to_next_try(after(&[(0, 1); 20]))));
    }
}
