//! The prefix cache: which sequences share which blocks.

use super::*;

fn caching(num_blocks: u32, max_steps_in_flight: u32) -> Limits {
    Limits { prefix_caching: true, max_step_tokens: 64, ..limits(num_blocks, max_steps_in_flight) }
}

/// `num_tokens` ids, different for each `text`.
fn ids(text: u32, num_tokens: u32) -> Vec<TokenId> {
    (0..num_tokens).map(|i| 1000 * text + i).collect()
}

fn with_prompt(id: u64, prompt_token_ids: Vec<TokenId>, max_new_tokens: u32) -> Submission {
    Submission { prompt_token_ids, ..submission(id, 1, max_new_tokens) }
}

/// Id and cached tokens of each new sequence.
fn hits(plan: &Plan) -> Vec<(u64, u32)> {
    for start in &plan.new_sequences {
        assert_eq!(start.block_ids.len() as u32 * 4, start.num_computed_tokens);
    }
    plan.new_sequences.iter().map(|start| (start.id.0, start.num_computed_tokens)).collect()
}

/// Runs until all sequences have ended; returns the hits.
fn run(scheduler: &mut Scheduler) -> Vec<(u64, u32)> {
    run_to_end(scheduler).iter().flat_map(hits).collect()
}

/// Cached tokens of `second` when it runs after `first`.
fn second_hit(limits: Limits, first: Submission, second: Submission) -> u32 {
    let mut scheduler = Scheduler::new(limits);
    submit(&mut scheduler, first);
    run(&mut scheduler);
    submit(&mut scheduler, second);
    run(&mut scheduler)[0].1
}

#[test]
fn hits_are_full_blocks_and_never_include_the_last_token() {
    let cases = [(11, 8), (12, 8), (13, 12), (3, 0), (4, 0), (5, 4)];
    for (num_tokens, hit) in cases {
        let prompt = || ids(1, num_tokens);
        assert_eq!(second_hit(caching(16, 1), with_prompt(1, prompt(), 1), with_prompt(2, prompt(), 1)), hit);
    }
}

#[test]
fn generated_tokens_are_cached() {
    let next_turn: Vec<_> = ids(1, 6).into_iter().chain([TOKEN; 6]).chain(ids(2, 3)).collect();
    // 6 + 7 tokens are known at the end, and the last one is not computed.
    assert_eq!(second_hit(caching(16, 2), with_prompt(1, ids(1, 6), 7), with_prompt(2, next_turn, 1)), 12);
}

#[test]
fn only_equal_prefixes_share() {
    let mut fork = ids(1, 12);
    fork[5] = 7;
    let first = || with_prompt(1, ids(1, 12), 1);
    let second = || with_prompt(2, ids(1, 12), 1);
    let on = caching(16, 1);
    assert_eq!(second_hit(on, first(), with_prompt(2, fork, 1)), 4);
    assert_eq!(second_hit(on, first(), with_prompt(2, ids(1, 12)[4..].to_vec(), 1)), 0);
    assert_eq!(second_hit(on, first(), Submission { needs_prompt_outputs: true, ..second() }), 0);
    assert_eq!(second_hit(on, Submission { needs_prompt_outputs: true, ..first() }, second()), 8);
    assert_eq!(second_hit(Limits { prefix_caching: false, ..on }, first(), second()), 0);
}

#[test]
fn blocks_with_equal_hashes_are_told_apart() {
    let mut scheduler = Scheduler::with_hash(caching(32, 1), |_, _| 0);
    for (id, text) in [(1, 1), (2, 2), (3, 1), (4, 3)] {
        submit(&mut scheduler, with_prompt(id, ids(text, 12), 2));
    }
    // All blocks have the same hash, so only the first block of the first prompt is cached.
    assert_eq!(run(&mut scheduler), [(1, 0), (2, 0), (4, 0), (3, 4)]);

    let mut scheduler = Scheduler::with_hash(Limits { prefix_caching: false, ..caching(32, 1) }, |_, _| 0);
    for (id, group) in [(1, 1), (2, 2), (3, 1)] {
        submit(&mut scheduler, Submission { group: Some(group), ..with_prompt(id, ids(1, 12), 2) });
    }
    assert_eq!(run(&mut scheduler), [(1, 0), (2, 0), (3, 4)]);
}

#[test]
fn of_sequences_with_equal_prompts_one_computes_and_the_others_wait_for_its_blocks() {
    let small = Limits { max_step_tokens: 16, ..caching(64, 3) };
    let mut scheduler = Scheduler::new(small);
    for id in 1..=3 {
        submit(&mut scheduler, with_prompt(id, ids(1, 38), 4));
    }
    submit(&mut scheduler, with_prompt(4, ids(2, 5), 4));
    // The fourth sequence has another prompt: it is not held up by the blocked ones.
    let plans: Vec<_> = (0..3).map(|_| plan(&mut scheduler)).collect();
    assert_eq!(plans.iter().map(advances).collect::<Vec<_>>(), [vec![(1, 16)], vec![(1, 16)], vec![(1, 6), (4, 5)]]);
    assert_eq!(scheduler.stats().num_queued, 2);
    scheduler.apply(&answer(&plans[0], TOKEN)).unwrap();
    // The blocks are shared before the results of the steps that fill them are back: the worker executes in order.
    let shared = plan(&mut scheduler);
    assert_eq!(hits(&shared), [(2, 36), (3, 36)]);
    assert_eq!(shared.new_sequences[0].block_ids, shared.new_sequences[1].block_ids);
    assert_eq!(advances(&shared), [(1, 1), (4, 1), (2, 2), (3, 2)]);
    assert_eq!((scheduler.stats().num_queried_tokens, scheduler.stats().num_hit_tokens), (37 + 4 + 37 + 37, 72));
}

#[test]
fn blocks_computed_before_an_abort_are_cached() {
    for num_chunks in [1, 2] {
        let small = Limits { max_step_tokens: 16, ..caching(64, 1) };
        let mut scheduler = Scheduler::new(small);
        submit(&mut scheduler, with_prompt(1, ids(1, 60), 4));
        submit(&mut scheduler, with_prompt(2, ids(1, 60), 4));
        for _ in 0..num_chunks {
            step(&mut scheduler);
        }
        scheduler.abort(SequenceId(1));
        assert_eq!(hits(&step(&mut scheduler).0), [(2, 16 * num_chunks)]);
    }
}

#[test]
fn a_blocked_sequence_is_unblocked_when_its_producer_ends_or_is_preempted() {
    for is_preempted in [false, true] {
        // The first sequence grows until the second one lacks a block for the end of its prompt. The third waits for
        // that block.
        let mut scheduler = Scheduler::new(Limits { max_step_tokens: 3, ..caching(9, 1) });
        submit(&mut scheduler, with_prompt(1, ids(9, 3), 16));
        submit(&mut scheduler, with_prompt(2, ids(1, 28), 4));
        submit(&mut scheduler, with_prompt(3, ids(1, 28), 4));
        while scheduler.queue.num_blocked() == 0 {
            assert!(hits(&step(&mut scheduler).0).iter().all(|(id, _)| *id < 3), "the third sequence was not blocked");
        }
        while is_preempted && scheduler.queue.num_blocked() > 0 {
            step(&mut scheduler);
        }
        scheduler.abort(SequenceId(2));
        scheduler.audit();
        assert_eq!(run(&mut scheduler), [(3, 16)]);
    }
}

#[test]
fn a_sequence_never_waits_for_one_of_lower_precedence() {
    let small = Limits { max_step_tokens: 16, ..caching(64, 1) };
    let mut scheduler = Scheduler::new(small);
    submit(&mut scheduler, with_prompt(1, ids(1, 24), 4));
    step(&mut scheduler);
    submit(&mut scheduler, Submission { priority: 1, ..with_prompt(2, ids(1, 40), 4) });
    let (both, _) = step(&mut scheduler);
    assert_eq!((hits(&both), advances(&both)), (vec![(2, 16)], vec![(2, 16)]));
}

#[test]
fn a_group_shares_without_caching_while_one_of_its_sequences_is_on_the_worker() {
    let mut scheduler = Scheduler::new(Limits { prefix_caching: false, ..caching(32, 1) });
    let of_group = |id, group| Submission { group: Some(group), ..with_prompt(id, ids(1, 12), 3) };
    for (id, group) in [(1, 1), (2, 1), (3, 2)] {
        submit(&mut scheduler, of_group(id, group));
    }
    submit(&mut scheduler, with_prompt(4, ids(1, 12), 3));
    assert_eq!(run(&mut scheduler), [(1, 0), (3, 0), (4, 0), (2, 8)]);
    assert_eq!(scheduler.stats().num_cached_blocks, 0);
    submit(&mut scheduler, of_group(5, 1));
    assert_eq!(run(&mut scheduler), [(5, 0)]);
}

#[test]
fn only_sequences_with_the_same_salt_share_cached_blocks() {
    let mut scheduler = Scheduler::new(caching(64, 1));
    let salted = |id, cache_salt| Submission { cache_salt, ..with_prompt(id, ids(1, 12), 1) };
    let salts = [None, Some(0), Some(7), None, Some(0), Some(7)];
    let mut hits = Vec::new();
    for (id, salt) in (1..).zip(salts) {
        submit(&mut scheduler, salted(id, salt));
        hits.extend(run(&mut scheduler).into_iter().map(|(_, hit)| hit));
    }
    assert_eq!(hits, [0, 0, 0, 8, 8, 8]);
}

#[test]
fn content_separates_the_blocks_from_the_one_in_which_it_begins() {
    let with = |id, salts: &[(u32, u64)]| {
        let content_salts = salts.iter().map(|&(offset, salt)| ContentSalt { offset, salt }).collect();
        Submission { content_salts, ..with_prompt(id, ids(1, 17), 1) }
    };
    let hit = |first: &[(u32, u64)], second: &[(u32, u64)]| second_hit(caching(32, 1), with(1, first), with(2, second));
    assert_eq!(hit(&[(9, 1)], &[(9, 1)]), 16, "the same content");
    assert_eq!(hit(&[(9, 1)], &[(9, 2)]), 8, "another content in the third block");
    assert_eq!(hit(&[(9, 1)], &[(10, 1)]), 8, "the same content elsewhere in that block");
    assert_eq!(hit(&[(9, 1)], &[]), 8, "no content");
    assert_eq!(hit(&[], &[(0, 1)]), 0, "content in the first block");
    assert_eq!(hit(&[(1, 1)], &[(1, 1), (12, 2)]), 12, "a second content after the first");
    assert_eq!(hit(&[(1, 1), (2, 2)], &[(1, 2), (2, 1)]), 0, "two contents of one block in another order");
    assert_eq!(hit(&[(1, 1)], &[(1, 2), (12, 2)]), 0, "another content before the same one");
    assert_eq!(hit(&[(16, 1)], &[(16, 2)]), 16, "content after the last full block");
}

#[test]
fn a_second_turn_with_another_image_shares_the_whole_first_turn() {
    let content_salts =
        |salts: &[(u32, u64)]| salts.iter().map(|&(offset, salt)| ContentSalt { offset, salt }).collect();
    let first = Submission { content_salts: content_salts(&[(2, 1)]), ..with_prompt(1, ids(1, 13), 4) };
    let turn: Vec<_> = ids(1, 13).into_iter().chain([TOKEN; 3]).chain(ids(2, 9)).collect();
    let second = Submission { content_salts: content_salts(&[(2, 1), (17, 2)]), ..with_prompt(2, turn, 1) };
    assert_eq!(second_hit(caching(32, 1), first, second), 16);
}

#[test]
fn the_least_recently_used_blocks_are_evicted_from_the_end_of_their_prefix() {
    let mut scheduler = Scheduler::new(caching(8, 1));
    for text in [1, 2, 1] {
        submit(&mut scheduler, with_prompt(u64::from(text), ids(text, 13), 1));
        run(&mut scheduler);
    }
    assert_eq!((scheduler.stats().num_cached_blocks, scheduler.stats().num_allocatable_blocks), (6, 8));
    // Needs four blocks: the two free ones, and the last two of the second text.
    submit(&mut scheduler, with_prompt(3, ids(3, 13), 1));
    run(&mut scheduler);
    for (text, hit) in [(1, 12), (2, 4)] {
        submit(&mut scheduler, with_prompt(9, ids(text, 13), 1));
        assert_eq!(run(&mut scheduler), [(9, hit)], "text {text}");
    }
}

#[test]
fn cached_blocks_never_prevent_an_admission() {
    let mut scheduler = Scheduler::new(caching(4, 1));
    for text in 1..6 {
        submit(&mut scheduler, with_prompt(u64::from(text), ids(text, 14), 3));
        assert_eq!(run(&mut scheduler), [(u64::from(text), 0)]);
    }
}

#[test]
fn a_preempted_sequence_reuses_its_own_blocks() {
    let mut scheduler = Scheduler::new(caching(6, 1));
    submit(&mut scheduler, with_prompt(1, ids(1, 4), 6));
    submit(&mut scheduler, with_prompt(2, ids(2, 12), 9));
    let all_hits = run(&mut scheduler);
    assert_eq!(all_hits[..2], [(1, 0), (2, 0)]);
    assert!(all_hits[2..].iter().all(|(id, hit)| (*id, *hit >= 8) == (2, true)), "{all_hits:?}");
    assert_eq!(all_hits.len(), 3, "it is preempted once");
}

#[test]
fn a_failure_preempts_the_readers_of_its_blocks_and_removes_them_from_the_cache() {
    let mut scheduler = Scheduler::new(caching(32, 3));
    submit(&mut scheduler, with_prompt(1, ids(1, 13), 4));
    submit(&mut scheduler, with_prompt(2, ids(1, 21), 1));
    submit(&mut scheduler, with_prompt(3, ids(3, 5), 9));
    let failing = plan(&mut scheduler);
    let reading = plan(&mut scheduler);
    assert_eq!(hits(&reading), [(2, 12)]);
    scheduler.abort(SequenceId(1));
    let mut result = answer(&failing, TOKEN);
    result.outputs[0].token_ids = None;
    assert_eq!(scheduler.apply(&result).unwrap().len(), 1, "only for the third sequence; the first one was aborted");
    scheduler.audit();
    let again = plan(&mut scheduler);
    assert_eq!((&*again.freed_sequence_ids, hits(&again)), (&[SequenceId(1), SequenceId(2)][..], vec![(2, 0)]));
    // The token that the reader sampled from the missing blocks is discarded.
    let events = scheduler.apply(&answer(&reading, TOKEN)).unwrap();
    assert_eq!(events.len(), 1);
    let events = scheduler.apply(&answer(&again, TOKEN)).unwrap();
    assert_eq!(finish_reasons(&events), [None, Some(FinishReason::Length)]);
}

#[test]
fn blocks_written_before_a_failure_stay_cached() {
    let small = Limits { max_step_tokens: 16, ..caching(32, 1) };
    let mut scheduler = Scheduler::new(small);
    submit(&mut scheduler, with_prompt(1, ids(1, 30), 4));
    step(&mut scheduler);
    let failing = plan(&mut scheduler);
    scheduler
        .apply(&StepResult {
            step: failing.step,
            outputs: vec![SequenceOutput {
                id: SequenceId(1),
                token_ids: None,
                num_draft_tokens: 0,
                drafted_by_model: false,
            }],
        })
        .unwrap();
    submit(&mut scheduler, with_prompt(2, ids(1, 30), 4));
    assert_eq!(hits(&step(&mut scheduler).0), [(2, 16)]);
}

#[test]
fn an_output_without_tokens_is_valid_for_an_advance_that_does_not_sample() {
    let small = Limits { max_step_tokens: 16, ..caching(32, 1) };
    let mut scheduler = Scheduler::new(small);
    submit(&mut scheduler, Submission { needs_prompt_outputs: true, ..with_prompt(1, ids(1, 30), 4) });
    let chunk = plan(&mut scheduler);
    let result = StepResult {
        step: chunk.step,
        outputs: vec![SequenceOutput {
            id: SequenceId(1),
            token_ids: Some(vec![]),
            num_draft_tokens: 0,
            drafted_by_model: false,
        }],
    };
    let event = Event::Advanced { id: SequenceId(1), output_index: 0, num_tokens: 0, finish_reason: None };
    assert_eq!(scheduler.apply(&result).unwrap(), [event]);
    assert_eq!(advances(&plan(&mut scheduler)), [(1, 14)]);
}

#[test]
fn a_second_copy_of_a_block_replaces_the_evicted_first_one() {
    // Both prompts end at a block boundary, so each sequence computes its own copy of the last block.
    let mut scheduler = Scheduler::new(caching(9, 1));
    submit(&mut scheduler, with_prompt(1, ids(1, 8), 1));
    run(&mut scheduler);
    submit(&mut scheduler, with_prompt(2, ids(1, 8), 5));
    run(&mut scheduler);
    submit(&mut scheduler, with_prompt(3, ids(3, 28), 1));
    run(&mut scheduler);
    let next_turn = ids(1, 8).into_iter().chain([TOKEN; 8]).collect();
    submit(&mut scheduler, with_prompt(4, next_turn, 1));
    assert_eq!(run(&mut scheduler), [(4, 8)]);
}
