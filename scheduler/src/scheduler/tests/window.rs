//! Sliding windows: blocks before the window are released.

use super::*;

fn windowed(window_tokens: u32, limits: Limits) -> Limits {
    Limits { window_tokens: Some(window_tokens), ..limits }
}

fn num_held(scheduler: &Scheduler) -> usize {
    let stats = scheduler.stats();
    stats.num_blocks - stats.num_allocatable_blocks - stats.num_retiring_blocks
}

#[test]
fn a_sequence_holds_the_blocks_of_its_window_however_long_it_is() {
    let mut scheduler = scheduler(windowed(6, limits(20, 1)), &[(1, 30, 40)]);
    let mut held = Vec::new();
    while scheduler.stats().num_queued + scheduler.stats().num_running > 0 {
        step(&mut scheduler);
        held.push(num_held(&scheduler));
    }
    assert_eq!(held[0], 2, "the next token, at 16, attends to positions 11 and up");
    assert_eq!(held.iter().max(), Some(&2));
}

#[test]
fn a_sequence_is_accepted_if_its_window_fits_into_the_pool() {
    let mut scheduler = Scheduler::new(windowed(6, limits(3, 1)));
    submit(&mut scheduler, submission(1, 50, 50));
    assert_eq!(run_to_end(&mut scheduler).iter().map(|plan| plan.advances[0].num_tokens).sum::<u32>(), 99);
    let rejected = Scheduler::new(windowed(6, limits(2, 1))).submit(submission(1, 50, 50), Duration::ZERO);
    assert_eq!(rejected, Err(SubmitError::TooManyBlocks { num_required_blocks: 3, num_blocks: 2 }));
}

#[test]
fn windows_let_more_sequences_run_at_once() {
    let submissions = [(1, 16, 20), (2, 16, 20), (3, 16, 20)];
    for (limits, num_running) in [(limits(12, 1), 2), (windowed(8, limits(12, 1)), 3)] {
        let mut scheduler = scheduler(Limits { max_step_tokens: 64, ..limits }, &submissions);
        step(&mut scheduler);
        step(&mut scheduler);
        assert_eq!(scheduler.stats().num_running, num_running);
    }
}

#[test]
fn a_block_before_the_window_retires_with_the_step_that_writes_it() {
    let mut scheduler = scheduler(windowed(4, limits(5, 2)), &[(1, 16, 9), (2, 16, 9)]);
    let first = plan(&mut scheduler);
    assert_eq!(advances(&first), [(1, 16)]);
    let stats = scheduler.stats();
    assert_eq!((stats.num_allocatable_blocks, stats.num_retiring_blocks), (1, 3));
    let second = plan(&mut scheduler);
    assert_eq!(second.advances[0].new_block_ids.len(), 1);
    assert!(nothing_to_plan(&mut scheduler), "the run-ahead depth is reached");
    scheduler.apply(&answer(&first, TOKEN)).unwrap();
    let stats = scheduler.stats();
    assert_eq!((stats.num_allocatable_blocks, stats.num_retiring_blocks), (3, 0));
    assert_eq!(new_ids(&plan(&mut scheduler)), [2]);
}

#[test]
fn a_released_block_is_not_allocated_in_the_step_that_reads_it() {
    // With its eighth token, sequence 1 releases a block, and sequence 2 needs exactly that one.
    let mut scheduler = scheduler(windowed(5, limits(3, 1)), &[(1, 7, 5), (2, 4, 1)]);
    assert_eq!(advances(&step(&mut scheduler).0), [(1, 7)]);
    assert_eq!(scheduler.stats().num_allocatable_blocks, 1);
    assert_eq!(advances(&step(&mut scheduler).0), [(1, 1)]);
    assert_eq!(scheduler.stats().num_allocatable_blocks, 2);
}

#[test]
fn a_hit_needs_only_the_blocks_in_the_window_of_the_next_token() {
    let caching = |num_blocks| Limits { prefix_caching: true, ..windowed(6, limits(num_blocks, 1)) };
    let prompt = |id, text: u32| Submission {
        prompt_token_ids: (0..24).map(|i| 1000 * text + i).collect(),
        ..submission(id, 1, 1)
    };
    let mut scheduler = Scheduler::new(caching(8));
    for (id, text, hit) in [(1, 1, 0), (2, 2, 0), (3, 2, 20), (4, 1, 0)] {
        submit(&mut scheduler, prompt(id, text));
        let (plan, _) = step(&mut scheduler);
        let start = &plan.new_sequences[0];
        assert_eq!((start.num_computed_tokens, start.block_ids.len()), (hit, hit as usize / 4), "{id}");
        run_to_end(&mut scheduler);
        scheduler.audit();
    }
}

#[test]
fn a_block_before_the_window_stays_cached() {
    let limits = Limits { prefix_caching: true, max_step_tokens: 64, ..windowed(6, limits(20, 1)) };
    let mut scheduler = Scheduler::new(limits);
    let prompt = |id, num_tokens| Submission { prompt_token_ids: (0..num_tokens).collect(), ..submission(id, 1, 30) };
    submit(&mut scheduler, prompt(1, 40));
    step(&mut scheduler);
    assert_eq!(num_held(&scheduler), 2);
    submit(&mut scheduler, prompt(2, 13));
    assert_eq!(
        step(&mut scheduler).0.new_sequences[0].num_computed_tokens,
        12,
        "sequence 1 has long released these blocks"
    );
}

#[test]
fn a_preempted_sequence_reuses_its_window() {
    let limits = Limits { prefix_caching: true, ..windowed(8, limits(30, 1)) };
    let mut scheduler = scheduler(limits, &[(1, 3, 60)]);
    for _ in 0..30 {
        step(&mut scheduler);
    }
    scheduler.preempt(SequenceId(1), true);
    let (plan, _) = step(&mut scheduler);
    assert_eq!((plan.new_sequences[0].token_ids.len(), plan.new_sequences[0].num_computed_tokens), (33, 32));
    assert_eq!(advances(&plan), [(1, 1)]);
    assert_eq!(num_held(&scheduler), 3);
}

#[test]
fn a_window_of_zero_is_raised_to_one() {
    let mut scheduler = scheduler(windowed(0, limits(1, 1)), &[(1, 9, 3)]);
    assert_eq!(run_to_end(&mut scheduler).iter().map(|plan| plan.advances[0].num_tokens).sum::<u32>(), 11);
}
