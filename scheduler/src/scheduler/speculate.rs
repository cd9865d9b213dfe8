//! How many draft tokens each decode of a step may verify.
//!
//! A draft token is one more row of the model. It pays if it gives more tokens in the time of its row than the step gives
//! without it: if its probability to be right is at least the share of a decode's row in the time that the step spends on
//! a token. That share is small while few sequences read all weights, and near 1 when the rows themselves take the time, so
//! drafts fade out under load. One row more may cost nothing or much, for example when a kernel needs another pass for it. So the
//! scheduler compares numbers of drafts by the measured times of steps with that many rows, and takes the one that saves most.
//!
//! A token that a grammar forces is always right, so it pays even then.
//!
//! A model that drafts takes time as well: a draft of a model must pay for its row and for being made. Each step takes the
//! source that is expected to save most, by what each sequence has accepted of it. Heads draft only where lookup finds nothing: they
//! are worth what their own drafts save, times the share of such steps.
//!
//! If lookups take time, as on a GPU, which waits until the host knows the last tokens, a step looks drafts up only if
//! those of all its sequences are expected to save more.

use super::Scheduler;
use crate::cost::Work;
use crate::plan::SequenceId;
use crate::speculation::Drafting;

impl Scheduler {
    /// The source of the step's drafts, and the most draft tokens of each of its decodes, whose work is `work`; empty:
    /// no decode has any.
    ///
    /// Drafts take what nothing else needs: rows up to `max_step_sequences`, which the worker has measured its memory for,
    /// and blocks that no decode of this step takes. Prompts come first: a step with one gives no drafts.
    pub(super) fn num_draft_tokens(
        &mut self,
        decodes: &[SequenceId],
        prefills: &[SequenceId],
        work: &Work,
    ) -> (Drafting, Vec<u32>) {
        let limits = self.limits;
        if !decodes.iter().any(|id| self.sequence(*id).max_draft_tokens(&limits) > 0) {
            return (Drafting::Lookup, Vec::new());
        }
        let max_rows = limits.max_step_sequences.min(limits.max_step_tokens);
        let is_busy = !prefills.is_empty() || self.queue.num_ready() > 0;
        let mut num_rows_left = if is_busy { 0 } else { max_rows.saturating_sub(decodes.len() as u32) };
        let num_required: usize = decodes.iter().map(|id| self.sequence(*id).num_new_blocks(1)).sum();
        let mut num_blocks_left = self.cache.pool().num_allocatable() - num_required;
        let row_costs = self.row_costs(work);
        let drafting = if num_rows_left > 0 { self.drafting(decodes, work, &row_costs) } else { Drafting::Lookup };
        let extends = limits.drafts_extend_lookup && drafting.uses_model();
        let (drafting_share, least_drafts) = match drafting {
            Drafting::Lookup => (0.0, 0),
            Drafting::Model => (self.drafting_cost.share(), 0),
            Drafting::Probe | Drafting::LookupProbe => (f64::INFINITY, 1),
            Drafting::None => (f64::INFINITY, 0),
        };
        let unused = if drafting.uses_model() { Drafting::Lookup } else { Drafting::Model };
        // Otherwise probes measure again whether the sequences' drafts are right.
        let recovers = !matches!(drafting, Drafting::None | Drafting::LookupProbe);
        let mut num_drafts = Vec::with_capacity(decodes.len());
        for id in decodes {
            let sequence = self.sequence_mut(*id);
            let most = sequence.max_draft_tokens(&limits).min(num_rows_left);
            let row_costs = &row_costs[..most as usize];
            let mut num_worthwhile = sequence.acceptance(drafting).num_worthwhile(row_costs, drafting_share);
            if extends {
                // Which of the two will draft is not known yet.
                num_worthwhile =
                    num_worthwhile.max(sequence.acceptance(Drafting::Lookup).num_worthwhile(row_costs, 0.0));
            }
            let mut num = (num_worthwhile as u32).max(least_drafts.min(most));
            let num_extra_blocks = |num| sequence.num_new_blocks(1 + num) - sequence.num_new_blocks(1);
            while num_extra_blocks(num) > num_blocks_left {
                num -= 1;
            }
            num_blocks_left -= num_extra_blocks(num);
            num_rows_left -= num;
            if num == 0 && recovers {
                sequence.acceptance(drafting).recover();
            }
            // Drafts that extend lookup try it as well.
            if !extends || num == 0 {
                sequence.acceptance(unused).recover();
            }
            num_drafts.push(num);
        }
        (drafting, num_drafts)
    }

    /// The source of drafts that is expected to save most time, or a probe of another one.
    fn drafting(&mut self, decodes: &[SequenceId], work: &Work, row_costs: &[f64]) -> Drafting {
        let (share, lookup_share) = (self.drafting_cost.share(), self.drafting_cost.lookup_share());
        if !self.limits.drafts_with_model && lookup_share == 0.0 {
            return Drafting::Lookup;
        }
        let (mut by_lookup, mut by_model) = (-lookup_share * decodes.len() as f64, 0.0);
        for id in decodes {
            let limits = self.limits;
            let sequence = self.sequence_mut(*id);
            let row_costs = &row_costs[..sequence.max_draft_tokens(&limits) as usize];
            let mut worth = |drafting, drafting_share| sequence.acceptance(drafting).worth(row_costs, drafting_share);
            let (of_lookup, of_model) = (worth(Drafting::Lookup, 0.0), worth(Drafting::Model, share));
            by_lookup += of_lookup;
            by_model += if limits.drafts_extend_lookup {
                of_lookup + (1.0 - sequence.acceptance(Drafting::Lookup).found()) * of_model
            } else {
                of_model
            };
        }
        let (seconds, is_probing) = (self.cost.seconds(work), self.in_flight.has_probe());
        if self.limits.drafts_with_model {
            if by_model > by_lookup.max(0.0) {
                return Drafting::Model;
            }
            if self.drafting_cost.begins_probe(seconds, is_probing) {
                return Drafting::Probe;
            }
        }
        if lookup_share == 0.0 || by_lookup > 0.0 {
            Drafting::Lookup
        } else if self.drafting_cost.begins_lookup_probe(seconds, row_costs[0]) {
            Drafting::LookupProbe
        } else {
            Drafting::None
        }
    }

    /// Seconds of the rows of one draft token for each decode, of two, and so on, as a share of the seconds of a step without drafts.
    /// 0 where rows are free: while nothing is known, and where all drafts are certain to be right.
    fn row_costs(&self, work: &Work) -> Vec<f64> {
        let limits = self.limits;
        let seconds = self.cost.seconds_of_rows(work);
        let is_free = limits.drafts_only_forced || seconds <= 0.0;
        let with_drafts = |num: u32| work.with_decodes(num as usize * work.num_decodes() as usize);
        let cost = |num| if is_free { 0.0 } else { self.cost.seconds_of_rows(&with_drafts(num)) / seconds - 1.0 };
        (1..=limits.max_draft_tokens).map(cost).collect()
    }
}
