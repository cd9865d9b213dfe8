//! Builds the plan of one step.

use std::time::Duration;

use crate::cost::Estimate;
use crate::in_flight::InFlightAdvance;
use crate::plan::{Limits, Plan};

/// A plan in the making, with what the step has left for it.
pub(super) struct PlanBuilder {
    pub(super) plan: Plan,
    pub(super) in_flight: Vec<InFlightAdvance>,
    pub(super) now: Duration,
    /// The work so far, and the step's target duration.
    pub(super) estimate: Estimate,
    /// What is left of `max_step_tokens`.
    pub(super) num_tokens_left: u32,
    /// Offloaded blocks that the step may bring back.
    pub(super) max_restored_blocks: usize,
    /// No more prompt tokens: they would exceed the target duration, or a source needs the next step for itself.
    pub(super) is_closed: bool,
}

impl PlanBuilder {
    pub(super) fn new(step: u64, now: Duration, limits: &Limits, num_running: usize) -> Self {
        Self {
            plan: Plan { step, ..Plan::default() },
            in_flight: Vec::with_capacity(num_running),
            now,
            estimate: Estimate::default(),
            num_tokens_left: limits.max_step_tokens,
            max_restored_blocks: 0,
            is_closed: false,
        }
    }

    /// Whether another prompt may advance.
    pub(super) fn has_room(&self, limits: &Limits) -> bool {
        self.num_tokens_left > 0 && !self.is_closed && self.plan.advances.len() < limits.max_step_sequences as usize
    }
}
