//! All sequences without a terminal event: the scheduler, and the stream of each sequence.
//!
//! INVARIANT: a sequence is open exactly while the scheduler knows it, and leaves with one terminal event or by an abort.
//! INVARIANT: a sequence fails as the cause of group losses only when it ran alone in the last one. Before that, every
//! sequence of the lost steps is as likely a cause (docs/adr/worker-failures.md).

use std::hash::RandomState;
use std::sync::Arc;
use std::time::Duration;

use penstock_scheduler::{
    self as scheduler, ApplyError, Drafted, Event, Forecast, Limits, Plan, Scheduler, SequenceId, Stats, Submission,
    SubmitError,
};
use rustc_hash::FxHashMap;
use tokio::time::Instant;

use super::moving::{Handover, MovingSequence};
use super::open_sequence::OpenSequence;
use super::options::MAX_LOSSES;
use super::owner::Owner;
use super::timelines::{Timelines, TracedAdvance};
use crate::generator::{Alarm, EventSender};
use crate::sequence::{
    Constants, FinishReason, ImageSpan, SequenceEvent, SequenceFailure, SequenceRequest, image_groups,
};
use crate::telemetry::metrics;
use crate::worker::{Fault, Output, OutputError, StepReport};

/// The token that stands for a vector in the scheduler, where it is the last token of its sequence.
const VECTOR: u32 = 0;

pub(super) struct OpenSequences {
    scheduler: Scheduler,
    open: FxHashMap<SequenceId, OpenSequence>,
    timelines: Timelines,
    alarm: Alarm,
    /// Sequences to run alone, one after the other, the last one first.
    quarantine: Vec<SequenceId>,
    /// Whether clients are told of their drafts: not without `--speculate`.
    shows_drafts: bool,
    image_keys: RandomState,
    epoch: Instant,
}

/// What a step gave.
#[derive(Default)]
pub(super) struct Delivered {
    pub(super) num_tokens: usize,
    /// Tokens after the first of their sequences.
    pub(super) num_next_tokens: usize,
    /// Sequences that got a token and wait for the next one.
    pub(super) num_decoding: usize,
}

impl OpenSequences {
    pub(super) fn new(limits: Limits) -> Self {
        Self {
            scheduler: Scheduler::new(limits),
            open: FxHashMap::default(),
            timelines: Timelines::default(),
            alarm: Alarm::new(),
            quarantine: Vec::new(),
            shows_drafts: !limits.drafts_only_forced,
            image_keys: RandomState::new(),
            epoch: Instant::now(),
        }
    }

    pub(super) fn stats(&self) -> Stats {
        self.scheduler.stats()
    }

    pub(super) fn submit(&mut self, id: SequenceId, request: SequenceRequest, owner: Arc<Owner>, events: EventSender) {
        self.adopt(MovingSequence::new(id, request, owner, events));
    }

    /// Queues a sequence that is new, or that another engine had.
    pub(super) fn adopt(&mut self, moving: MovingSequence) {
        let MovingSequence { id, token_ids: mut prompt_token_ids, sequence, timeline } = moving;
        let terms = sequence.terms().clone();
        let whole = sequence.constants().images.iter().filter(|image| image.is_whole);
        let submission = Submission {
            id,
            generated_token_ids: prompt_token_ids.split_off(terms.num_prompt_tokens),
            prompt_token_ids,
            max_new_tokens: terms.max_new_tokens,
            stop_token_ids: sequence.constants().sampling.stop_token_ids.as_slice().into(),
            priority: terms.priority,
            group: terms.group,
            cache_salt: sequence.constants().cache_salt,
            content_salts: terms.content_salts,
            needs_prompt_outputs: terms.needs_prompt_outputs,
            num_source_tokens: terms.num_source_tokens,
            whole_spans: whole.map(ImageSpan::tokens).collect(),
            images: image_groups(&sequence.constants().images, &self.image_keys),
            has_grammar: sequence.constants().grammar.is_some(),
        };
        // One that arrived before this engine began goes first.
        match self.scheduler.submit(submission, terms.arrived_at.saturating_duration_since(self.epoch)) {
            Ok(()) => {
                self.open.insert(id, sequence);
                if let Some(timeline) = timeline {
                    self.timelines.insert(id, timeline);
                }
            }
            Err(
                error @ (SubmitError::WholeSpan { .. }
                | SubmitError::WholePrompt { .. }
                | SubmitError::ImagesTooLarge { .. }),
            ) => {
                sequence.end(SequenceEvent::Failed(SequenceFailure::Request(error.to_string())));
            }
            Err(error) => sequence.end(SequenceEvent::Failed(SequenceFailure::Sequence(error.to_string()))),
        }
    }

    /// After the loss of a group, offers the sequences to other engines, the oldest ones first, and keeps those that are returned. Those that may have caused the
    /// loss of a group are not offered, so that they cost no other engine its group.
    pub(super) fn hand_over(&mut self, handover: &dyn Handover) {
        let may_leave = |(id, sequence): (&_, &OpenSequence)| (!sequence.needs_quarantine()).then_some(*id);
        let mut ids: Vec<_> = self.open.iter().filter_map(may_leave).collect();
        ids.sort_unstable();
        let withdraw = |id| {
            let (token_ids, sequence) = (self.scheduler.withdraw(id)?, self.open.remove(&id)?);
            Some(MovingSequence { id, token_ids, sequence, timeline: self.timelines.remove(id) })
        };
        let leaving = ids.into_iter().filter_map(withdraw).collect();
        for returned in handover.hand_over(leaving, true) {
            self.adopt(returned);
        }
    }

    pub(super) fn abort(&mut self, id: SequenceId) {
        if self.open.remove(&id).is_some() {
            self.timelines.remove(id);
            self.scheduler.abort(id);
        }
    }

    /// The next step, if one can be planned now. Announces the sequences that it starts.
    pub(super) fn plan(&mut self) -> Option<Plan> {
        self.advance_quarantine();
        let plan = self.scheduler.plan(self.epoch.elapsed())?;
        self.timelines.note_plan(&plan);
        for new in &plan.new_sequences {
            if let Some(sequence) = self.open.get_mut(&new.id) {
                sequence.start(new.num_computed_tokens as usize);
            }
        }
        Some(plan)
    }

    /// The sequences of a planned step whose requests are traced.
    pub(super) fn traced(&self, plan: &Plan) -> Vec<TracedAdvance> {
        self.timelines.advances(plan)
    }

    /// The constants of a planned sequence.
    pub(super) fn constants(&self, id: SequenceId) -> &Constants {
        self.open.get(&id).expect("invariant: a planned sequence is open").constants()
    }

    /// Teaches the scheduler how long a step took; returns what it had expected. To be called before `apply`.
    pub(super) fn observe(&mut self, report: &StepReport, duration: Duration) -> Option<Forecast> {
        let drafted = Drafted {
            num_tokens: report.num_draft_tokens(),
            by_model: report.outputs.iter().any(|output| output.drafted_by_model),
            duration: report.timing.draft,
        };
        self.scheduler.observe(report.step, duration, drafted)
    }

    /// Applies a step's report to the scheduler, and returns what to `deliver`. An error means that the report is wrong.
    pub(super) fn apply(&mut self, report: &StepReport) -> Result<Vec<Event>, ApplyError> {
        let output = |output: &Output| scheduler::SequenceOutput {
            id: output.id,
            token_ids: match output.vector {
                Some(_) => Some(vec![VECTOR]),
                None => output.tokens.as_ref().ok().map(|tokens| tokens.iter().map(|token| token.id).collect()),
            },
            num_draft_tokens: output.num_draft_tokens,
            drafted_by_model: output.drafted_by_model,
        };
        let outputs = report.outputs.iter().map(output).collect();
        self.scheduler.apply(&scheduler::StepResult { step: report.step, outputs })
    }

    /// Sends the events of a step that was reported at `reported_at` to their streams.
    pub(super) fn deliver(&mut self, events: Vec<Event>, outputs: &[Output], reported_at: Instant) -> Delivered {
        let mut delivered = Delivered::default();
        let (mut gaps, mut readers) = (Vec::new(), Vec::new());
        for event in events {
            match event {
                Event::Advanced { id, output_index, num_tokens, finish_reason } => {
                    delivered.num_tokens += num_tokens;
                    delivered.num_decoding += usize::from(num_tokens > 0 && finish_reason.is_none());
                    let Some(sequence) = self.open.get_mut(&id) else { continue };
                    let output = &outputs[output_index];
                    match &output.vector {
                        Some(vector) => sequence.send_vector(vector),
                        None => {
                            sequence.send_prompt_tokens(&output.prompt_tokens);
                            let sampled = output.tokens.as_deref().unwrap_or_default();
                            let tokens = &sampled[..num_tokens];
                            if self.shows_drafts {
                                // The step's last token is no draft; the one that ended the sequence may be.
                                let num_right = num_tokens.min(sampled.len().saturating_sub(1));
                                sequence.send_drafts(output.num_draft_tokens, num_right);
                            }
                            let gap = sequence.send_tokens(tokens, reported_at);
                            let num_first = usize::from(gap.is_none());
                            delivered.num_next_tokens += tokens.len().saturating_sub(num_first);
                            gaps.extend(gap);
                        }
                    }
                    readers.extend(sequence.take_reader());
                    if let Some(reason) = finish_reason {
                        self.end(id, SequenceEvent::Finished(reason));
                    }
                }
                Event::Failed { id, output_index } => {
                    let terminal = match outputs[output_index].tokens.clone().err() {
                        Some(OutputError { fault: Fault::None, .. }) => {
                            SequenceEvent::Finished(FinishReason::StopToken)
                        }
                        Some(OutputError { reason, fault: Fault::Request }) => {
                            SequenceEvent::Failed(SequenceFailure::Request(reason))
                        }
                        error => {
                            let reason = error.map(|error| error.reason).unwrap_or_default();
                            SequenceEvent::Failed(SequenceFailure::Sequence(reason))
                        }
                    };
                    self.end(id, terminal);
                }
            }
        }
        self.alarm.wake(readers);
        metrics::next_tokens(&gaps);
        delivered
    }

    /// Queues every sequence again after the group was lost for this reason. Sequences that were in flight get closer to quarantine; one that
    /// was in flight in `MAX_LOSSES` losses in a row fails.
    pub(super) fn requeue(&mut self, reason: &str) {
        self.timelines.lose_group(reason);
        for (id, max_tokens_in_flight) in self.scheduler.restart() {
            let Some(sequence) = self.open.get_mut(&id) else { continue };
            sequence.record_loss(max_tokens_in_flight);
            if sequence.is_given_up() {
                let reason = format!(
                    "the model workers stopped {MAX_LOSSES} times in a row while they computed this sequence, \
                     the last time alone; it is not tried again"
                );
                tracing::error!("{reason}");
                self.scheduler.abort(id);
                self.end(id, SequenceEvent::Failed(SequenceFailure::Sequence(reason)));
            }
        }
        let needs_quarantine = |(id, sequence): (&_, &OpenSequence)| sequence.needs_quarantine().then_some(*id);
        self.quarantine = self.open.iter().filter_map(needs_quarantine).collect();
        // The youngest runs first: the older ones have done more work without a loss.
        self.quarantine.sort_unstable();
    }

    pub(super) fn has_quarantine(&self) -> bool {
        !self.quarantine.is_empty()
    }

    /// Lets the next sequence in quarantine run alone until it is cleared; with none left, lets all run.
    fn advance_quarantine(&mut self) {
        while let Some(id) = self.quarantine.last().copied() {
            if self.open.get(&id).is_some_and(OpenSequence::needs_quarantine) {
                return self.scheduler.quarantine(Some(id));
            }
            self.quarantine.pop();
            self.scheduler.quarantine(None);
        }
    }

    /// Fails every sequence, without telling the scheduler: no step follows.
    pub(super) fn fail_all(&mut self, failure: &SequenceFailure) {
        self.timelines.clear();
        for (_, sequence) in self.open.drain() {
            sequence.end(SequenceEvent::Failed(failure.clone()));
        }
    }

    fn end(&mut self, id: SequenceId, terminal: SequenceEvent) {
        if let Some(sequence) = self.open.remove(&id) {
            self.timelines.remove(id);
            sequence.end(terminal);
        }
    }
}
