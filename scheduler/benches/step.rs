//! The cost of one step: `plan` and `apply` together, while all running sequences decode and one step is ahead of its
//! results. Measured by the number of running sequences, and with a long queue and a full cache, which must not matter.
//!
//! Measures CPU time of the thread, so that a busy machine gives nearly the same figures as an idle one. Reading that
//! clock takes about 0.3 µs, which is included. Run `cargo bench -p penstock-scheduler`; `make bench-scheduler` keeps
//! the result.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use nix::time::{ClockId, clock_gettime};
use penstock_scheduler::{Limits, Plan, Scheduler, SequenceId, SequenceOutput, StepResult, Submission, TokenId};

const BLOCK_TOKENS: u32 = 16;
/// Steps of a run: by its end the sequences have grown to some thousand tokens.
const RUN_STEPS: u32 = 2000;

#[derive(Clone, Copy, Default)]
struct Load {
    num_running: u32,
    num_queued: u32,
    /// Blocks that earlier sequences have left in the cache; if not 0, all blocks of the pool.
    num_cached_blocks: u32,
}

fn per_step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("running");
    for num_running in [1, 4, 16, 64, 256] {
        group.throughput(Throughput::Elements(num_running.into()));
        let load = Load { num_running, ..Load::default() };
        group.bench_with_input(BenchmarkId::from_parameter(num_running), &load, |bencher, load| {
            let mut run = Run::new(*load);
            bencher.iter_custom(|num_steps| time(&mut run, num_steps));
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("256_running");
    let load = Load { num_running: 256, ..Load::default() };
    for (name, load) in [
        ("1000_queued", Load { num_queued: 1000, ..load }),
        ("10000_queued", Load { num_queued: 10_000, ..load }),
        ("40000_blocks_cached", Load { num_cached_blocks: 40_000, ..load }),
        ("100000_blocks_cached", Load { num_cached_blocks: 100_000, ..load }),
        ("10000_queued_100000_blocks_cached", Load { num_queued: 10_000, num_cached_blocks: 100_000, ..load }),
    ] {
        group.bench_function(name, |bencher| {
            let mut run = Run::new(load);
            bencher.iter_custom(|num_steps| time(&mut run, num_steps));
        });
    }
    group.finish();
}

/// Time in the scheduler for `num_steps` steps.
fn time(run: &mut Run, num_steps: u64) -> Duration {
    let mut total = Duration::ZERO;
    for _ in 0..num_steps {
        if run.steps_left == 0 {
            *run = Run::new(run.load);
        }
        total += run.step();
    }
    total
}

struct Run {
    load: Load,
    scheduler: Scheduler,
    in_flight: Plan,
    steps_left: u32,
}

impl Run {
    /// A scheduler in which all `num_running` sequences are decoding, and one step is in flight.
    fn new(load: Load) -> Run {
        let mut scheduler = Scheduler::new(Limits {
            max_step_tokens: 8192,
            max_step_sequences: load.num_running,
            max_sequence_tokens: 1 << 20,
            num_blocks: if load.num_cached_blocks > 0 { load.num_cached_blocks } else { 100_000 },
            block_tokens: BLOCK_TOKENS,
            max_steps_in_flight: 2,
            prefix_caching: true,
            priority_ageing: Duration::from_secs(10),
            ..Limits::PLAIN
        });
        for text in 0..load.num_cached_blocks / 500 {
            submit(&mut scheduler, text, prompt(1_000_000 + text, 500 * BLOCK_TOKENS), 1);
            while scheduler.stats().num_queued + scheduler.stats().num_running > 0 {
                let plan = plan(&mut scheduler);
                apply(&mut scheduler, &answer(&plan));
            }
        }
        for id in 0..load.num_running + load.num_queued {
            // Different lengths, so that the sequences need new blocks in different steps.
            submit(&mut scheduler, id, prompt(id, 40 + id % BLOCK_TOKENS), 2 * RUN_STEPS);
        }
        let mut in_flight = plan(&mut scheduler);
        while scheduler.stats().num_running < load.num_running as usize
            || in_flight.advances.iter().any(|it| it.num_tokens > 1)
        {
            let next = plan(&mut scheduler);
            apply(&mut scheduler, &answer(&in_flight));
            in_flight = next;
        }
        assert_eq!(scheduler.stats().num_queued, load.num_queued as usize);
        assert!(scheduler.stats().num_cached_blocks >= load.num_cached_blocks as usize / 2);
        let mut run = Run { load, scheduler, in_flight, steps_left: RUN_STEPS };
        // Filling the prefix cache has evicted the processor's caches.
        for _ in 0..RUN_STEPS / 20 {
            run.step();
        }
        run
    }

    fn step(&mut self) -> Duration {
        self.steps_left -= 1;
        let result = answer(&self.in_flight);
        let begin = cpu_time();
        self.in_flight = plan(&mut self.scheduler);
        apply(&mut self.scheduler, &result);
        cpu_time() - begin
    }
}

fn cpu_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("every Linux has this clock").into()
}

fn prompt(text: u32, num_tokens: u32) -> Vec<TokenId> {
    (0..num_tokens).map(|i| text.wrapping_mul(2_654_435_761).wrapping_add(i)).collect()
}

fn submit(scheduler: &mut Scheduler, id: u32, prompt_token_ids: Vec<TokenId>, max_new_tokens: u32) {
    let submission = Submission {
        id: SequenceId(id.into()),
        prompt_token_ids,
        generated_token_ids: Vec::new(),
        max_new_tokens,
        stop_token_ids: [].into(),
        priority: 0,
        group: None,
        cache_salt: None,
        content_salts: [].into(),
        needs_prompt_outputs: false,
        num_source_tokens: 0,
        whole_spans: [].into(),
        images: [].into(),
        has_grammar: false,
    };
    scheduler.submit(submission, Duration::ZERO).expect("the sequence fits into the pool");
}

fn plan(scheduler: &mut Scheduler) -> Plan {
    scheduler.plan(Duration::ZERO).expect("there is work")
}

fn apply(scheduler: &mut Scheduler, result: &StepResult) {
    scheduler.apply(result).expect("the result of the oldest step");
}

fn answer(plan: &Plan) -> StepResult {
    let sampled = plan.advances.iter().filter(|advance| advance.sample);
    let outputs = sampled
        .map(|it| SequenceOutput {
            id: it.id,
            token_ids: Some(vec![plan.step as TokenId]),
            num_draft_tokens: 0,
            drafted_by_model: false,
        })
        .collect();
    StepResult { step: plan.step, outputs }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(30)
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(3));
    targets = per_step
}
criterion_main!(benches);
