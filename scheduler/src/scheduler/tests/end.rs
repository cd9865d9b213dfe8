//! How sequences end, and which results are valid.

use super::*;

#[test]
fn a_stop_token_ends_the_sequence_and_discards_its_step_ahead() {
    let mut scheduler = scheduler(limits(2, 2), &[(1, 4, 4)]);
    let first = plan(&mut scheduler);
    let ahead = plan(&mut scheduler);
    let events = scheduler.apply(&answer(&first, STOP)).unwrap();
    assert_eq!(finish_reasons(&events), [Some(FinishReason::StopToken)]);
    assert_eq!(scheduler.stats().num_retiring_blocks, 1, "the step ahead can still write it");
    assert_eq!(plan(&mut scheduler).freed_sequence_ids, [SequenceId(1)]);
    assert_eq!(scheduler.apply(&answer(&ahead, TOKEN)).unwrap(), []);
    assert_eq!(scheduler.stats().num_allocatable_blocks, 2);
}

#[test]
fn a_stop_token_in_the_last_place_finishes_as_a_stop_token() {
    let mut scheduler = scheduler(limits(8, 1), &[(1, 4, 1)]);
    let plan = plan(&mut scheduler);
    let events = scheduler.apply(&answer(&plan, STOP)).unwrap();
    assert_eq!(finish_reasons(&events), [Some(FinishReason::StopToken)]);
}

#[test]
fn a_failed_sequence_does_not_affect_the_others() {
    let mut scheduler = scheduler(limits(8, 1), &[(1, 4, 2), (2, 4, 2)]);
    let planned = plan(&mut scheduler);
    let mut result = answer(&planned, TOKEN);
    result.outputs[0].token_ids = None;
    let events = scheduler.apply(&result).unwrap();
    let advanced = Event::Advanced { id: SequenceId(2), output_index: 1, num_tokens: 1, finish_reason: None };
    assert_eq!(events, [Event::Failed { id: SequenceId(1), output_index: 0 }, advanced]);
    let next = plan(&mut scheduler);
    assert_eq!((&*next.freed_sequence_ids, &*advances(&next)), (&[SequenceId(1)][..], &[(2, 1)][..]));
}

#[test]
fn a_failure_while_prefilling_ends_the_sequence() {
    let mut scheduler = scheduler(limits(8, 1), &[(1, 20, 2)]);
    let plan = plan(&mut scheduler);
    let failed = SequenceOutput { id: SequenceId(1), token_ids: None, num_draft_tokens: 0, drafted_by_model: false };
    let events = scheduler.apply(&StepResult { step: plan.step, outputs: vec![failed] }).unwrap();
    assert_eq!(events, [Event::Failed { id: SequenceId(1), output_index: 0 }]);
}

#[test]
fn aborting_a_queued_sequence_needs_no_plan() {
    let mut scheduler = scheduler(limits(8, 1), &[(1, 4, 2)]);
    assert!(scheduler.abort(SequenceId(1)));
    assert!(nothing_to_plan(&mut scheduler));
    assert!(!scheduler.abort(SequenceId(1)), "it is no longer known");
}

#[test]
fn an_aborted_sequence_is_freed_by_the_next_plan_even_if_nothing_advances() {
    let mut scheduler = scheduler(limits(8, 2), &[(1, 4, 9)]);
    let first = plan(&mut scheduler);
    scheduler.abort(SequenceId(1));
    assert_eq!(plan(&mut scheduler), Plan { step: 2, freed_sequence_ids: vec![SequenceId(1)], ..Plan::default() });
    assert_eq!(scheduler.apply(&answer(&first, TOKEN)).unwrap(), []);
    assert_eq!(scheduler.stats().num_allocatable_blocks, 8);
    let empty = StepResult { step: 2, outputs: vec![] };
    assert_eq!(scheduler.apply(&empty).unwrap(), []);
    assert!(nothing_to_plan(&mut scheduler));
}

#[test]
fn an_id_can_be_reused_in_the_plan_that_frees_it_and_gets_no_token_of_its_previous_residency() {
    let mut scheduler = scheduler(limits(8, 2), &[(1, 4, 9)]);
    let previous = plan(&mut scheduler);
    scheduler.abort(SequenceId(1));
    submit(&mut scheduler, submission(1, 2, 9));
    let next = plan(&mut scheduler);
    assert_eq!((&*next.freed_sequence_ids, &*new_ids(&next)), (&[SequenceId(1)][..], &[1][..]));
    assert_eq!(scheduler.apply(&answer(&previous, TOKEN)).unwrap(), []);
    assert_eq!(scheduler.apply(&answer(&next, TOKEN)).unwrap().len(), 1);
}

#[test]
fn a_result_that_does_not_match_its_step_is_rejected_and_changes_nothing() {
    let mut scheduler = scheduler(limits(16, 2), &[(1, 4, 4), (2, 30, 4)]);
    let (one, two, stranger) = (SequenceId(1), SequenceId(2), SequenceId(9));
    let output = |id, num_tokens| SequenceOutput {
        id,
        token_ids: Some(vec![TOKEN; num_tokens]),
        num_draft_tokens: 0,
        drafted_by_model: false,
    };
    let result = |step, outputs| StepResult { step, outputs };
    let none = scheduler.apply(&result(1, vec![])).unwrap_err();
    assert_eq!(none, ApplyError::NothingInFlight { step: 1 });

    let first = plan(&mut scheduler);
    plan(&mut scheduler);
    let before = scheduler.stats();
    let cases = [
        (result(2, vec![output(one, 1)]), ApplyError::UnexpectedStep { step: 2, expected: 1 }),
        (result(1, vec![output(one, 1), output(stranger, 1)]), ApplyError::UnknownSequence { step: 1, id: stranger }),
        (result(1, vec![output(one, 1), output(one, 1)]), ApplyError::RepeatedSequence { step: 1, id: one }),
        (result(1, vec![]), ApplyError::MissingOutput { step: 1, id: one }),
        (result(1, vec![output(one, 0)]), ApplyError::TokenCount { step: 1, id: one, expected: 1, got: 0 }),
        (result(1, vec![output(one, 2)]), ApplyError::TokenCount { step: 1, id: one, expected: 1, got: 2 }),
        (
            result(1, vec![output(one, 1), output(two, 1)]),
            ApplyError::TokenCount { step: 1, id: two, expected: 0, got: 1 },
        ),
    ];
    for (result, error) in cases {
        assert_eq!(scheduler.apply(&result).unwrap_err(), error);
        assert_eq!(scheduler.stats(), before);
    }
    assert_eq!(scheduler.apply(&answer(&first, TOKEN)).unwrap().len(), 1);
}
