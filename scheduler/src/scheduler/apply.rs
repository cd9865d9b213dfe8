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

impl Scheduler {
    /// Applies the result of the oldest step in flight. Returns the events in the order of the plan's advances.
    pub fn apply(&mut self, result: &StepResult) -> Result<Vec<Event>, ApplyError> {
        let matched = self.match_outputs(result)?;
        self.preempt_readers(self.failed_residencies(result));
        self.in_flight.pop_oldest();
        let events = matched.into_iter().map(|(id, output_index)| self.take_output(result, id, output_index)).collect();
        self.cache.retire(result.step);
        Ok(events)
    }

    /// The outputs of current residencies: each sequence with the index of its output.
    fn match_outputs(&self, result: &StepResult) -> Result<Vec<(SequenceId, usize)>, ApplyError> {
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
                Some(index) => matched.push((in_flight.id, checked_index(result, index, in_flight)?)),
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

    fn take_output(&mut self, result: &StepResult, id: SequenceId, output_index: usize) -> Event {
        let Some(token_ids) = &result.outputs[output_index].token_ids else {
            self.end(id);
            return Event::Failed { id, output_index };
        };
        let sequence = self.sequence_mut(id);
        let finish_reason = token_ids.iter().find_map(|token_id| sequence.accept(*token_id));
        self.register_blocks(id);
        if finish_reason.is_some() {
            self.end(id);
        }
        Event::Advanced { id, output_index, num_tokens: token_ids.len(), finish_reason }
    }
}

/// `index`, if that output has as many tokens as were planned: 1 if the advance samples, otherwise 0.
fn checked_index(result: &StepResult, index: usize, in_flight: &InFlightAdvance) -> Result<usize, ApplyError> {
    let expected = usize::from(in_flight.sample);
    match &result.outputs[index].token_ids {
        Some(token_ids) if token_ids.len() != expected => {
            Err(ApplyError::TokenCount { step: result.step, id: in_flight.id, expected, got: token_ids.len() })
        }
        _ => Ok(index),
    }
}
