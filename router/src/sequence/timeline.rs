//! When one sequence started, advanced, was interrupted and ended. The engine and the sequence's stream write it, the
//! request's trace reads it.
//!
//! INVARIANT: a timeline's memory is bounded. Of each phase's steps it keeps totals, and the slowest steps.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const MAX_SLOWEST_STEPS: usize = 8;
const MAX_INTERRUPTIONS: usize = 8;

/// A handle on the timeline of one sequence. Clones share the timeline.
#[derive(Clone, Debug, Default)]
pub struct Timeline(Arc<Mutex<History>>);

/// What happened to a sequence.
#[derive(Clone, Debug, Default)]
pub(crate) struct History {
    /// When the first step was planned; `None`: the sequence has not left the queue.
    pub(crate) started: Option<Instant>,
    /// When the result of the step with the first token arrived.
    pub(crate) first_token: Option<Instant>,
    /// Steps up to that one.
    pub(crate) prefill: PhaseSteps,
    /// Steps after that one.
    pub(crate) decode: PhaseSteps,
    /// The first ones.
    pub(crate) interruptions: Vec<Interruption>,
    pub(crate) num_interruptions: usize,
    /// `None`: the sequence runs, failed or was aborted.
    pub(crate) end: Option<End>,
}

/// The steps of one phase.
#[derive(Clone, Debug, Default)]
pub(crate) struct PhaseSteps {
    pub(crate) num_steps: u32,
    /// Tokens that these steps computed for the sequence.
    pub(crate) num_tokens: u64,
    /// What the worker spent in the model, for all sequences of these steps.
    pub(crate) worker_forward: Duration,
    /// The steps with the longest intervals, in no order.
    pub(crate) slowest: Vec<StepShare>,
    /// Position in `slowest` of the shortest interval.
    shortest: usize,
}

/// A step, and one sequence's share of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepShare {
    /// The step's number.
    pub(crate) step: u64,
    /// When the step's result arrived.
    pub(crate) reported: Instant,
    /// What the step added to the time that its sequences waited.
    pub(crate) interval: Duration,
    /// What the worker spent in the model.
    pub(crate) worker_forward: Duration,
    /// Sequences in the step.
    pub(crate) num_sequences: usize,
    /// Tokens that the step computed for this sequence.
    pub(crate) num_tokens: u32,
    /// Whether the step gave this sequence a token.
    pub(crate) samples: bool,
}

/// A time in which a started sequence was in no step.
#[derive(Clone, Debug)]
pub(crate) struct Interruption {
    pub(crate) cause: InterruptionCause,
    pub(crate) began: Instant,
    /// When the sequence was planned again; `None`: it was not.
    pub(crate) ended: Option<Instant>,
}

#[derive(Clone, Debug)]
pub(crate) enum InterruptionCause {
    /// Other sequences needed the KV blocks.
    Preemption,
    /// The worker group was lost, for this reason.
    WorkerFailure(Arc<str>),
}

/// A complete sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct End {
    pub(crate) at: Instant,
    /// `None`: the sequence was pooled.
    pub(crate) finish_reason: Option<&'static str>,
    pub(crate) num_generated_tokens: u32,
    /// Prompt tokens that were found in the prefix cache.
    pub(crate) num_cached_tokens: usize,
}

impl Timeline {
    /// A step with the sequence was planned, the first one or the first one after an interruption.
    pub(crate) fn start(&self, now: Instant) {
        let mut history = self.history_mut();
        if history.started.is_none() {
            history.started = Some(now);
        } else if let Some(interruption) = history.open_interruption() {
            interruption.ended = Some(now);
        }
    }

    /// The worker no longer knows the sequence. Has no effect on a sequence that waits or is complete.
    pub(crate) fn interrupt(&self, cause: InterruptionCause, now: Instant) {
        let mut history = self.history_mut();
        if history.started.is_none() || history.end.is_some() || history.open_interruption().is_some() {
            return;
        }
        history.num_interruptions += 1;
        if history.interruptions.len() < MAX_INTERRUPTIONS {
            history.interruptions.push(Interruption { cause, began: now, ended: None });
        }
    }

    /// The result of a step with the sequence arrived.
    pub(crate) fn add_step(&self, share: &StepShare) {
        let mut history = self.history_mut();
        if history.end.is_some() {
            return; // It was planned before the end was known.
        }
        let phase = if history.first_token.is_none() { &mut history.prefill } else { &mut history.decode };
        phase.add(share);
        if share.samples {
            history.first_token.get_or_insert(share.reported);
        }
    }

    /// The sequence is complete.
    pub(crate) fn end(&self, end: End) {
        self.history_mut().end.get_or_insert(end);
    }

    /// What has happened so far.
    pub(crate) fn history(&self) -> History {
        self.history_mut().clone()
    }

    fn history_mut(&self) -> MutexGuard<'_, History> {
        // Plain data: a panic cannot leave it in a state that matters.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl History {
    fn open_interruption(&mut self) -> Option<&mut Interruption> {
        self.interruptions.last_mut().filter(|interruption| interruption.ended.is_none())
    }
}

impl PhaseSteps {
    fn add(&mut self, share: &StepShare) {
        self.num_steps = self.num_steps.saturating_add(1);
        self.num_tokens += u64::from(share.num_tokens);
        self.worker_forward += share.worker_forward;
        if self.slowest.len() < MAX_SLOWEST_STEPS {
            self.slowest.push(*share);
        } else if share.interval > self.slowest[self.shortest].interval {
            self.slowest[self.shortest] = *share;
        } else {
            return;
        }
        let by_interval = self.slowest.iter().enumerate().min_by_key(|(_, share)| share.interval);
        self.shortest = by_interval.map_or(0, |(position, _)| position);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(step: u64, milliseconds: u64) -> StepShare {
        StepShare {
            step,
            reported: Instant::now(),
            interval: Duration::from_millis(milliseconds),
            worker_forward: Duration::from_millis(1),
            num_sequences: 1,
            num_tokens: 1,
            samples: true,
        }
    }

    #[test]
    fn the_slowest_steps_are_kept_whatever_their_order() {
        for reversed in [false, true] {
            let timeline = Timeline::default();
            timeline.start(Instant::now());
            timeline.add_step(&share(0, 0));
            let durations = (1..=1000_u64).map(|number| number * 7919 % 1009);
            let mut durations: Vec<_> = durations.collect();
            if reversed {
                durations.reverse();
            }
            for (step, &duration) in (1..).zip(&durations) {
                timeline.add_step(&share(step, duration));
            }
            let history = timeline.history();
            assert_eq!((history.prefill.num_steps, history.decode.num_steps), (1, 1000));
            let mut kept: Vec<_> = history.decode.slowest.iter().map(|step| step.interval.as_millis()).collect();
            kept.sort_unstable();
            durations.sort_unstable();
            let expected: Vec<_> = durations[992..].iter().map(|&duration| u128::from(duration)).collect();
            assert_eq!(kept, expected);
        }
    }

    #[test]
    fn the_first_token_ends_the_prefill() {
        let timeline = Timeline::default();
        timeline.start(Instant::now());
        timeline.add_step(&StepShare { samples: false, num_tokens: 512, ..share(1, 10) });
        assert!(timeline.history().first_token.is_none());
        timeline.add_step(&StepShare { num_tokens: 100, ..share(2, 5) });
        timeline.add_step(&share(3, 1));
        let history = timeline.history();
        assert_eq!((history.prefill.num_steps, history.prefill.num_tokens), (2, 612));
        assert_eq!((history.decode.num_steps, history.decode.num_tokens), (1, 1));
    }

    #[test]
    fn an_interruption_lasts_until_the_next_plan() {
        let timeline = Timeline::default();
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        timeline.interrupt(InterruptionCause::Preemption, now);
        assert_eq!(timeline.history().num_interruptions, 0, "it waits in the queue");
        timeline.start(now);
        timeline.interrupt(InterruptionCause::WorkerFailure("killed".into()), later(1));
        timeline.interrupt(InterruptionCause::Preemption, later(2));
        timeline.start(later(3));
        let history = timeline.history();
        assert_eq!((history.num_interruptions, history.started), (1, Some(now)));
        let interruption = &history.interruptions[0];
        assert_eq!((interruption.began, interruption.ended), (later(1), Some(later(3))));
        assert!(matches!(&interruption.cause, InterruptionCause::WorkerFailure(reason) if &**reason == "killed"));
    }

    #[test]
    fn a_complete_sequence_takes_no_more_steps() {
        let timeline = Timeline::default();
        timeline.start(Instant::now());
        timeline.add_step(&share(1, 1));
        let end =
            End { at: Instant::now(), finish_reason: Some("length"), num_generated_tokens: 1, num_cached_tokens: 0 };
        timeline.end(end);
        timeline.add_step(&share(2, 1));
        timeline.interrupt(InterruptionCause::Preemption, Instant::now());
        let history = timeline.history();
        assert_eq!((history.decode.num_steps, history.num_interruptions), (0, 0));
    }
}
