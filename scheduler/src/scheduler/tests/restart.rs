//! Restarts after the worker was lost, and quarantine.

use std::collections::BTreeMap;

use super::*;

#[test]
fn a_restart_returns_the_sequences_in_flight_and_keeps_the_tokens_that_came_back() {
    let mut scheduler = scheduler(limits(16, 2), &[(1, 3, 9), (2, 3, 9)]);
    run_ahead(&mut scheduler, 3);
    plan(&mut scheduler);
    submit(&mut scheduler, submission(3, 3, 9));
    let lost = BTreeMap::from([(SequenceId(1), 2), (SequenceId(2), 2)]);
    assert_eq!(scheduler.restart(), lost, "each with a token of both steps in flight");
    scheduler.audit();
    let plan = plan(&mut scheduler);
    assert_eq!((plan.step, new_ids(&plan)), (1, vec![1, 2, 3]));
    assert_eq!(advances(&plan), [(1, 5), (2, 5), (3, 3)], "two tokens had come back");
    assert!(plan.freed_sequence_ids.is_empty());
    assert_eq!(plan.new_sequences[0].num_prompt_tokens, 3);
}

#[test]
fn a_restart_clears_the_cache_and_unblocks_its_waiters() {
    let mut scheduler = Scheduler::new(Limits { prefix_caching: true, ..limits(16, 2) });
    submit(&mut scheduler, submission(1, 20, 2));
    submit(&mut scheduler, submission(2, 20, 2));
    assert_eq!(new_ids(&plan(&mut scheduler)), [1], "the second waits for the first");
    assert_eq!(scheduler.restart(), BTreeMap::from([(SequenceId(1), 0)]), "a part of the prompt gives no token");
    let stats = scheduler.stats();
    assert_eq!((stats.num_queued, stats.num_cached_blocks, stats.num_allocatable_blocks), (2, 0, 16));
    let again = plan(&mut scheduler);
    assert_eq!((new_ids(&again), again.new_sequences[0].num_computed_tokens), (vec![1], 0));
}

#[test]
fn a_quarantined_sequence_advances_alone_and_one_step_at_a_time_until_it_ends() {
    let mut scheduler = scheduler(limits(16, 2), &[(1, 3, 9), (2, 3, 2), (3, 3, 9)]);
    run_ahead(&mut scheduler, 2);
    scheduler.restart();
    scheduler.quarantine(Some(SequenceId(2)));
    let alone = plan(&mut scheduler);
    assert_eq!(advances(&alone), [(2, 4)]);
    assert!(nothing_to_plan(&mut scheduler), "no other sequence advances, and this one has no second step in flight");
    scheduler.apply(&answer(&alone, TOKEN)).unwrap();
    assert_eq!(new_ids(&plan(&mut scheduler)), [1, 3], "it has ended");
}

#[test]
fn a_quarantine_preempts_the_other_sequences() {
    let mut scheduler = scheduler(limits(16, 1), &[(1, 3, 9), (2, 3, 9)]);
    step(&mut scheduler);
    scheduler.quarantine(Some(SequenceId(1)));
    let (alone, _) = step(&mut scheduler);
    assert_eq!((&*alone.freed_sequence_ids, advances(&alone)), (&[SequenceId(2)][..], vec![(1, 1)]));
    scheduler.quarantine(None);
    assert_eq!(advances(&plan(&mut scheduler)), [(1, 1), (2, 4)]);
}

#[test]
fn another_scheduler_continues_a_withdrawn_sequence_with_the_tokens_that_came_back() {
    let mut first = scheduler(limits(16, 2), &[(1, 3, 5), (2, 3, 5)]);
    run_ahead(&mut first, 3);
    let mut token_ids = first.withdraw(SequenceId(1)).unwrap();
    first.audit();
    assert_eq!((token_ids.len(), first.withdraw(SequenceId(1))), (5, None), "two tokens had come back");
    let generated_token_ids = token_ids.split_off(3);
    let mut second = scheduler(limits(16, 2), &[]);
    submit(&mut second, Submission { generated_token_ids, ..submission(1, 3, 5) });
    let (plan, _) = step(&mut second);
    let new = &plan.new_sequences[0];
    assert_eq!((new.token_ids.len(), new.num_prompt_tokens, advances(&plan)), (5, 3, vec![(1, 5)]));
    step(&mut second);
    let (_, events) = step(&mut second);
    let ends = |event: &Event| matches!(event, Event::Advanced { finish_reason: Some(FinishReason::Length), .. });
    assert!(ends(&events[0]), "two and three tokens are five: {events:?}");
}

#[test]
fn a_sequence_that_has_all_its_tokens_is_rejected() {
    let complete = Submission { generated_token_ids: vec![TOKEN; 5], ..submission(1, 3, 5) };
    let error = SubmitError::Complete { num_generated_tokens: 5, max_new_tokens: 5 };
    assert_eq!(scheduler(limits(16, 2), &[]).submit(complete, Duration::ZERO), Err(error));
}
