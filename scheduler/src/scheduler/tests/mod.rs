//! The scheduler's rules, each on a minimal example. Random traffic is in `tests/simulation`.

mod end;
mod image;
mod latency;
mod pipeline;
mod priority;
mod restart;
mod sharing;
mod source;
mod speculation;
mod state;
mod step;
mod submission;
mod whole;
mod window;

use std::sync::Arc;
use std::time::Duration;

use crate::{
    ApplyError, ContentSalt, Drafted, Event, FinishReason, ImageGroup, Limits, Plan, Scheduler, SequenceId,
    SequenceOutput, Stats, StepResult, Submission, SubmitError, TokenId,
};

const TOKEN: TokenId = 1;
const STOP: TokenId = 2;

/// Limits with blocks of 4 tokens.
fn limits(num_blocks: u32, max_steps_in_flight: u32) -> Limits {
    Limits {
        max_step_tokens: 16,
        max_step_sequences: 8,
        max_sequence_tokens: 100,
        num_blocks,
        block_tokens: 4,
        max_steps_in_flight,
        ..Limits::PLAIN
    }
}

fn submission(id: u64, num_prompt_tokens: usize, max_new_tokens: u32) -> Submission {
    Submission {
        id: SequenceId(id),
        prompt_token_ids: vec![TOKEN; num_prompt_tokens],
        generated_token_ids: Vec::new(),
        max_new_tokens,
        stop_token_ids: [STOP].into(),
        priority: 0,
        group: None,
        cache_salt: None,
        content_salts: [].into(),
        needs_prompt_outputs: false,
        num_source_tokens: 0,
        whole_spans: Arc::default(),
        images: Arc::default(),
        has_grammar: false,
    }
}

fn scheduler(limits: Limits, submissions: &[(u64, usize, u32)]) -> Scheduler {
    let mut scheduler = Scheduler::new(limits);
    for (id, num_prompt_tokens, max_new_tokens) in submissions {
        submit(&mut scheduler, submission(*id, *num_prompt_tokens, *max_new_tokens));
    }
    scheduler
}

fn submit(scheduler: &mut Scheduler, submission: Submission) {
    scheduler.submit(submission, Duration::ZERO).unwrap();
}

fn plan(scheduler: &mut Scheduler) -> Plan {
    let plan = scheduler.plan(Duration::ZERO).expect("something to do");
    scheduler.audit();
    plan
}

fn nothing_to_plan(scheduler: &mut Scheduler) -> bool {
    scheduler.plan(Duration::ZERO).is_none()
}

/// The result of a worker that samples `token_id` for every sequence.
fn answer(plan: &Plan, token_id: TokenId) -> StepResult {
    let sampled = plan.advances.iter().filter(|advance| advance.sample);
    let outputs = sampled
        .map(|advance| SequenceOutput {
            id: advance.id,
            token_ids: Some(vec![token_id]),
            num_draft_tokens: 0,
            drafted_by_model: false,
        })
        .collect();
    StepResult { step: plan.step, outputs }
}

fn step(scheduler: &mut Scheduler) -> (Plan, Vec<Event>) {
    let plan = plan(scheduler);
    let events = scheduler.apply(&answer(&plan, TOKEN)).unwrap();
    (plan, events)
}

/// Runs until all sequences have ended.
fn run_to_end(scheduler: &mut Scheduler) -> Vec<Plan> {
    let has_sequences = |stats: Stats| stats.num_queued + stats.num_running > 0;
    std::iter::from_fn(|| has_sequences(scheduler.stats()).then(|| step(scheduler).0)).collect()
}

/// Id and number of tokens of each advance.
fn advances(plan: &Plan) -> Vec<(u64, u32)> {
    plan.advances.iter().map(|advance| (advance.id.0, advance.num_tokens)).collect()
}

fn new_ids(plan: &Plan) -> Vec<u64> {
    plan.new_sequences.iter().map(|start| start.id.0).collect()
}

fn finish_reasons(events: &[Event]) -> Vec<Option<FinishReason>> {
    events
        .iter()
        .map(|event| match event {
            Event::Advanced { finish_reason, .. } => *finish_reason,
            Event::Failed { .. } => None,
        })
        .collect()
}

/// Runs `num_steps` steps, each planned before the previous result is applied; the last one stays in flight.
fn run_ahead(scheduler: &mut Scheduler, num_steps: usize) -> Plan {
    let mut in_flight = plan(scheduler);
    for _ in 1..num_steps {
        let next = plan(scheduler);
        scheduler.apply(&answer(&in_flight, TOKEN)).unwrap();
        in_flight = next;
    }
    in_flight
}
