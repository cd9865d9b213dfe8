//! Prompts that begin with a source: an encoder's input, which is computed in one step.

use super::*;

fn source(id: u64, num_source_tokens: u32, max_new_tokens: u32) -> Submission {
    Submission { num_source_tokens, ..submission(id, num_source_tokens as usize + 1, max_new_tokens) }
}

#[test]
fn a_source_that_does_not_fit_into_a_step_is_rejected() {
    let mut scheduler = Scheduler::new(limits(16, 1));
    let rejected =
        |num_source_tokens, max_source_tokens| Err(SubmitError::SourceTooLong { num_source_tokens, max_source_tokens });
    assert_eq!(scheduler.submit(source(1, 17, 3), Duration::ZERO), rejected(17, 16));
    let beyond = Submission { num_source_tokens: 6, ..submission(1, 5, 3) };
    assert_eq!(scheduler.submit(beyond, Duration::ZERO), rejected(6, 5), "longer than the prompt");
    assert_eq!(scheduler.submit(source(1, 16, 3), Duration::ZERO), Ok(()));
    let plan = step(&mut scheduler).0;
    assert_eq!((plan.new_sequences[0].num_source_tokens, advances(&plan)), (16, vec![(1, 16)]));
    assert_eq!(advances(&step(&mut scheduler).0), [(1, 1)], "the tokens after the source can be computed later");
}

#[test]
fn a_source_waits_for_a_step_with_room_for_all_of_it() {
    let mut scheduler = scheduler(limits(32, 1), &[(1, 20, 9)]);
    submit(&mut scheduler, source(2, 14, 9));
    submit(&mut scheduler, submission(3, 2, 9));
    let plans: Vec<_> = (0..3).map(|_| advances(&step(&mut scheduler).0)).collect();
    assert_eq!(plans[0], [(1, 16)]);
    assert_eq!(plans[1], [(1, 4)], "12 tokens are left, and no sequence overtakes the second one");
    assert_eq!(plans[2], [(1, 1), (2, 15)]);
}

#[test]
fn other_prompts_use_the_rest_of_a_step_until_the_overtaking_budget_of_a_source_is_used_up() {
    let mut scheduler = scheduler(Limits { max_overtaking: 1, ..limits(200, 1) }, &[(1, 4, 30)]);
    submit(&mut scheduler, Submission { priority: -1, ..submission(2, 60, 1) });
    step(&mut scheduler);
    submit(&mut scheduler, source(3, 16, 9));
    submit(&mut scheduler, Submission { priority: -1, ..submission(4, 2, 9) });
    let mut shares = Vec::new();
    while scheduler.stats().num_queued == 2 {
        shares.push(advances(&step(&mut scheduler).0));
    }
    // The decode of sequence 1 leaves 15 tokens of each step, so the source has to wait for its end.
    assert_eq!(shares[..3], [vec![(1, 1), (2, 15)], vec![(1, 1), (2, 15)], vec![(1, 1)]]);
    assert!(shares[3..shares.len() - 1].iter().all(|share| *share == [(1, 1)]), "{shares:?}");
    assert_eq!(shares.last(), Some(&vec![(3, 16)]));
}

#[test]
fn a_recomputed_source_is_not_split() {
    let mut scheduler = Scheduler::new(limits(8, 1));
    submit(&mut scheduler, source(1, 12, 20));
    for _ in 0..6 {
        step(&mut scheduler);
    }
    scheduler.restart();
    let plan = step(&mut scheduler).0;
    assert_eq!((plan.new_sequences[0].token_ids.len(), plan.new_sequences[0].num_prompt_tokens), (19, 13));
    assert_eq!(advances(&plan), [(1, 16)], "only the tokens after the source are split");
    assert_eq!(advances(&step(&mut scheduler).0), [(1, 3)]);
}

#[test]
fn a_sequence_with_a_source_shares_no_blocks() {
    let mut scheduler = Scheduler::new(Limits { prefix_caching: true, max_step_tokens: 64, ..limits(32, 1) });
    for id in 1..4 {
        let num_source_tokens = if id == 3 { 0 } else { 12 };
        submit(&mut scheduler, Submission { group: Some(1), num_source_tokens, ..submission(id, 13, 2) });
    }
    let plan = step(&mut scheduler).0;
    assert_eq!(advances(&plan), [(1, 13), (2, 13), (3, 13)]);
    step(&mut scheduler);
    submit(&mut scheduler, source(4, 12, 2));
    assert_eq!(step(&mut scheduler).0.new_sequences[0].num_computed_tokens, 0);
    assert_eq!(scheduler.stats().num_queried_tokens, 12, "those of the third sequence");
}

#[test]
fn a_window_does_not_release_a_source() {
    let mut scheduler = Scheduler::new(Limits { window_tokens: Some(4), ..limits(8, 1) });
    let too_many = SubmitError::TooManyBlocks { num_required_blocks: 9, num_blocks: 8 };
    assert_eq!(scheduler.submit(source(1, 12, 24), Duration::ZERO), Err(too_many));
    submit(&mut scheduler, source(1, 12, 20));
    for _ in 0..20 {
        step(&mut scheduler);
        let stats = scheduler.stats();
        assert!(stats.num_running == 0 || stats.num_allocatable_blocks <= 5);
    }
    assert_eq!(scheduler.stats().num_running, 0);
}
