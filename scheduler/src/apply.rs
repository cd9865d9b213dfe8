//! Taking a step's result: tokens, ends, failures; and retiring the step's blocks.
//!
//! A result is checked whole before anything changes. Outputs for a stay that is over (ended, aborted, preempted) are
//! discarded, and need not be there.

use std::collections::HashSet;

use crate::error::ApplyError;
use crate::flight::{InFlight, Stay};
use crate::number::NumberMap;
use crate::plan::{Event, SequenceId, StepResult};
use crate::scheduler::Scheduler;

impl Scheduler {
    /// Takes the result of the oldest step in flight. Events are in the order of the plan's advances.
    pub fn apply(&mut self, result: &StepResult) -> Result<Vec<Event>, ApplyError> {
        let matched = self.match_outputs(result)?;
        self.void_what_relied_on(self.failed_stays(result));
        self.flights.pop_front();
        let events = matched.into_iter().map(|(id, output_index)| self.take_output(result, id, output_index)).collect();
        self.cache.pool.retire(result.step);
        Ok(events)
    }

    /// The outputs that count, with the index of each in the result.
    fn match_outputs(&self, result: &StepResult) -> Result<Vec<(SequenceId, usize)>, ApplyError> {
        let step = result.step;
        let flight = self.flights.front().ok_or(ApplyError::NothingInFlight { step })?;
        if flight.step != step {
            return Err(ApplyError::UnexpectedStep { step, expected: flight.step });
        }
        let mut indices = NumberMap::with_capacity_and_hasher(result.outputs.len(), Default::default());
        for (index, output) in result.outputs.iter().enumerate() {
            if indices.insert(output.id, index).is_some() {
                return Err(ApplyError::RepeatedSequence { step, id: output.id });
            }
        }
        let mut matched = Vec::with_capacity(indices.len());
        for in_flight in &flight.advances {
            let index = indices.remove(&in_flight.id);
            if !self.counts(in_flight) {
                continue;
            }
            match index {
                Some(index) => matched.push((in_flight.id, checked(result, index, in_flight)?)),
                None if in_flight.sample => return Err(ApplyError::MissingOutput { step, id: in_flight.id }),
                None => {}
            }
        }
        match indices.into_keys().min() {
            Some(id) => Err(ApplyError::UnknownSequence { step, id }),
            None => Ok(matched),
        }
    }

    /// Whether the sequence is still in the stay that the step was planned in.
    fn counts(&self, in_flight: &InFlight) -> bool {
        self.sequences.get(&in_flight.id).is_some_and(|sequence| sequence.stay() == Some(in_flight.stay))
    }

    /// Also those of sequences that have ended or started again since.
    fn failed_stays(&self, result: &StepResult) -> Vec<Stay> {
        let failed = result.outputs.iter().filter(|output| output.token_ids.is_none());
        let failed: HashSet<_> = failed.map(|output| output.id).collect();
        let advances = self.flights.front().map_or(&[][..], |flight| &flight.advances);
        advances.iter().filter(|in_flight| failed.contains(&in_flight.id)).map(|in_flight| in_flight.stay).collect()
    }

    fn take_output(&mut self, result: &StepResult, id: SequenceId, output_index: usize) -> Event {
        let Some(token_ids) = &result.outputs[output_index].token_ids else {
            self.end(id);
            return Event::Failed { id, output_index };
        };
        let sequence = self.sequences.get_mut(&id).expect("invariant: a matched output's sequence is known");
        let finish_reason = token_ids.iter().find_map(|token_id| sequence.accept(*token_id));
        self.share(id);
        if finish_reason.is_some() {
            self.end(id);
        }
        Event::Advanced { id, output_index, num_tokens: token_ids.len(), finish_reason }
    }
}

/// `index`, if that output has as many tokens as were planned: one where it samples, else none.
fn checked(result: &StepResult, index: usize, in_flight: &InFlight) -> Result<usize, ApplyError> {
    let expected = usize::from(in_flight.sample);
    match &result.outputs[index].token_ids {
        Some(token_ids) if token_ids.len() != expected => {
            Err(ApplyError::TokenCount { step: result.step, id: in_flight.id, expected, got: token_ids.len() })
        }
        _ => Ok(index),
    }
}
