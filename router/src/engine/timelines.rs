//! The timelines of the open sequences whose requests are traced. Without any, a step costs one comparison.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use penstock_scheduler::{Plan, SequenceId};

use crate::sequence::{InterruptionCause, StepShare, Timeline};

#[derive(Default)]
pub(super) struct Timelines(HashMap<SequenceId, Timeline>);

/// A traced sequence's share of a planned step.
#[derive(Debug)]
pub(super) struct TracedAdvance {
    timeline: Timeline,
    num_tokens: u32,
    samples: bool,
}

impl Timelines {
    pub(super) fn insert(&mut self, id: SequenceId, timeline: Timeline) {
        self.0.insert(id, timeline);
    }

    pub(super) fn remove(&mut self, id: SequenceId) -> Option<Timeline> {
        self.0.remove(&id)
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Notes which sequences the plan starts, and which open ones it takes out of the worker.
    pub(super) fn note_plan(&self, plan: &Plan) {
        if self.0.is_empty() || (plan.freed_sequence_ids.is_empty() && plan.new_sequences.is_empty()) {
            return;
        }
        let now = Instant::now();
        for timeline in plan.freed_sequence_ids.iter().filter_map(|id| self.0.get(id)) {
            timeline.interrupt(InterruptionCause::Preemption, now);
        }
        for timeline in plan.new_sequences.iter().filter_map(|new| self.0.get(&new.id)) {
            timeline.start(now);
        }
    }

    /// The traced sequences of a planned step.
    pub(super) fn advances(&self, plan: &Plan) -> Vec<TracedAdvance> {
        if self.0.is_empty() {
            return Vec::new();
        }
        let traced = plan.advances.iter().filter_map(|advance| {
            let timeline = self.0.get(&advance.id)?.clone();
            Some(TracedAdvance { timeline, num_tokens: advance.num_tokens, samples: advance.sample })
        });
        traced.collect()
    }

    /// The worker group was lost.
    pub(super) fn lose_group(&self, reason: &str) {
        let (now, reason) = (Instant::now(), Arc::<str>::from(reason));
        for timeline in self.0.values() {
            timeline.interrupt(InterruptionCause::WorkerFailure(Arc::clone(&reason)), now);
        }
    }
}

impl TracedAdvance {
    /// The step's result arrived. `step` is the step without this sequence's share.
    pub(super) fn report(&self, step: &StepShare) {
        self.timeline.add_step(&StepShare { num_tokens: self.num_tokens, samples: self.samples, ..*step });
    }
}
