//! Applies a step's result: takes its tokens, ends sequences, and retires the step's blocks.
//!
//! The whole result is checked before anything changes. Outputs for an earlier residency (the sequence has ended, was
//! aborted or preempted) are discarded, and may be absent.

use std::collections::HashSet;

use rustc_hash::FxHashMap;

use super::Scheduler;
use crate::error::ApplyError;
use crate::in_flight::InFlightAdvance;
use crate::plan::{Event, SequenceId, StepResult};
use crate::resident::Residency;
use crate::speculation::Drafting;

impl Scheduler {
    /// Applies the result of the oldest step in flight. Returns the events in the order of the plan's advances.
    pub fn apply(&mut self, result: &StepResult) -> Result<Vec<Event>, ApplyError> {
        let matched = self.match_outputs(result)?;
        self.preempt_readers(self.failed_residencies(result));
        let drafting = self.in_flight.oldest().map(|step| step.drafting).unwrap_or_default();
        self.in_flight.pop_oldest();
        self.num_finished_steps += 1;
        let take = |(id, index, num_drafts)| self.take_output(result, id, index, num_drafts, drafting);
        let events = matched.into_iter().map(take).collect();
        self.cache.retire(result.step);
        Ok(events)
    }

    /// The outputs of current residencies: each sequence with the index of its output and the planned draft tokens.
    fn match_outputs(&self, result: &StepResult) -> Result<Vec<(SequenceId, usize, u32)>, ApplyError> {
        let step = result.step;
        let oldest = self.in_flight.oldest().ok_or(ApplyError::NothingInFlight { step })?;
        if oldest.step != step {
            return Err(ApplyError::UnexpectedStep { step, expected: oldest.step });
        }
        let mut indices = FxHashMap::with_capacity_and_hasher(result.outputs.len(), Default::default());
        for (index, output) in result.outputs.iter().enumerate() {
            if indices.insert(output.id, index).is_some() {
                return Err(ApplyError::RepeatedSequence { step, id: output.id });
            }
        }
        let mut matched = Vec::with_capacity(indices.len());
        for in_flight in &oldest.advances {
            let index = indices.remove(&in_flight.id);
            if !self.is_current(in_flight) {
                continue;
            }
            match index {
                Some(index) => {
                    check_counts(result, index, in_flight)?;
                    matched.push((in_flight.id, index, in_flight.num_draft_tokens));
                }
                None if in_flight.sample => return Err(ApplyError::MissingOutput { step, id: in_flight.id }),
                None => {}
            }
        }
        match indices.into_keys().min() {
            Some(id) => Err(ApplyError::UnknownSequence { step, id }),
            None => Ok(matched),
        }
    }

    /// Whether the sequence is still in the residency for which the advance was planned.
    pub(super) fn is_current(&self, in_flight: &InFlightAdvance) -> bool {
        self.sequences.get(&in_flight.id).is_some_and(|sequence| sequence.residency() == Some(in_flight.residency))
    }

    /// The residencies that failed in the oldest step in flight, current or not.
    fn failed_residencies(&self, result: &StepResult) -> HashSet<Residency> {
        let failed = result.outputs.iter().filter(|output| output.token_ids.is_none());
        let failed: HashSet<_> = failed.map(|output| output.id).collect();
        let advances = self.in_flight.oldest().into_iter().flat_map(|step| &step.advances);
        advances.filter(|in_flight| failed.contains(&in_flight.id)).map(|in_flight| in_flight.residency).collect()
    }

    /// `num_planned_drafts`: draft tokens that the plan allowed.
    fn take_output(
        &mut self,
        result: &StepResult,
        id: SequenceId,
        output_index: usize,
        num_planned_drafts: u32,
        drafting: Drafting,
    ) -> Event {
        let output = &result.outputs[output_index];
        let Some(token_ids) = &output.token_ids else {
            self.end(id, false);
            return Event::Failed { id, output_index };
        };
        let extends = self.limits.drafts_extend_lookup;
        let sequence = self.sequence_mut(id);
        let was_finishing = sequence.is_finishing();
        let (num_tokens, finish_reason) = sequence.accept(token_ids, num_planned_drafts);
        if num_planned_drafts > 0 {
            sequence.learn_from_drafts(drafting, extends, token_ids.len() as u32 - 1, output);
        }
        if !was_finishing && sequence.is_finishing() {
            // Now it is certain that the last step is planned.
            self.note_finishing(id);
        }
        self.register_blocks(id);
        if finish_reason.is_some() {
            self.end(id, true);
        }
        Event::Advanced { id, output_index, num_tokens, finish_reason }
    }
}

/// An advance that samples gives one token, and one more for each right draft; any other gives none.
fn check_counts(result: &StepResult, index: usize, in_flight: &InFlightAdvance) -> Result<(), ApplyError> {
    let (step, id, output) = (result.step, in_flight.id, &result.outputs[index]);
    let (most, got) = (in_flight.num_draft_tokens, output.num_draft_tokens);
    if got > most {
        return Err(ApplyError::DraftCount { step, id, most, got });
    }
    let expected = usize::from(in_flight.sample);
    match output.token_ids.as_ref().map(Vec::len) {
        Some(len) if len < expected || len > expected + got as usize => {
            Err(ApplyError::TokenCount { step, id, expected, got: len })
        }
        _ => Ok(()),
    }
}
