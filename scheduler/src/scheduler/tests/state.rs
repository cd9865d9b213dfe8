//! Models that keep states between tokens: slots bound the sequences, and hits end at snapshots.

use super::*;
use crate::Save;

/// Blocks of 4 tokens, and snapshots that must be saved before 4 tokens behind them are computed.
fn with_states(num_state_slots: u32, num_snapshots: u32) -> Limits {
    Limits {
        num_state_slots,
        num_snapshots,
        snapshot_reach_tokens: 4,
        prefix_caching: true,
        max_step_tokens: 64,
        ..limits(64, 1)
    }
}

/// `num_tokens` ids, different for each `text`.
fn ids(text: u32, num_tokens: u32) -> Vec<TokenId> {
    (0..num_tokens).map(|i| 1000 * text + i).collect()
}

fn with_prompt(id: u64, prompt_token_ids: Vec<TokenId>, max_new_tokens: u32) -> Submission {
    Submission { prompt_token_ids, ..submission(id, 1, max_new_tokens) }
}

/// Id, cached tokens and snapshot of each new sequence.
fn hits(plan: &Plan) -> Vec<(u64, u32, Option<u32>)> {
    plan.new_sequences.iter().map(|start| (start.id.0, start.num_computed_tokens, start.snapshot)).collect()
}

/// Id, tokens and snapshot of each save.
fn saves(plan: &Plan) -> Vec<(u64, u32, u32)> {
    plan.saves.iter().map(|Save { id, num_tokens, snapshot }| (id.0, *num_tokens, *snapshot)).collect()
}

/// Runs a sequence to its end, and the plan that frees it.
fn run(scheduler: &mut Scheduler, submission: Submission) -> Vec<Plan> {
    submit(scheduler, submission);
    let mut plans = run_to_end(scheduler);
    plans.extend(scheduler.plan(Duration::ZERO).inspect(|plan| {
        scheduler.apply(&answer(plan, TOKEN)).unwrap();
    }));
    plans
}

/// Cached tokens of a sequence that runs to its end.
fn hit(scheduler: &mut Scheduler, submission: Submission) -> u32 {
    hits(&run(scheduler, submission)[0])[0].1
}

#[test]
fn a_sequence_waits_for_a_state_slot_until_another_one_has_ended() {
    let mut scheduler =
        scheduler(Limits { max_steps_in_flight: 2, ..with_states(2, 0) }, &[(1, 5, 2), (2, 5, 4), (3, 5, 1)]);
    let first = plan(&mut scheduler);
    assert_eq!(new_ids(&first), [1, 2]);
    let second = plan(&mut scheduler);
    // The last step of the first sequence is planned, but its slot is in use until its result is back.
    assert_eq!(advances(&second), [(1, 1), (2, 1)]);
    scheduler.apply(&answer(&first, TOKEN)).unwrap();
    assert_eq!(advances(&plan(&mut scheduler)), [(2, 1)]);
    scheduler.apply(&answer(&second, TOKEN)).unwrap();
    let third = plan(&mut scheduler);
    assert_eq!((third.freed_sequence_ids.as_slice(), new_ids(&third)), (&[SequenceId(1)][..], vec![3]));
}

#[test]
fn nothing_is_shared_without_snapshots() {
    let mut scheduler = Scheduler::new(with_states(4, 0));
    for id in 1..=3 {
        let group = Some(7);
        assert_eq!(hit(&mut scheduler, Submission { group, ..with_prompt(id, ids(1, 20), 1) }), 0);
    }
    assert_eq!(scheduler.stats().num_cached_blocks, 0);
}

#[test]
fn a_prompt_is_saved_where_the_same_prompt_can_continue() {
    for (num_tokens, end) in [(13, 12), (15, 12), (16, 12), (17, 16)] {
        let mut scheduler = Scheduler::new(with_states(4, 4));
        let plans = run(&mut scheduler, with_prompt(1, ids(1, num_tokens), 1));
        assert_eq!(advances(&plans[0]), [(1, num_tokens)], "it is not cut: the states are still there");
        // At the end of the sequence, all of its prompt is computed.
        let ends = if num_tokens == 16 { vec![(1, 12, 0), (1, 16, 1)] } else { vec![(1, end, 0)] };
        assert_eq!(plans.iter().flat_map(saves).collect::<Vec<_>>(), ends);
        assert_eq!(hits(&run(&mut scheduler, with_prompt(2, ids(1, num_tokens), 1))[0]), [(2, end, Some(0))]);
    }
}

#[test]
fn a_prompt_is_cut_where_its_states_would_be_lost() {
    let limits = Limits { snapshot_reach_tokens: 2, ..with_states(4, 4) };
    let mut scheduler = Scheduler::new(limits);
    let plans = run(&mut scheduler, with_prompt(1, ids(1, 15), 1));
    assert_eq!(plans.iter().flat_map(advances).collect::<Vec<_>>(), [(1, 12), (1, 3)]);
    assert_eq!(saves(&plans[1]), [(1, 12, 0)]);
    let plans = run(&mut scheduler, with_prompt(2, ids(2, 14), 1));
    assert_eq!(plans.iter().flat_map(advances).collect::<Vec<_>>(), [(2, 14)]);
}

#[test]
fn a_conversation_continues_at_the_end_of_its_last_answer() {
    let mut scheduler = Scheduler::new(Limits { max_steps_in_flight: 2, ..with_states(4, 4) });
    run(&mut scheduler, with_prompt(1, ids(1, 14), 8));
    let turn = |id, question| with_prompt(id, [ids(1, 14), vec![TOKEN; 8], question].concat(), 1);
    // 14 + 8 tokens are known, and the last one is not computed.
    assert_eq!(hit(&mut scheduler, turn(2, ids(2, 5))), 20);
    let another_answer = |id| with_prompt(id, ids(1, 14), 8);
    assert_eq!(hit(&mut scheduler, another_answer(3)), 12, "the end of its prompt was saved, too");
}

#[test]
fn a_prompt_is_saved_where_it_leaves_a_known_one() {
    for (num_common, end) in [(18, 16), (14, 0)] {
        let mut scheduler = Scheduler::new(with_states(4, 8));
        let prompt = |id, question| with_prompt(id, [ids(1, num_common), ids(question, 14)].concat(), 1);
        run(&mut scheduler, prompt(1, 2));
        let plans = run(&mut scheduler, prompt(2, 3));
        let chunks = if end > 0 { vec![(2, end), (2, 16)] } else { vec![(2, num_common + 14)] };
        assert_eq!(plans.iter().flat_map(advances).collect::<Vec<_>>(), chunks);
        assert_eq!(hit(&mut scheduler, prompt(3, 4)), end, "a few blocks are not worth a step");
        assert_eq!(hit(&mut scheduler, prompt(4, 2)), (num_common + 13) / 4 * 4);
    }
}

#[test]
fn a_prompt_that_arrives_later_continues_where_it_parts_from_a_running_one() {
    let small = Limits { max_step_tokens: 16, max_steps_in_flight: 2, ..with_states(4, 8) };
    let mut scheduler = Scheduler::new(small);
    submit(&mut scheduler, with_prompt(1, [ids(1, 42), ids(2, 50)].concat(), 4));
    step(&mut scheduler);
    submit(&mut scheduler, with_prompt(2, [ids(1, 42), ids(3, 5)].concat(), 4));
    let plans: Vec<_> = (0..3).map(|_| step(&mut scheduler).0).collect();
    assert_eq!(plans.iter().map(advances).collect::<Vec<_>>()[..2], [vec![(1, 16)], vec![(1, 8)]]);
    assert_eq!(saves(&plans[2]), [(1, 40, 0)]);
    let later = run_to_end(&mut scheduler);
    assert_eq!(later.iter().flat_map(hits).collect::<Vec<_>>(), [(2, 40, Some(0))]);
}

#[test]
fn prompts_that_arrive_together_continue_where_they_part() {
    let small = Limits { max_step_tokens: 16, max_steps_in_flight: 2, ..with_states(4, 8) };
    let mut scheduler = Scheduler::new(small);
    for id in 1..=3 {
        submit(&mut scheduler, with_prompt(id, [ids(1, 22), ids(1 + id as u32, 5)].concat(), 4));
    }
    let plans: Vec<_> = (0..2).map(|_| plan(&mut scheduler)).collect();
    // The others are waiting for 20 tokens, so the first one stops there.
    assert_eq!(plans.iter().map(advances).collect::<Vec<_>>(), [vec![(1, 16)], vec![(1, 4)]]);
    scheduler.apply(&answer(&plans[0], TOKEN)).unwrap();
    let shared = plan(&mut scheduler);
    assert_eq!(saves(&shared), [(1, 20, 0)]);
    assert_eq!(hits(&shared), [(2, 20, Some(0)), (3, 20, Some(0))]);
}

#[test]
fn a_sequence_that_would_compute_a_known_prefix_waits_for_another_that_saves_it() {
    let small = Limits { max_step_tokens: 16, ..with_states(4, 8) };
    let mut scheduler = Scheduler::new(small);
    let prompt = |id, question| with_prompt(id, [ids(1, 22), ids(question, 5)].concat(), 2);
    run(&mut scheduler, prompt(1, 2));
    submit(&mut scheduler, prompt(2, 3));
    submit(&mut scheduler, prompt(3, 4));
    let plans = run_to_end(&mut scheduler);
    assert_eq!(
        plans.iter().map(advances).collect::<Vec<_>>()[..3],
        [vec![(2, 16)], vec![(2, 4)], vec![(2, 7), (3, 7)]]
    );
    assert_eq!(plans.iter().flat_map(hits).collect::<Vec<_>>(), [(2, 0, None), (3, 20, Some(2))]);

    // Without the one that it waits for, it computes the prefix itself.
    let mut scheduler = Scheduler::new(small);
    run(&mut scheduler, prompt(1, 2));
    submit(&mut scheduler, prompt(2, 3));
    submit(&mut scheduler, prompt(3, 4));
    step(&mut scheduler);
    assert!(scheduler.abort(SequenceId(2)));
    let resumed = plan(&mut scheduler);
    assert_eq!((saves(&resumed)[0].1, hits(&resumed)[0].1), (16, 16), "what was computed is saved");
}

#[test]
fn a_preempted_sequence_continues_where_it_was() {
    let limits = Limits { num_blocks: 7, ..with_states(4, 4) };
    let mut scheduler = scheduler(limits, &[]);
    submit(&mut scheduler, with_prompt(1, ids(1, 9), 8));
    submit(&mut scheduler, with_prompt(2, ids(2, 9), 8));
    let plans = run_to_end(&mut scheduler);
    assert_eq!(scheduler.stats().num_preemptions, 1);
    let started: Vec<_> = plans.iter().flat_map(hits).filter(|(id, ..)| *id == 2).collect();
    assert_eq!(started.len(), 2);
    assert_eq!(started[1].1, 12, "the pool has kept this much of it: {started:?}");
}

#[test]
fn the_snapshot_that_saves_least_is_given_up_first() {
    let mut scheduler = Scheduler::new(with_states(4, 2));
    run(&mut scheduler, with_prompt(1, ids(1, 41), 1));
    run(&mut scheduler, with_prompt(2, ids(2, 9), 1));
    run(&mut scheduler, with_prompt(3, ids(3, 17), 1));
    assert_eq!(scheduler.stats().num_full_snapshots, 2);
    let mut hit = |id, text, num_tokens| hit(&mut scheduler, with_prompt(id, ids(text, num_tokens), 1));
    assert_eq!(hit(4, 1, 41), 40);
    assert_eq!(hit(5, 2, 9), 0, "it was the shorter one, and takes the place of the third one now");
    // Each loss makes older snapshots worth less than new ones.
    for id in 6..60 {
        assert_eq!(hit(id, id as u32, 9), 0);
    }
    assert_eq!(hit(60, 1, 41), 0);
}

/// With three snapshots, the one in front of a newer one of the same conversation makes room for those of others.
#[test]
fn a_snapshot_that_a_conversation_has_left_behind_is_given_up_before_others() {
    let mut scheduler = Scheduler::new(with_states(4, 3));
    run(&mut scheduler, with_prompt(1, ids(1, 41), 1));
    run(&mut scheduler, with_prompt(2, ids(2, 9), 1));
    let mut hit = |id, prompt| hit(&mut scheduler, with_prompt(id, prompt, 1));
    assert_eq!(hit(3, ids(1, 61)), 40, "the next turn, which leaves a snapshot behind 60 tokens");
    assert_eq!(hit(4, ids(3, 9)), 0, "takes the place of the one behind 40 tokens");
    assert_eq!(hit(5, ids(2, 9)), 8);
    assert_eq!(hit(6, ids(1, 61)), 60);
}

#[test]
fn a_snapshot_where_texts_branch_off_is_kept() {
    let mut scheduler = Scheduler::new(with_states(4, 3));
    let prompt = |end: u32| [ids(1, 40), ids(end, 9)].concat();
    for id in 2..5 {
        run(&mut scheduler, with_prompt(id, prompt(id as u32), 1));
    }
    for id in 5..20 {
        let found = hit(&mut scheduler, with_prompt(id, prompt(id as u32), 1));
        assert_eq!(found, 40, "of sequence {id}");
    }
}

#[test]
fn a_snapshot_is_lost_with_the_content_of_its_block() {
    let limits = Limits { num_blocks: 6, ..with_states(4, 4) };
    let mut scheduler = Scheduler::new(limits);
    run(&mut scheduler, with_prompt(1, ids(1, 17), 1));
    assert_eq!(scheduler.stats().num_full_snapshots, 1);
    run(&mut scheduler, with_prompt(2, ids(2, 13), 1));
    assert_eq!(scheduler.stats().num_full_snapshots, 1, "that of the second prompt");
    assert_eq!(hit(&mut scheduler, with_prompt(3, ids(1, 17), 1)), 0);
}

#[test]
fn a_snapshot_outlives_the_eviction_of_its_block_to_a_slot() {
    let limits = Limits { num_blocks: 6, num_memory_slots: 8, ..with_states(4, 4) };
    let mut scheduler = Scheduler::new(limits);
    run(&mut scheduler, with_prompt(1, ids(1, 17), 1));
    run(&mut scheduler, with_prompt(2, ids(2, 17), 1));
    assert_eq!(hit(&mut scheduler, with_prompt(3, ids(1, 17), 1)), 16);
}

/// The failed one has been planned to save, and another one to continue there.
#[test]
fn no_sequence_continues_the_states_of_one_that_has_failed() {
    let small = Limits { max_step_tokens: 16, max_steps_in_flight: 3, ..with_states(4, 8) };
    let mut scheduler = Scheduler::new(small);
    for id in 1..=2 {
        submit(&mut scheduler, with_prompt(id, [ids(1, 17), ids(1 + id as u32, 5)].concat(), 4));
    }
    let first = plan(&mut scheduler);
    assert_eq!(advances(&first), [(1, 16)]);
    let second = plan(&mut scheduler);
    assert_eq!((saves(&second), hits(&second)), (vec![(1, 16, 0)], vec![(2, 16, Some(0))]));
    let failed = SequenceOutput { id: SequenceId(1), token_ids: None, num_draft_tokens: 0, drafted_by_model: false };
    let events = scheduler.apply(&StepResult { step: 1, outputs: vec![failed] }).unwrap();
    assert_eq!(events, [Event::Failed { id: SequenceId(1), output_index: 0 }]);
    let third = plan(&mut scheduler);
    assert_eq!(third.freed_sequence_ids, [SequenceId(2), SequenceId(1)]);
    assert_eq!((saves(&third), hits(&third)), (vec![], vec![(2, 0, None)]));
}

#[test]
fn what_an_encoder_or_all_prompt_outputs_need_is_computed() {
    let mut scheduler = Scheduler::new(with_states(4, 4));
    run(&mut scheduler, with_prompt(1, ids(1, 17), 1));
    let again = Submission { needs_prompt_outputs: true, ..with_prompt(2, ids(1, 17), 1) };
    assert_eq!(hit(&mut scheduler, again), 0);
    let limits = Limits { snapshot_reach_tokens: 1, ..with_states(4, 4) };
    let spans = Submission { whole_spans: std::iter::once(10..14).collect(), ..with_prompt(3, ids(3, 15), 1) };
    let plans = run(&mut Scheduler::new(limits), spans);
    assert_eq!(advances(&plans[0]), [(3, 15)], "no advance ends inside of an image");
}

#[test]
fn a_restart_forgets_all_snapshots() {
    let mut scheduler = Scheduler::new(with_states(1, 4));
    run(&mut scheduler, with_prompt(1, ids(1, 17), 1));
    submit(&mut scheduler, with_prompt(2, ids(1, 17), 4));
    plan(&mut scheduler);
    scheduler.restart();
    scheduler.audit();
    assert_eq!(scheduler.stats().num_full_snapshots, 0);
    assert_eq!(hits(&plan(&mut scheduler)), [(2, 0, None)]);
}
