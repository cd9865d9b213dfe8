//! The advances of a step and their blocks; preemption and run-ahead.

use super::*;

#[test]
fn an_idle_scheduler_plans_nothing() {
    assert!(nothing_to_plan(&mut Scheduler::new(limits(8, 2))));
}

#[test]
fn a_prompt_that_exceeds_the_token_budget_is_computed_in_chunks_and_sampled_once() {
    let mut scheduler = scheduler(limits(16, 1), &[(1, 40, 2)]);
    let plans: Vec<_> = (0..4).map(|_| step(&mut scheduler).0).collect();
    assert_eq!(plans.iter().map(advances).collect::<Vec<_>>(), [[(1, 16)], [(1, 16)], [(1, 8)], [(1, 1)]]);
    assert_eq!(plans.iter().map(|plan| plan.advances[0].sample).collect::<Vec<_>>(), [false, false, true, true]);
}

#[test]
fn blocks_are_allocated_only_for_the_tokens_of_the_step() {
    let mut scheduler = scheduler(limits(16, 1), &[(1, 17, 20)]);
    let num_blocks: Vec<_> = (0..6).map(|_| step(&mut scheduler).0.advances[0].new_block_ids.len()).collect();
    // 16 tokens, the 17th, then one token at a time: the next block after 20.
    assert_eq!(num_blocks, [4, 1, 0, 0, 0, 1]);
}

#[test]
fn a_decode_advances_first_in_every_step_of_a_long_prefill() {
    let mut scheduler = scheduler(limits(64, 1), &[(1, 3, 50)]);
    step(&mut scheduler);
    submit(&mut scheduler, submission(2, 60, 10));
    for _ in 0..4 {
        assert_eq!(advances(&step(&mut scheduler).0), [(1, 1), (2, 15)]);
    }
    assert_eq!(advances(&step(&mut scheduler).0), [(1, 1), (2, 1)]);
}

#[test]
fn the_queue_is_admitted_in_order_of_arrival() {
    let mut scheduler = scheduler(limits(64, 1), &[(5, 10, 9), (3, 10, 9), (4, 10, 9)]);
    let (plan, _) = step(&mut scheduler);
    assert_eq!(advances(&plan), [(5, 10), (3, 6)]);
    assert_eq!(new_ids(&plan), [5, 3]);
    assert_eq!(advances(&step(&mut scheduler).0), [(5, 1), (3, 4), (4, 10)]);
}

#[test]
fn finishing_sequences_count_towards_the_step_size() {
    let small = Limits { max_step_sequences: 1, ..limits(8, 1) };
    let mut scheduler = scheduler(small, &[(1, 1, 1), (2, 1, 1)]);
    assert_eq!(advances(&step(&mut scheduler).0), [(1, 1)]);
    assert_eq!(advances(&step(&mut scheduler).0), [(2, 1)]);
}

#[test]
fn no_more_sequences_run_than_can_decode_in_one_step() {
    let narrow = Limits { max_step_tokens: 2, ..limits(8, 1) };
    let mut scheduler = scheduler(narrow, &[(1, 1, 9), (2, 1, 9), (3, 1, 9)]);
    step(&mut scheduler);
    assert_eq!(advances(&step(&mut scheduler).0), [(1, 1), (2, 1)]);
}

#[test]
fn steps_run_ahead_of_results_up_to_the_depth_and_never_past_the_last_token() {
    let mut scheduler = scheduler(limits(8, 3), &[(1, 3, 2)]);
    let first = plan(&mut scheduler);
    let second = plan(&mut scheduler);
    assert_eq!((advances(&first), advances(&second)), (vec![(1, 3)], vec![(1, 1)]));
    assert!(nothing_to_plan(&mut scheduler));
    assert_eq!(finish_reasons(&scheduler.apply(&answer(&first, TOKEN)).unwrap()), [None]);
    assert_eq!(finish_reasons(&scheduler.apply(&answer(&second, TOKEN)).unwrap()), [Some(FinishReason::Length)]);

    let mut scheduler = self::scheduler(limits(8, 2), &[(1, 3, 9)]);
    let first = plan(&mut scheduler);
    plan(&mut scheduler);
    assert!(nothing_to_plan(&mut scheduler), "the run-ahead depth is reached");
    scheduler.apply(&answer(&first, TOKEN)).unwrap();
    assert_eq!(advances(&plan(&mut scheduler)), [(1, 1)]);
}

#[test]
fn an_exhausted_pool_preempts_the_youngest_sequence_which_keeps_its_tokens() {
    // Two sequences of up to 3 blocks each in a pool of 4: both start, but only one can grow to its end.
    let mut scheduler = scheduler(limits(4, 1), &[(1, 4, 8), (2, 3, 8)]);
    for _ in 0..5 {
        let plan = step(&mut scheduler).0;
        assert_eq!(plan.advances.len(), 2);
    }
    let (plan, _) = step(&mut scheduler);
    assert_eq!((&*plan.freed_sequence_ids, &*advances(&plan)), (&[SequenceId(2)][..], &[(1, 1)][..]));
    assert_eq!((scheduler.stats().num_queued, scheduler.stats().num_preemptions), (1, 1));
    let restart =
        std::iter::repeat_with(|| step(&mut scheduler).0).find(|plan| !plan.new_sequences.is_empty()).unwrap();
    assert_eq!(restart.new_sequences[0].token_ids, [TOKEN; 3 + 5]);
    assert_eq!(restart.new_sequences[0].num_prompt_tokens, 3);
    assert_eq!(restart.advances[0].num_tokens, 8);
    assert!(restart.advances[0].sample);
}

#[test]
fn a_token_in_flight_at_preemption_is_discarded_and_sampled_again() {
    let mut scheduler = scheduler(limits(4, 2), &[(1, 4, 8), (2, 3, 8)]);
    let fifth = run_ahead(&mut scheduler, 5);
    assert_eq!(advances(&fifth), [(1, 1), (2, 1)]);
    // Sequence 1 needs one more block. The fifth step still writes the second block of sequence 2, but not the first.
    let sixth = plan(&mut scheduler);
    assert_eq!((&*sixth.freed_sequence_ids, &*advances(&sixth)), (&[SequenceId(2)][..], &[(1, 1)][..]));
    assert_eq!((scheduler.stats().num_queued, scheduler.stats().num_retiring_blocks), (1, 1));
    assert_eq!(scheduler.apply(&answer(&fifth, TOKEN)).unwrap().len(), 1, "only sequence 1 gets its token");
    scheduler.apply(&answer(&sixth, TOKEN)).unwrap();
    let restart =
        std::iter::repeat_with(|| step(&mut scheduler).0).find(|plan| !plan.new_sequences.is_empty()).unwrap();
    assert_eq!(restart.new_sequences[0].token_ids, [TOKEN; 3 + 4]);
}

#[test]
fn retiring_blocks_are_awaited_rather_than_preempting_a_sequence() {
    let mut scheduler = scheduler(limits(6, 2), &[(1, 4, 8), (2, 4, 8), (3, 4, 8)]);
    let fifth = run_ahead(&mut scheduler, 5);
    scheduler.abort(SequenceId(3));
    // Sequences 1 and 2 need one more block each; sequence 3 releases two.
    assert!(nothing_to_plan(&mut scheduler));
    scheduler.apply(&answer(&fifth, TOKEN)).unwrap();
    let (sixth, _) = step(&mut scheduler);
    assert_eq!((&*sixth.freed_sequence_ids, &*advances(&sixth)), (&[SequenceId(3)][..], &[(1, 1), (2, 1)][..]));
    assert_eq!(scheduler.stats().num_queued, 0);
}

#[test]
fn an_admission_leaves_one_block_for_each_running_sequence() {
    let mut scheduler = scheduler(limits(3, 1), &[(1, 4, 8), (2, 8, 2)]);
    assert_eq!(new_ids(&step(&mut scheduler).0), [1]);
    assert_eq!(new_ids(&step(&mut scheduler).0), []);
}

#[test]
fn no_more_sequences_are_admitted_than_a_step_may_have() {
    let full = Limits { max_step_sequences: 1, ..limits(8, 1) };
    let mut scheduler = Scheduler::new(full);
    for id in 0..10_000 {
        submit(&mut scheduler, submission(id, 1, 3));
    }
    assert_eq!(advances(&step(&mut scheduler).0), [(0, 1)]);
    assert_eq!(scheduler.stats().num_queued, 9_999);
}
