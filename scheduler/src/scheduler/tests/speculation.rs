use std::collections::VecDeque;

use super::*;

fn drafting(max_draft_tokens: u32, limits: Limits) -> Limits {
    Limits { max_draft_tokens, ..limits }
}

/// The result of a worker that verifies every draft that the plan allows; the first `num_right` are right.
fn verified(plan: &Plan, num_right: u32) -> StepResult {
    let output = |advance: &crate::Advance| SequenceOutput {
        id: advance.id,
        token_ids: Some(vec![TOKEN; 1 + num_right.min(advance.num_draft_tokens) as usize]),
        num_draft_tokens: advance.num_draft_tokens,
        drafted_by_model: !plan.drafts_by_lookup,
    };
    StepResult { step: plan.step, outputs: plan.advances.iter().filter(|it| it.sample).map(output).collect() }
}

fn drafts(plan: &Plan) -> Vec<u32> {
    plan.advances.iter().map(|advance| advance.num_draft_tokens).collect()
}

fn num_blocks(plans: &[&Plan]) -> usize {
    plans.iter().flat_map(|plan| &plan.advances).map(|advance| advance.new_block_ids.len()).sum()
}

#[test]
fn without_speculation_no_advance_has_drafts() {
    let mut scheduler = scheduler(limits(16, 2), &[(1, 4, 20), (2, 4, 20)]);
    assert!(run_to_end(&mut scheduler).iter().flat_map(drafts).all(|num_drafts| num_drafts == 0));
}

#[test]
fn a_decode_advances_by_its_right_drafts_and_one_token() {
    let mut scheduler = scheduler(drafting(3, limits(16, 1)), &[(1, 4, 20)]);
    let (prompt, _) = step(&mut scheduler);
    assert_eq!(drafts(&prompt), [0]);
    let decode = plan(&mut scheduler);
    assert_eq!((advances(&decode), drafts(&decode)), (vec![(1, 1)], vec![3]));
    let events = scheduler.apply(&verified(&decode, 2)).unwrap();
    let Event::Advanced { num_tokens, finish_reason, .. } = events[0] else { panic!("{events:?}") };
    assert_eq!((num_tokens, finish_reason), (3, None));
    // 4 + 1 + 3 tokens are known, and all but the last computed: two blocks of 4 tokens suffice for now.
    assert_eq!(num_blocks(&[&prompt, &decode]), 2);
    let next = plan(&mut scheduler);
    assert_eq!(num_blocks(&[&prompt, &decode, &next]), 3);
}

#[test]
fn blocks_of_wrong_drafts_hold_the_tokens_that_follow() {
    let mut scheduler = scheduler(drafting(3, limits(16, 1)), &[(1, 7, 20)]);
    let (prompt, _) = step(&mut scheduler);
    let wrong = plan(&mut scheduler);
    assert_eq!(num_blocks(&[&prompt, &wrong]), 3);
    scheduler.apply(&verified(&wrong, 0)).unwrap();
    let next = plan(&mut scheduler);
    assert_eq!(num_blocks(&[&next]), 0);
}

#[test]
fn steps_are_planned_before_it_is_known_how_many_drafts_were_right() {
    let mut scheduler = scheduler(drafting(3, limits(16, 2)), &[(1, 4, 12)]);
    step(&mut scheduler);
    let (first, second) = (plan(&mut scheduler), plan(&mut scheduler));
    // Of 12 tokens, 1 has come back, and 8 may be in flight.
    assert_eq!((drafts(&first), drafts(&second)), (vec![3], vec![3]));
    scheduler.apply(&verified(&first, 0)).unwrap();
    scheduler.audit();
    // 2 have come back and 4 may be in flight: 6 are left, of which the last is sampled after its drafts.
    let third = plan(&mut scheduler);
    assert_eq!(drafts(&third), [3]);
    scheduler.apply(&verified(&second, 3)).unwrap();
    scheduler.audit();
    let fourth = plan(&mut scheduler);
    assert_eq!(drafts(&fourth), [1]);
    // If all drafts are right, the last token is in flight: no further step before a result.
    scheduler.apply(&verified(&third, 3)).unwrap();
    scheduler.audit();
    assert!(nothing_to_plan(&mut scheduler));
    let events = scheduler.apply(&verified(&fourth, 1)).unwrap();
    assert_eq!(finish_reasons(&events), [Some(FinishReason::Length)]);
    assert_eq!(scheduler.stats().num_running, 0);
}

#[test]
fn wrong_drafts_before_the_last_token_let_the_sequence_go_on() {
    let mut scheduler = scheduler(drafting(3, limits(16, 2)), &[(1, 4, 5)]);
    step(&mut scheduler);
    let first = plan(&mut scheduler);
    assert_eq!(drafts(&first), [3]);
    assert!(nothing_to_plan(&mut scheduler));
    scheduler.apply(&verified(&first, 1)).unwrap();
    let (second, _) = step(&mut scheduler);
    assert_eq!(drafts(&second), [1]);
    let (_, events) = step(&mut scheduler);
    assert_eq!(finish_reasons(&events), [Some(FinishReason::Length)]);
}

#[test]
fn tokens_after_a_stop_token_are_dropped() {
    let mut scheduler = scheduler(drafting(3, limits(16, 2)), &[(1, 4, 20)]);
    step(&mut scheduler);
    let (decode, behind) = (plan(&mut scheduler), plan(&mut scheduler));
    let token_ids = Some(vec![TOKEN, STOP, TOKEN, TOKEN]);
    let outputs = vec![SequenceOutput { id: SequenceId(1), token_ids, num_draft_tokens: 3, drafted_by_model: false }];
    let events = scheduler.apply(&StepResult { step: decode.step, outputs }).unwrap();
    let finish_reason = Some(FinishReason::StopToken);
    assert_eq!(events, [Event::Advanced { id: SequenceId(1), output_index: 0, num_tokens: 2, finish_reason }]);
    plan(&mut scheduler);
    scheduler.apply(&verified(&behind, 3)).unwrap();
    let stats = scheduler.stats();
    assert_eq!((stats.num_running, stats.num_allocatable_blocks), (0, 16));
}

#[test]
fn only_confirmed_tokens_are_shared() {
    let limits = Limits { prefix_caching: true, ..drafting(3, limits(16, 2)) };
    let mut scheduler = scheduler(limits, &[(1, 4, 20)]);
    step(&mut scheduler);
    let (first, second) = (plan(&mut scheduler), plan(&mut scheduler));
    // Up to 12 tokens may be computed, but the ids of only 5 are known.
    assert_eq!(scheduler.stats().num_cached_blocks, 1);
    scheduler.apply(&verified(&first, 2)).unwrap();
    // 8 are known, and the step in flight computes the last of them.
    assert_eq!(scheduler.stats().num_cached_blocks, 2);
    scheduler.apply(&verified(&second, 0)).unwrap();
    assert_eq!(scheduler.stats().num_cached_blocks, 2);
}

#[test]
fn drafts_take_only_rows_and_blocks_that_are_free() {
    let wide = Limits { max_step_sequences: 4, ..drafting(3, limits(16, 1)) };
    let mut two = scheduler(wide, &[(1, 4, 20), (2, 4, 20)]);
    step(&mut two);
    assert_eq!(drafts(&plan(&mut two)), [2, 0]);
    // The prompts leave one of 5 blocks, and three free slots each: four more tokens of one of them fit.
    let mut full = scheduler(drafting(3, limits(5, 1)), &[(1, 5, 8), (2, 5, 8)]);
    step(&mut full);
    assert_eq!(drafts(&plan(&mut full)), [3, 2]);
}

#[test]
fn a_step_with_a_prompt_has_no_drafts() {
    let mut scheduler = scheduler(drafting(3, limits(16, 1)), &[(1, 4, 20)]);
    step(&mut scheduler);
    submit(&mut scheduler, submission(2, 20, 4));
    assert_eq!((0..2).map(|_| drafts(&step(&mut scheduler).0)).collect::<Vec<_>>(), [[0, 0], [0, 0]]);
    assert_eq!(drafts(&step(&mut scheduler).0), [3, 2]);
}

/// With a window of 8 tokens. With 3 drafts in each of 2 steps in flight, a sequence holds up to 14 tokens: 5 blocks.
fn drafting_with_window(num_blocks: u32) -> Limits {
    Limits { window_tokens: Some(8), ..drafting(3, limits(num_blocks, 2)) }
}

#[test]
fn with_a_window_a_sequence_that_is_alone_in_the_pool_ends_whether_drafts_are_right_or_wrong() {
    for num_right in 0..=3 {
        let mut scheduler = scheduler(drafting_with_window(5), &[(1, 4, 96)]);
        let (mut in_flight, mut num_drafts) = (VecDeque::new(), 0);
        while scheduler.stats().num_running + scheduler.stats().num_queued > 0 {
            while let Some(plan) = scheduler.plan(Duration::ZERO) {
                scheduler.audit();
                num_drafts += drafts(&plan).iter().sum::<u32>();
                in_flight.push_back(plan);
            }
            let oldest = in_flight.pop_front().expect("the sequence waits for a step in flight");
            scheduler.apply(&verified(&oldest, num_right)).unwrap();
        }
        assert!(num_drafts > 20, "{num_drafts} drafts");
        assert_eq!(scheduler.stats().num_preemptions, 0);
    }
}

#[test]
fn a_pool_too_small_for_a_window_and_the_drafts_in_flight_has_no_drafts() {
    let limits = drafting_with_window(4);
    assert!(!limits.has_room_for_drafts());
    let mut scheduler = scheduler(limits, &[(1, 4, 20)]);
    assert!(run_to_end(&mut scheduler).iter().flat_map(drafts).all(|num_drafts| num_drafts == 0));
}

#[test]
fn a_pool_has_room_for_drafts_if_the_longest_sequence_fits_or_there_is_no_window() {
    let longest_fits = Limits { max_sequence_tokens: 16, ..drafting_with_window(4) };
    let no_window = Limits { window_tokens: None, ..drafting_with_window(4) };
    let no_drafts = Limits { max_draft_tokens: 0, ..drafting_with_window(3) };
    for limits in [drafting_with_window(5), longest_fits, no_window, no_drafts] {
        assert!(limits.has_room_for_drafts(), "{limits:?}");
    }
}

#[test]
fn blocks_before_the_window_are_released_only_as_far_as_drafts_are_confirmed() {
    let mut scheduler = scheduler(drafting_with_window(8), &[(1, 11, 80)]);
    let (prompt, _) = step(&mut scheduler);
    let decode = plan(&mut scheduler);
    assert_eq!(drafts(&decode), [3]);
    // If all drafts are wrong, the next token is at 12 and attends to positions 5 and up; if all are right, it is at 15.
    assert_eq!(num_blocks(&[&prompt, &decode]), 4);
    assert_eq!(scheduler.stats().num_allocatable_blocks, 5);
    scheduler.apply(&verified(&decode, 3)).unwrap();
    plan(&mut scheduler);
    assert_eq!(scheduler.stats().num_allocatable_blocks + scheduler.stats().num_retiring_blocks, 5);
}

#[test]
fn wrong_drafts_end_when_their_rows_cost_as_much_as_tokens() {
    let sum = |drafts: Vec<u32>| drafts.iter().sum::<u32>();
    let cheap = sum(drafts_after_wrong_ones(1, 30, Duration::from_millis(100), Duration::from_micros(10)));
    let dear = sum(drafts_after_wrong_ones(1, 30, Duration::from_micros(10), Duration::from_millis(100)));
    assert!(cheap > 30 * 3 / 2 && dear < 30, "{cheap} and {dear} drafts");
    let of_four = sum(drafts_after_wrong_ones(4, 30, Duration::from_millis(10), Duration::from_millis(100)));
    assert!(of_four < 60, "{of_four} drafts: a row of four takes nearly a fourth of the step, as a token does");
}

#[test]
fn a_sequence_whose_drafts_were_wrong_tries_again() {
    let drafts = drafts_after_wrong_ones(1, 80, Duration::from_millis(100), Duration::from_millis(100));
    let first_without = drafts.iter().skip(1).position(|num_drafts| *num_drafts == 0).expect("drafts end");
    assert!(drafts[1 + first_without..].iter().any(|num_drafts| *num_drafts > 0), "{drafts:?}");
}

/// Drafts by step of some decodes, all wrong, if a step takes `fixed` and `per_row`. The first step is the prompts'.
fn drafts_after_wrong_ones(num_decodes: u64, num_steps: u32, fixed: Duration, per_row: Duration) -> Vec<u32> {
    let wide = Limits { max_step_tokens: 64, max_step_sequences: 32, ..limits(200, 1) };
    let sequences: Vec<_> = (1..=num_decodes).map(|id| (id, 4, 90)).collect();
    let mut scheduler = scheduler(drafting(3, wide), &sequences);
    (0..=num_steps)
        .map(|_| {
            let plan = plan(&mut scheduler);
            let num_drafts = drafts(&plan).iter().sum();
            let drafted = Drafted { num_tokens: num_drafts, ..Drafted::default() };
            scheduler.observe(plan.step, fixed + per_row * (num_decodes as u32 + num_drafts), drafted);
            scheduler.apply(&verified(&plan, 0)).unwrap();
            num_drafts
        })
        .collect()
}

/// A scheduler whose rows cost as much as tokens, with a sequence for each: whether it has a grammar.
fn forcing(has_grammar: &[bool], limits: Limits) -> Scheduler {
    let mut scheduler = scheduler(Limits { drafts_only_forced: true, ..drafting(3, limits) }, &[]);
    for (id, has_grammar) in (1..).zip(has_grammar) {
        submit(&mut scheduler, Submission { has_grammar: *has_grammar, ..submission(id, 4, 90) });
    }
    scheduler
}

#[test]
fn without_speculation_only_sequences_with_a_grammar_have_drafts() {
    let wide = Limits { max_step_sequences: 32, ..limits(200, 1) };
    let mut scheduler = forcing(&[false, true, false, true], wide);
    step(&mut scheduler);
    let decode = plan(&mut scheduler);
    assert_eq!((drafts(&decode), decode.drafts_only_forced), (vec![0, 3, 0, 3], true));
    let mut free = forcing(&[false, false], wide);
    step(&mut free);
    let decode = plan(&mut free);
    assert_eq!((drafts(&decode), decode.drafts_only_forced), (vec![0, 0], false));
}

#[test]
fn a_forced_token_pays_however_much_its_row_costs() {
    let mut scheduler = forcing(&[true; 4], Limits { max_step_tokens: 64, max_step_sequences: 32, ..limits(200, 1) });
    step(&mut scheduler);
    for _ in 0..30 {
        let plan = plan(&mut scheduler);
        assert_eq!(drafts(&plan), [3; 4]);
        let drafted = Drafted { num_tokens: 0, ..Drafted::default() };
        scheduler.observe(plan.step, Duration::from_millis(100) * 4, drafted);
        // Most steps find no forced token.
        let output =
            |id| SequenceOutput { id, token_ids: Some(vec![TOKEN]), num_draft_tokens: 0, drafted_by_model: false };
        let outputs = plan.advances.iter().map(|advance| output(advance.id)).collect();
        scheduler.apply(&StepResult { step: plan.step, outputs }).unwrap();
    }
}

#[test]
fn a_result_with_more_drafts_or_tokens_than_planned_is_rejected() {
    let mut scheduler = scheduler(drafting(3, limits(16, 1)), &[(1, 4, 20)]);
    step(&mut scheduler);
    let decode = plan(&mut scheduler);
    let (step, id) = (decode.step, SequenceId(1));
    let mut apply = |num_tokens, num_draft_tokens| {
        let outputs = vec![SequenceOutput {
            id,
            token_ids: Some(vec![TOKEN; num_tokens]),
            num_draft_tokens,
            drafted_by_model: false,
        }];
        scheduler.apply(&StepResult { step, outputs })
    };
    assert_eq!(apply(1, 4), Err(ApplyError::DraftCount { step, id, most: 3, got: 4 }));
    assert_eq!(apply(3, 1), Err(ApplyError::TokenCount { step, id, expected: 1, got: 3 }));
    assert!(apply(2, 1).is_ok());
}

#[test]
fn a_preempted_sequence_samples_its_drafts_again() {
    let mut scheduler = scheduler(drafting(3, limits(16, 2)), &[(1, 4, 20)]);
    step(&mut scheduler);
    plan(&mut scheduler);
    let lost = scheduler.restart();
    assert_eq!(lost.into_iter().collect::<Vec<_>>(), [(SequenceId(1), 4)], "a token and three drafts");
    scheduler.audit();
    let (again, _) = step(&mut scheduler);
    assert_eq!(again.new_sequences[0].token_ids.len(), 5);
    run_to_end(&mut scheduler);
}

/// Seconds in virtual time that `num_steps` steps took, for each token that came back, and how many steps drafted with the
/// model. A step takes 10 ms and 1 ms a row, and a draft of the model `per_draft`. Lookups find nothing.
fn drafting_with_model(per_draft: Duration, num_right: u32, num_steps: u32) -> (f64, u32) {
    drafting_after_catch_up(per_draft, num_right, num_steps, 0)
}

/// The same for a model that reads the prompt in its first steps, for 20 ms each and without a draft.
fn drafting_after_catch_up(per_draft: Duration, num_right: u32, num_steps: u32, mut num_unread: u32) -> (f64, u32) {
    let wide = Limits { max_step_tokens: 64, max_step_sequences: 32, max_sequence_tokens: 10_000, ..limits(5000, 2) };
    let mut scheduler = scheduler(Limits { drafts_with_model: true, ..drafting(4, wide) }, &[(1, 4, 9000)]);
    step(&mut scheduler);
    let (mut seconds, mut num_tokens, mut num_model_steps) = (0.0, 0, 0);
    for _ in 0..num_steps {
        let plan = plan(&mut scheduler);
        let mut num_drafts = if plan.drafts_by_lookup { 0 } else { drafts(&plan)[0] };
        num_model_steps += u32::from(num_drafts > 0);
        let mut making = per_draft * num_drafts;
        if num_drafts > 0 && num_unread > 0 {
            (num_unread, num_drafts, making) = (num_unread - 1, 0, Duration::from_millis(20));
        }
        let duration = making + Duration::from_millis(11 + u64::from(num_drafts));
        scheduler.observe(
            plan.step,
            duration,
            Drafted { num_tokens: num_drafts, by_model: num_drafts > 0, duration: making },
        );
        let num_sampled = 1 + num_right.min(num_drafts);
        let output = SequenceOutput {
            id: SequenceId(1),
            token_ids: Some(vec![TOKEN; num_sampled as usize]),
            num_draft_tokens: num_drafts,
            drafted_by_model: num_drafts > 0,
        };
        scheduler.apply(&StepResult { step: plan.step, outputs: vec![output] }).unwrap();
        seconds += duration.as_secs_f64();
        num_tokens += num_sampled;
    }
    (seconds / f64::from(num_tokens), num_model_steps)
}

#[test]
fn a_draft_model_as_slow_as_the_model_costs_no_throughput() {
    for num_right in [0, 2, 4] {
        let (seconds, num_model_steps) = drafting_with_model(Duration::from_millis(11), num_right, 1000);
        assert!(seconds < 0.011 / 0.98, "{seconds} s a token, {num_model_steps} steps with the model's drafts");
        assert!((2..=20).contains(&num_model_steps), "{num_model_steps}: a probe now and then");
    }
}

#[test]
fn a_cheap_draft_model_drafts_as_long_as_it_is_right() {
    let (seconds, num_model_steps) = drafting_with_model(Duration::from_micros(500), 4, 1000);
    assert!(seconds < 0.011 / 2.0 && num_model_steps > 900, "{seconds} s a token, {num_model_steps} steps");
    let (seconds, num_model_steps) = drafting_with_model(Duration::from_micros(500), 0, 1000);
    assert!(seconds < 0.011 / 0.95, "{seconds} s a token, {num_model_steps} steps");
}

#[test]
fn a_model_that_has_to_read_a_long_prompt_first_drafts_after_it() {
    let (seconds, num_model_steps) = drafting_after_catch_up(Duration::from_micros(500), 4, 1000, 8);
    assert!(seconds < 0.011 / 2.0 && num_model_steps > 900, "{seconds} s a token, {num_model_steps} steps");
}

#[test]
fn one_draft_that_took_no_time_does_not_make_the_model_free() {
    let mut cost = crate::speculation::DraftingCost::default();
    for (duration, num_steps) in [(10, 8), (0, 1), (10, 8)] {
        for _ in 0..num_steps {
            cost.observe(crate::speculation::Drafting::Model, 0.01, 1, Duration::from_millis(duration), false);
        }
    }
    assert!(cost.share() > 0.9, "{}", cost.share());
}

#[test]
fn lookups_draft_where_they_are_right_more_often_than_the_model() {
    let wide = Limits { max_step_tokens: 64, max_sequence_tokens: 10_000, ..limits(5000, 1) };
    let mut scheduler = scheduler(Limits { drafts_with_model: true, ..drafting(4, wide) }, &[(1, 4, 9000)]);
    step(&mut scheduler);
    let mut num_lookups = 0;
    for _ in 0..300 {
        let plan = plan(&mut scheduler);
        let num_tokens = drafts(&plan)[0];
        scheduler.observe(
            plan.step,
            Duration::from_millis(10 + u64::from(num_tokens)),
            Drafted { num_tokens, ..Drafted::default() },
        );
        num_lookups += u32::from(plan.drafts_by_lookup);
        let num_right = if plan.drafts_by_lookup { 4 } else { 0 };
        scheduler.apply(&verified(&plan, num_right)).unwrap();
    }
    assert!(num_lookups > 290, "{num_lookups} of 300 steps");
}

/// Runs `num_steps` decode steps of `num_sequences` sequences with heads that extend lookup. A step takes 10 ms and 1 ms a
/// row, and the heads 1 ms for each draft token. `right`: for a sequence, a step, and whether heads draft, how many of the drafts are right, and whether
/// heads made them; `None`: there is none. Returns the scheduler, and how many steps drafted with the heads.
fn drafting_with_heads(
    num_sequences: u64,
    num_steps: u64,
    right: impl Fn(u64, u64, bool) -> Option<(u32, bool)>,
) -> (Scheduler, u64) {
    let wide = Limits { max_step_tokens: 512, max_step_sequences: 256, max_sequence_tokens: 10_000, ..limits(9000, 1) };
    let heads = Limits { drafts_with_model: true, drafts_extend_lookup: true, ..drafting(4, wide) };
    let sequences: Vec<_> = (0..num_sequences).map(|id| (id, 4, 9000 / num_sequences as u32)).collect();
    let mut scheduler = scheduler(heads, &sequences);
    // Steps of other sizes have told what a row costs.
    for num_decodes in 1..=64 {
        let mut work = crate::cost::Work::default();
        (0..num_decodes).for_each(|_| work.add_decode(4));
        scheduler.cost.observe(&work, Duration::from_millis(10 + num_decodes));
    }
    step(&mut scheduler);
    let mut num_model_steps = 0;
    for index in 0..num_steps {
        let plan = plan(&mut scheduler);
        let uses_heads = !plan.drafts_by_lookup && drafts(&plan).iter().any(|most| *most > 0);
        num_model_steps += u64::from(uses_heads);
        let output = |advance: &crate::Advance| {
            let (id, most) = (advance.id, advance.num_draft_tokens);
            let found = right(id.0, index, uses_heads).filter(|_| most > 0);
            let (num_right, drafted_by_model) = found.unwrap_or_default();
            let num_draft_tokens = if found.is_some() { most } else { 0 };
            let token_ids = Some(vec![TOKEN; 1 + num_right.min(most) as usize]);
            SequenceOutput { id, token_ids, num_draft_tokens, drafted_by_model }
        };
        let outputs: Vec<_> = plan.advances.iter().map(output).collect();
        let num_tokens = outputs.iter().map(|output| output.num_draft_tokens).sum();
        let by_model = outputs.iter().any(|output| output.drafted_by_model);
        let made = outputs.iter().filter(|output| output.drafted_by_model).map(|output| output.num_draft_tokens);
        let num_passes = made.max().unwrap_or(u32::from(uses_heads && num_tokens == 0));
        let making = Duration::from_millis(u64::from(num_passes));
        let duration = making + Duration::from_millis(10 + num_sequences + u64::from(num_tokens));
        scheduler.observe(plan.step, duration, Drafted { num_tokens, by_model, duration: making });
        scheduler.apply(&StepResult { step: plan.step, outputs }).unwrap();
    }
    (scheduler, num_model_steps)
}

#[test]
fn heads_that_often_find_no_draft_are_measured_in_few_steps() {
    let right = |id, index, uses_heads| (uses_heads && (id + 2 * index) % 5 < 3).then_some((0, true));
    let (scheduler, num_model_steps) = drafting_with_heads(32, 250, right);
    let share = scheduler.drafting_cost.share();
    assert!((0.01..0.03).contains(&share), "{share}: 1 of 42 ms, or of 61 with the rows of drafts");
    assert!((2..=10).contains(&num_model_steps), "{num_model_steps} of 250 steps");
}

#[test]
fn heads_that_find_nothing_cost_time_and_are_worth_less() {
    let (mut scheduler, num_model_steps) = drafting_with_heads(1, 2, |_, _, _| None);
    assert_eq!(num_model_steps, 2, "a probe");
    assert!(scheduler.drafting_cost.share() > 0.05, "1 of 11 ms");
    let acceptance = *scheduler.sequence_mut(SequenceId(0)).acceptance(crate::speculation::Drafting::Model);
    assert!(acceptance.worth(&[0.0], 0.0) < 0.8 * 0.7, "{acceptance:?}");
}

#[test]
fn heads_draft_where_lookups_find_less() {
    for num_steps in [20, 300] {
        let is_found = |index: u64| index % 5 == 3;
        let right = |_, index, uses_heads| (uses_heads || is_found(index)).then_some((1, !is_found(index)));
        let (_, num_model_steps) = drafting_with_heads(1, num_steps, right);
        assert!(num_model_steps + 3 > num_steps, "{num_model_steps} of {num_steps} steps");
    }
}

#[test]
fn lookups_draft_where_they_always_do_or_where_heads_are_wrong() {
    let copying = |_, _, _| Some((4, false));
    let wrong = |_, index: u64, uses_heads: bool| {
        if index % 5 < 2 { Some((2, false)) } else { uses_heads.then_some((0, true)) }
    };
    // Probes wait for a step in which the heads draft, and take nothing from lookup meanwhile.
    let (mut scheduler, _) = drafting_with_heads(1, 300, copying);
    assert_eq!(drafts(&plan(&mut scheduler)), [4]);
    let (_, num_model_steps) = drafting_with_heads(1, 1000, wrong);
    // In two fifths of them lookup leaves the heads nothing to do.
    assert!(num_model_steps < 200, "{num_model_steps} of 1000 steps");
}

/// Seconds in virtual time for each token of a GPU whose steps take 10 ms and 1 ms a row, if the host has the tokens of the
/// step before; it waits 3 ms for that before it looks drafts up. From step `first_found` on it finds 3, all right. And how
/// many of the last 300 of 1000 steps looked drafts up.
fn waiting_for_lookups(first_found: usize, limits: Limits) -> (f64, usize) {
    let wide = Limits { max_step_tokens: 64, max_step_sequences: 32, max_sequence_tokens: 10_000, ..limits };
    let mut scheduler = scheduler(drafting(3, wide), &[]);
    submit(&mut scheduler, Submission { has_grammar: true, ..submission(1, 4, 9000) });
    step(&mut scheduler);
    let (mut seconds, mut num_tokens, mut num_lookups) = (0.0, 0, 0);
    for index in 0..1000 {
        let plan = plan(&mut scheduler);
        let most = drafts(&plan).first().copied().unwrap_or(0);
        let num_found = if index < first_found { 0 } else { most };
        let waited = Duration::from_millis(if most > 0 { 3 } else { 0 });
        let duration = waited + Duration::from_millis(11 + u64::from(num_found));
        scheduler.observe(plan.step, duration, Drafted { num_tokens: num_found, by_model: false, duration: waited });
        let output = SequenceOutput {
            id: SequenceId(1),
            token_ids: Some(vec![TOKEN; 1 + num_found as usize]),
            num_draft_tokens: num_found,
            drafted_by_model: false,
        };
        scheduler.apply(&StepResult { step: plan.step, outputs: vec![output] }).unwrap();
        seconds += duration.as_secs_f64();
        num_tokens += 1 + num_found;
        num_lookups += usize::from(most > 0 && index >= 700);
    }
    (seconds / f64::from(num_tokens), num_lookups)
}

#[test]
fn lookups_for_which_a_gpu_waits_end_where_they_find_nothing() {
    for forced in [false, true] {
        let limits = Limits { drafts_only_forced: forced, ..limits(5000, 2) };
        let (seconds, num_lookups) = waiting_for_lookups(1000, limits);
        assert!(seconds < 0.011 / 0.95, "{seconds} s a token");
        assert!((5..40).contains(&num_lookups), "{num_lookups} of 300 steps: a probe now and then");
        let (seconds, num_lookups) = waiting_for_lookups(0, limits);
        assert!(seconds < 0.011 / 2.0 && num_lookups == 300, "{seconds} s a token, {num_lookups} of 300 steps");
        let (_, num_lookups) = waiting_for_lookups(400, limits);
        assert!(num_lookups > 280, "{num_lookups} of 300 steps");
    }
}
