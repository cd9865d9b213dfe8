//! How long steps take, and how much of a prompt fits into a step without delaying its decodes too much.

use std::time::Duration;

use super::Scheduler;
use super::plan_builder::PlanBuilder;
use crate::cost::Work;
use crate::plan::{Drafted, Forecast, SequenceId};

/// Default target duration of a step with decodes, as a multiple of what its decodes take alone. A little less than
/// two, so that there is some room for errors of the forecast: above `LEAST_TARGET_SECONDS`, a prompt of any length at
/// most doubles the gap between tokens.
const STRETCH: f64 = 1.75;
/// Least default target. 25 tokens a second are several times as fast as people read, and small chunks compute a prompt
/// slowly: where decodes take a few milliseconds, `STRETCH` alone would cut prompts into single blocks.
const LEAST_TARGET_SECONDS: f64 = 0.04;

impl Scheduler {
    /// Learns how long a step in flight took, from when the worker could begin with it. Call it before `apply`.
    /// `drafted`: what the step spent on drafts, which is part of `duration`. Returns what was expected, with
    /// the time that the drafts took, or `None` if the step is not in flight.
    pub fn observe(&mut self, step: u64, duration: Duration, drafted: Drafted) -> Option<Forecast> {
        let in_flight = self.in_flight.get(step)?;
        let (mut estimate, has_transfers) = (in_flight.estimate, in_flight.has_transfers);
        let duration = duration.saturating_sub(drafted.duration);
        if self.limits.max_draft_tokens > 0 {
            let seconds = if estimate.seconds > 0.0 { estimate.seconds } else { duration.as_secs_f64() };
            let planned = in_flight.advances.iter().map(|advance| advance.num_draft_tokens).filter(|num| *num > 0);
            let (num_sequences, most) = (planned.clone().count(), planned.max().unwrap_or(0));
            let extends = self.limits.drafts_extend_lookup;
            let is_catching_up = !extends && (drafted.num_tokens as usize) < num_sequences;
            let num_passes = match extends && in_flight.drafting.uses_model() && num_sequences > 0 {
                // Lookup has left the heads nothing to builder.
                true if drafted.num_tokens > 0 && !drafted.by_model => 0,
                // They end a draft that they think is wrong.
                true => drafted.num_tokens.div_ceil(num_sequences as u32).max(1),
                false => most,
            };
            self.drafting_cost.observe(in_flight.drafting, seconds, num_passes, drafted.duration, is_catching_up);
        }
        if drafted.num_tokens > 0 {
            estimate.work.add_drafts(drafted.num_tokens);
            estimate.seconds = self.cost.seconds(&estimate.work);
        }
        // The model has no term for transfers and would charge their time to tokens. It still learns from such steps
        // while it has no other evidence, because without any, prompts have no limit but `max_step_tokens`.
        if !has_transfers || !self.cost.is_informed() {
            self.cost.observe(&estimate.work, duration);
        }
        let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).ok();
        Some(Forecast {
            duration: seconds(estimate.seconds).filter(|duration| !duration.is_zero()).map(|it| it + drafted.duration),
            target: estimate.target_seconds.and_then(seconds),
        })
    }

    /// Target duration of a step while `decodes` are running, whether the step contains them or not, and
    /// `num_prefills` prompts. With several stages, the steps from one token to the next share the time.
    ///
    /// The default is `STRETCH` times what the decodes take together with the decodes that are about to join them. Many
    /// prompts at once soon become many streams: steps will be that long anyway, and until then all of them wait less.
    /// One of these prompts is not counted: it is the one that `STRETCH` makes room for. The default is never
    /// less than `LEAST_TARGET_SECONDS`.
    pub(super) fn target_seconds(&self, decodes: &Work, num_prefills: usize) -> Option<f64> {
        let num_steps = self.num_steps_per_token() as f64;
        (decodes.has_decodes() && self.cost.is_informed()).then(|| match self.limits.max_inter_token {
            Some(max_inter_token) => max_inter_token.as_secs_f64() / num_steps,
            None => {
                let num_running = self.residents.running().len();
                let num_places = (self.limits.max_step_sequences as usize).saturating_sub(num_running);
                let num_joining = num_prefills + self.queue.num_ready().min(num_places);
                let decodes = decodes.with_decodes(num_joining.saturating_sub(1)).in_steps(self.limits.num_stages);
                (STRETCH * self.cost.seconds(&decodes)).max(LEAST_TARGET_SECONDS) / num_steps
            }
        })
    }

    /// Offloaded blocks that a step may bring back while `decodes` are running: at most as many as it may compute, so
    /// that loading them does not delay the decodes for long.
    pub(super) fn max_restored_blocks(&self, decodes: &Work) -> usize {
        if decodes.has_decodes() {
            self.limits.max_step_tokens.div_ceil(self.limits.block_tokens) as usize
        } else {
            usize::MAX
        }
    }

    /// Tokens, of at most `max_tokens`, that a prompt with `num_computed_tokens` can advance by in this step.
    ///
    /// If the target duration limits them, rounds down to whole blocks, because a partial block cannot be shared.
    /// Closes the step if not even one block fits. A source gets all its tokens or none, and so does a span whose tokens
    /// attend to each other. The target does not apply to a
    /// stream that is recomputed after a preemption: its client waits longer for the next token than any other.
    pub(super) fn chunk_tokens(
        &self,
        builder: &mut PlanBuilder,
        id: SequenceId,
        num_computed_tokens: u32,
        max_tokens: u32,
    ) -> u32 {
        let num_tokens = self.affordable_tokens(builder, id, num_computed_tokens, max_tokens);
        self.sequence(id).whole_advance_tokens(num_computed_tokens, num_tokens)
    }

    fn affordable_tokens(
        &self,
        builder: &mut PlanBuilder,
        id: SequenceId,
        num_computed_tokens: u32,
        max_tokens: u32,
    ) -> u32 {
        let sequence = self.sequence(id);
        let max_tokens = max_tokens.min(builder.num_tokens_left);
        let min_tokens = sequence.min_advance_tokens(num_computed_tokens);
        if max_tokens < min_tokens {
            return 0;
        }
        let target_seconds = builder.estimate.target_seconds.filter(|_| !sequence.has_generated());
        let Some(target_seconds) = target_seconds else { return max_tokens };
        let seconds_left = target_seconds - self.cost.seconds(&builder.estimate.work);
        let affordable_tokens = self.cost.prefill_tokens(seconds_left, num_computed_tokens);
        if affordable_tokens >= max_tokens {
            return max_tokens;
        }
        let block_tokens = self.limits.block_tokens;
        let to_boundary = block_tokens - num_computed_tokens % block_tokens;
        let least_tokens = to_boundary.max(min_tokens);
        if affordable_tokens >= least_tokens {
            return (affordable_tokens - (affordable_tokens - to_boundary) % block_tokens).max(min_tokens);
        }
        builder.is_closed = true;
        // One prompt always advances, however slow the decodes are.
        if builder.estimate.work.has_prefills() { 0 } else { least_tokens.min(max_tokens) }
    }
}
