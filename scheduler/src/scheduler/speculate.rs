//! How many draft tokens each decode of a step may verify.
//!
//! A draft token is one more row of the model. It pays if it gives more tokens in the time of its row than the step gives
//! without it: if its probability to be right is at least the share of a decode's row in the time that the step spends on
//! a token. That share is small while few sequences read all weights, and near 1 when the rows themselves take the time, so
//! drafts fade out under load.

use super::Scheduler;
use crate::cost::Work;
use crate::plan::SequenceId;

impl Scheduler {
    /// The most draft tokens of each of the step's decodes, whose work is `work`; empty: no decode has any.
    ///
    /// Drafts take what nothing else needs: rows up to `max_step_sequences`, which the worker has measured its memory for,
    /// and blocks that no decode of this step takes. Prompts come first: a step with one gives no drafts.
    pub(super) fn num_draft_tokens(
        &mut self,
        decodes: &[SequenceId],
        prefills: &[SequenceId],
        work: &Work,
    ) -> Vec<u32> {
        let limits = self.limits;
        // Drafts would hold blocks beyond those of one window, which a sequence that is alone in the pool may lack.
        if limits.max_draft_tokens == 0 || limits.window_tokens.is_some() || decodes.is_empty() {
            return Vec::new();
        }
        let max_rows = limits.max_step_sequences.min(limits.max_step_tokens);
        let is_busy = !prefills.is_empty() || self.queue.num_ready() > 0;
        let mut num_rows_left = if is_busy { 0 } else { max_rows.saturating_sub(decodes.len() as u32) };
        let num_required: usize = decodes.iter().map(|id| self.sequence(*id).num_new_blocks(1)).sum();
        let mut num_blocks_left = self.cache.pool().num_allocatable() - num_required;
        let least_probability = self.row_share(work);
        let mut num_drafts = Vec::with_capacity(decodes.len());
        for id in decodes {
            let sequence = self.sequence_mut(*id);
            let most = limits.max_draft_tokens.min(sequence.max_draft_tokens()).min(num_rows_left);
            let mut num = sequence.acceptance().num_worthwhile(least_probability, most);
            let num_extra_blocks = |num| sequence.num_new_blocks(1 + num) - sequence.num_new_blocks(1);
            while num_extra_blocks(num) > num_blocks_left {
                num -= 1;
            }
            num_blocks_left -= num_extra_blocks(num);
            num_rows_left -= num;
            if num == 0 {
                sequence.acceptance().recover();
            }
            num_drafts.push(num);
        }
        num_drafts
    }

    /// Seconds of one more row as a share of the seconds per token of a step without drafts; 0 while nothing is known.
    fn row_share(&self, work: &Work) -> f64 {
        let seconds = self.cost.seconds(work);
        if seconds <= 0.0 {
            return 0.0;
        }
        let seconds_of_row = self.cost.seconds(&work.with_decodes(1)) - seconds;
        seconds_of_row * work.num_decodes() / seconds
    }
}
