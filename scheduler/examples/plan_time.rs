//! How long `plan` and `apply` take with 256 sequences that decode, and what a long queue and a full cache add to that:
//! `cargo run --release -p penstock-scheduler --example plan_time`.

use std::time::{Duration, Instant};

use penstock_scheduler::{Limits, Output, Plan, Scheduler, SequenceId, StepResult, Submission, TokenId};

const NUM_RUNNING: u64 = 256;
const NUM_STEPS: u32 = 2000;
const BLOCK_TOKENS: u32 = 16;
const FULL_CACHE_BLOCKS: u32 = 100_000;

fn main() {
    for (name, num_queued, num_cached_blocks, prefix_caching) in [
        ("alone, no cache", 0, 0, false),
        ("alone", 0, 0, true),
        ("10,000 queued", 10_000, 0, true),
        ("100,000 blocks cached", 0, FULL_CACHE_BLOCKS, true),
        ("both", 10_000, FULL_CACHE_BLOCKS, true),
    ] {
        let mut scheduler = scheduler(prefix_caching, num_cached_blocks);
        for id in 0..NUM_RUNNING + num_queued {
            submit(&mut scheduler, id, prompt(id, 40), 2 * NUM_STEPS);
        }
        while scheduler.stats().num_running < NUM_RUNNING as usize {
            step(&mut scheduler);
        }
        step(&mut scheduler);
        let (mut planning, mut applying) = (Duration::ZERO, Duration::ZERO);
        for _ in 0..NUM_STEPS {
            let (plan_time, apply_time) = step(&mut scheduler);
            planning += plan_time;
            applying += apply_time;
        }
        let (plan_ns, apply_ns) = ((planning / NUM_STEPS).as_nanos(), (applying / NUM_STEPS).as_nanos());
        let stats = scheduler.stats();
        println!(
            "{name:24} plan {plan_ns:>7} ns  apply {apply_ns:>7} ns  {} cached, {} queued",
            stats.num_cached_blocks, stats.num_queued
        );
    }
}

/// With so many blocks in the cache, and none but them once the running sequences have taken theirs.
fn scheduler(prefix_caching: bool, num_cached_blocks: u32) -> Scheduler {
    let mut scheduler = Scheduler::new(Limits {
        max_step_tokens: 8192,
        max_step_sequences: NUM_RUNNING as u32,
        max_sequence_tokens: 131_072,
        num_blocks: num_cached_blocks.max(80_000),
        block_tokens: BLOCK_TOKENS,
        max_steps_in_flight: 2,
        prefix_caching,
        priority_ageing: Some(Duration::from_secs(10)),
        max_inter_token: None,
        max_overtaking: 4,
    });
    for id in 0..u64::from(num_cached_blocks / 500) {
        submit(&mut scheduler, id, prompt(1_000_000 + id, 500 * BLOCK_TOKENS), 1);
        while scheduler.stats().num_queued + scheduler.stats().num_running > 0 {
            step(&mut scheduler);
        }
    }
    scheduler
}

fn prompt(text: u64, num_tokens: u32) -> Vec<TokenId> {
    (0..num_tokens).map(|i| (text as u32).wrapping_mul(2_654_435_761).wrapping_add(i)).collect()
}

fn submit(scheduler: &mut Scheduler, id: u64, prompt_token_ids: Vec<TokenId>, max_new_tokens: u32) {
    let submission = Submission {
        id: SequenceId(id),
        prompt_token_ids,
        max_new_tokens,
        stop_token_ids: [].into(),
        priority: 0,
        salt: 0,
        prefix_caching: true,
        group: None,
        needs_prompt_logprobs: false,
    };
    if let Err(error) = scheduler.submit(submission, Duration::ZERO) {
        panic!("{error}");
    }
}

fn step(scheduler: &mut Scheduler) -> (Duration, Duration) {
    let begin = Instant::now();
    let Some(plan) = scheduler.plan(Duration::ZERO) else { panic!("nothing to do") };
    let plan_time = begin.elapsed();
    let result = answer(&plan);
    let begin = Instant::now();
    if let Err(error) = scheduler.apply(&result) {
        panic!("{error}");
    }
    (plan_time, begin.elapsed())
}

fn answer(plan: &Plan) -> StepResult {
    let sampled = plan.advances.iter().filter(|advance| advance.sample);
    let outputs =
        sampled.map(|advance| Output { id: advance.id, token_ids: Some(vec![plan.step as TokenId]) }).collect();
    StepResult { step: plan.step, outputs }
}
