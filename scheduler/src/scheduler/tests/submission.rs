//! Submissions that can never run are refused.

use super::*;

#[test]
fn a_sequence_that_can_never_run_is_rejected() {
    let mut scheduler = Scheduler::new(limits(4, 1));
    assert_eq!(scheduler.submit(submission(1, 0, 1), Duration::ZERO), Err(SubmitError::EmptyPrompt));
    assert_eq!(scheduler.submit(submission(1, 1, 0), Duration::ZERO), Err(SubmitError::NoNewTokens));
    let too_long = SubmitError::TooLong { num_prompt_tokens: 60, max_new_tokens: 41, max_sequence_tokens: 100 };
    assert_eq!(scheduler.submit(submission(1, 60, 41), Duration::ZERO), Err(too_long));
    let overflowing = scheduler.submit(submission(1, 2, u32::MAX), Duration::ZERO);
    assert!(matches!(overflowing, Err(SubmitError::TooLong { .. })));
    let too_many = SubmitError::TooManyBlocks { num_required_blocks: 5, num_blocks: 4 };
    assert_eq!(scheduler.submit(submission(1, 16, 2), Duration::ZERO), Err(too_many));
    assert_eq!(scheduler.stats().num_queued, 0);
}

#[test]
fn the_last_token_needs_no_slot() {
    let mut scheduler = scheduler(limits(4, 1), &[(1, 16, 1)]);
    let (plan, events) = step(&mut scheduler);
    assert_eq!(plan.advances[0].new_block_ids.len(), 4);
    assert_eq!(finish_reasons(&events), [Some(FinishReason::Length)]);
}

#[test]
fn a_known_id_is_rejected_until_its_sequence_has_ended() {
    let mut scheduler = scheduler(limits(8, 1), &[(1, 1, 1)]);
    let known = Err(SubmitError::AlreadyKnown { id: SequenceId(1) });
    assert_eq!(scheduler.submit(submission(1, 1, 1), Duration::ZERO), known);
    let plan = plan(&mut scheduler);
    assert_eq!(scheduler.submit(submission(1, 1, 1), Duration::ZERO), known);
    scheduler.apply(&answer(&plan, TOKEN)).unwrap();
    assert_eq!(scheduler.submit(submission(1, 1, 1), Duration::ZERO), Ok(()));
}

#[test]
fn limits_of_zero_are_raised_to_one() {
    let zero = Limits {
        max_step_tokens: 0,
        max_step_sequences: 0,
        max_sequence_tokens: 10,
        block_tokens: 0,
        prefix_caching: true,
        priority_ageing: Duration::ZERO,
        ..limits(2, 0)
    };
    let mut scheduler = scheduler(zero, &[(1, 2, 1)]);
    assert_eq!(advances(&step(&mut scheduler).0), [(1, 1)]);
    assert_eq!(finish_reasons(&step(&mut scheduler).1), [Some(FinishReason::Length)]);
}
