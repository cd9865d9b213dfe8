//! How long steps take, and how much of a prompt fits beside decodes for which time matters.

use std::time::Duration;

use crate::cost::Work;
use crate::plan::SequenceId;
use crate::scheduler::Scheduler;
use crate::step::Draft;

/// How long a step with decodes may take by default, as a multiple of what decodes take alone. A little less than two: a
/// prompt then at most doubles the gap between tokens, however long it is, with room for what no forecast foresees.
const STRETCH: f64 = 1.75;

/// What was expected of a step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Estimate {
    pub work: Work,
    pub seconds: f64,
    /// Seconds that it may take; `None`: no prompt could hold up a decode, or nothing is known.
    pub bound: Option<f64>,
}

/// What was expected of a step that has been observed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Forecast {
    /// `None`: nothing was known when it was planned.
    pub duration: Option<Duration>,
    /// How long it was to take at most with what prompts add to it. Decodes alone, and the block that some prompt
    /// always advances by, may need more.
    pub target: Option<Duration>,
}

impl Scheduler {
    /// Learns how long a step in flight took, from when the worker could begin with it. To be called before `apply`.
    /// `None`: it is not in flight.
    pub fn observe(&mut self, step: u64, duration: Duration) -> Option<Forecast> {
        let estimate = self.flights.iter().find(|flight| flight.step == step)?.estimate;
        self.cost.observe(&estimate.work, duration);
        let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).ok();
        Some(Forecast {
            duration: seconds(estimate.seconds).filter(|duration| !duration.is_zero()),
            target: estimate.bound.and_then(seconds),
        })
    }

    /// Seconds that a step with these decodes may take beside `num_prefills` prompts under way.
    ///
    /// By default a multiple of what the decodes take together with those to come: many prompts at once are many streams
    /// soon, so that steps are as long anyway, and all of them wait less for it. The first to come is the prompt that the
    /// multiple is for.
    pub(crate) fn bound(&self, decodes: &Work, num_prefills: usize) -> Option<f64> {
        (decodes.has_decodes() && self.cost.is_informed()).then(|| match self.limits.max_inter_token {
            Some(max_inter_token) => max_inter_token.as_secs_f64(),
            None => {
                let num_places = (self.limits.max_step_sequences as usize).saturating_sub(self.running.len());
                let num_to_come = num_prefills + self.queue.len().min(num_places);
                STRETCH * self.cost.seconds(&decodes.with_decodes(num_to_come.saturating_sub(1)))
            }
        })
    }

    /// How many of `possible` tokens of a prompt there is room and time for. Where time is short in whole blocks, since half
    /// a one cannot be shared; when there is none for a block, it is over.
    ///
    /// A source is taken whole or not at all.
    ///
    /// A stream that computes again what was lost has as much time as it needs: of all gaps between tokens its own is the
    /// longest already.
    pub(crate) fn chunk_tokens(
        &self,
        draft: &mut Draft,
        id: SequenceId,
        num_computed_tokens: u32,
        possible: u32,
    ) -> u32 {
        let possible = possible.min(draft.tokens_left);
        let indivisible = self.sequence(id).num_indivisible_tokens(num_computed_tokens);
        if possible < indivisible {
            return 0;
        }
        let Some(bound) = draft.estimate.bound.filter(|_| !self.sequence(id).has_begun()) else { return possible };
        let time_left = bound - self.cost.seconds(&draft.estimate.work);
        let fitting = self.cost.prefill_tokens(time_left, num_computed_tokens);
        if fitting >= possible {
            return possible;
        }
        let block_tokens = self.limits.block_tokens;
        let to_boundary = block_tokens - num_computed_tokens % block_tokens;
        let least = to_boundary.max(indivisible);
        if fitting >= least {
            (fitting - (fitting - to_boundary) % block_tokens).max(indivisible)
        } else {
            draft.is_full = true;
            // Somebody always gets on, however slow the decodes are.
            if draft.estimate.work.has_prefills() { 0 } else { least.min(possible) }
        }
    }
}
