//! The loss of a worker group loses and repeats no token: the engine with scripted workers over real sockets.
#![allow(clippy::unwrap_used, unreachable_pub)]

#[allow(dead_code, reason = "shared with tests/engine.rs")]
mod fake_worker;

use std::time::Duration;

use fake_worker::fleet::Fleet;
use fake_worker::sequences::unpack;
use fake_worker::setting::{
    FINISHED, PATIENCE, collect, limits, request, streams_are_complete, wait_until, worker_failure,
};
use fake_worker::{Garble, Hang, Script, expected_tokens};
use futures::future::join_all;
use penstock_router::engine::{Engine, EngineOptions};
use penstock_router::generator::{Generator, Health};
use penstock_router::sequence::{Grammar, GrammarError, SequenceEvent, SequenceFailure, SequenceRequest};
use penstock_scheduler::Limits;

fn options() -> EngineOptions {
    let limits = Limits { max_step_tokens: 16, ..limits() };
    EngineOptions { limits, step_deadline: PATIENCE, max_failures: 5 }
}

fn healthy() -> Vec<Script> {
    vec![Script::default()]
}

fn dies_at(step: u64) -> Vec<Script> {
    vec![Script { die_at_step: Some(step), ..Script::default() }]
}

/// Prompts of several lengths; some need several steps.
fn prompts() -> Vec<Vec<u32>> {
    [3, 40, 1, 17].iter().map(|length| (*length..3 * length).collect()).collect()
}

async fn streams_are_undisturbed(fleet: &Fleet, options: EngineOptions) {
    let engine = fleet.engine(options).await;
    streams_are_complete(&engine, prompts(), 20).await;
    wait_until(|| engine.health().is_healthy() && engine.stats().num_running == 0).await;
}

#[tokio::test]
async fn streams_continue_with_the_same_tokens_in_whichever_step_a_worker_is_lost() {
    for step in 1..=24 {
        for fault in [
            Script { die_at_step: Some(step), ..Script::default() },
            Script { close_at_step: Some(step), ..Script::default() },
            Script { failure_at_step: Some((step, "out of memory".to_owned())), ..Script::default() },
        ] {
            let fleet = Fleet::new([vec![fault], healthy()]);
            streams_are_undisturbed(&fleet, options()).await;
            assert_eq!(fleet.num_started(), 2, "step {step} was never reached");
        }
    }
}

#[tokio::test]
async fn streams_with_drafts_continue_with_the_same_tokens_in_whichever_step_a_worker_is_lost() {
    // Forced tokens have drafts whatever steps cost.
    let limits = Limits { max_draft_tokens: 4, drafts_only_forced: true, ..options().limits };
    for step in 1..=24 {
        let fleet = Fleet::new([dies_at(step), healthy()]);
        let engine = fleet.engine(EngineOptions { limits, ..options() }).await;
        let streams = prompts().into_iter().map(|prompt| {
            let grammar = Some(Grammar::Regex("fine".to_owned()));
            let stream = collect(engine.submit(SequenceRequest { grammar, ..request(&prompt, 100) }));
            async move { assert_eq!(stream.await, (expected_tokens(&prompt, 100), FINISHED)) }
        });
        join_all(streams.collect::<Vec<_>>()).await;
        assert_eq!(fleet.num_started(), 2, "step {step} was never reached");
        let plans = fleet.started(2).await.ranks[0].look(|seen| seen.plans.clone());
        let decodes: Vec<_> = plans.iter().flat_map(unpack).filter(|advance| advance.sample).collect();
        assert!(decodes.iter().any(|advance| advance.num_draft_tokens == 4), "step {step}");
        assert!(decodes.len() < 4 * 100, "{} decodes: drafts gave no token", decodes.len());
    }
}

#[tokio::test]
async fn sources_are_sent_again_whole_with_their_answers_and_token_types() {
    for step in [1, 2, 5, 9] {
        let fleet = Fleet::new([dies_at(step), healthy()]);
        let limits = Limits { max_step_tokens: 64, ..options().limits };
        let engine = fleet.engine(EngineOptions { limits, ..options() }).await;
        // Sources of several lengths, each followed by a decoder prefix of two tokens.
        let prompts: Vec<Vec<u32>> = [1, 5, 16, 11].iter().map(|&n| (n..2 * n).chain([7, 8]).collect()).collect();
        let streams = prompts.iter().map(|prompt| {
            let num_source_tokens = prompt.len() as u32 - 2;
            let num_second_text_tokens = num_source_tokens / 2;
            let sequence = SequenceRequest { num_source_tokens, num_second_text_tokens, ..request(prompt, 12) };
            collect(engine.submit(sequence))
        });
        for (prompt, stream) in prompts.iter().zip(join_all(streams.collect::<Vec<_>>()).await) {
            assert_eq!(stream, (expected_tokens(prompt, 12), FINISHED));
        }
        let again = fleet.started(2).await.ranks[0]
            .look(|seen| seen.plans.iter().flat_map(|plan| plan.new_sequences.clone()).collect::<Vec<_>>());
        assert!(!again.is_empty(), "step {step} was never reached");
        for new in again {
            let prompt = prompts.iter().find(|prompt| new.token_ids.starts_with(prompt)).expect("source and prefix");
            assert_eq!(new.num_source_tokens as usize, prompt.len() - 2);
            assert_eq!(new.num_second_text_tokens as usize, (prompt.len() - 2) / 2);
            assert_eq!(new.num_computed_tokens, 0);
        }
    }
}

#[tokio::test]
async fn streams_continue_whichever_rank_is_lost() {
    for step in [1, 5, 11] {
        let fleet = Fleet::new([
            [healthy(), dies_at(step)].concat(),
            [dies_at(step + 1), healthy()].concat(),
            [healthy(), healthy()].concat(),
        ]);
        streams_are_undisturbed(&fleet, options()).await;
        assert_eq!(fleet.num_started(), 3);
    }
}

#[tokio::test]
async fn a_garbled_result_never_reaches_a_stream() {
    for garble in Garble::ALL {
        for step in [1, 2, 7] {
            let garbled = vec![Script { garbled_step: Some((step, garble)), ..Script::default() }];
            let fleet = Fleet::new([garbled, healthy()]);
            streams_are_undisturbed(&fleet, options()).await;
            assert_eq!(fleet.num_started(), 2, "{garble:?} at step {step} was not noticed");
        }
    }
}

#[tokio::test]
async fn a_worker_that_hangs_is_replaced_after_the_step_deadline() {
    for hang in [Hang::Step, Hang::Process] {
        for step in [1, 15] {
            let hangs = vec![Script { hang_at_step: Some((step, hang)), ..Script::default() }];
            // On a busy machine a healthy worker may be taken for one that hangs as well.
            let fleet = Fleet::new([[healthy(), hangs].concat(), healthy(), healthy(), healthy()]);
            let step_deadline = Duration::from_millis(500);
            streams_are_undisturbed(&fleet, EngineOptions { step_deadline, ..options() }).await;
            assert!(fleet.num_started() >= 2);
        }
    }
}

#[tokio::test]
async fn any_number_of_losses_is_survived_if_steps_are_finished_between_them() {
    for seed in 0..6_u64 {
        let deaths = (0..30).map(|number| dies_at(12 + (seed * 7 + number * number * 5) % 9));
        let fleet = Fleet::new(deaths.chain([healthy()]));
        let engine = fleet.engine(options()).await;
        streams_are_complete(&engine, (1..12).map(|first| (first..first + 5).collect()).collect(), 60).await;
        assert!(fleet.num_started() > 6, "{}", fleet.num_started());
    }
}

#[tokio::test]
async fn a_sequence_without_drafts_is_past_the_lost_steps_after_a_token_of_each() {
    // Two steps in flight were lost, and the third step of the next group brings the second token.
    let fleet = Fleet::new((0..9).map(|_| dies_at(6)).chain([healthy()]));
    let limits = Limits { max_draft_tokens: 4, drafts_only_forced: true, ..options().limits };
    let engine = fleet.engine(EngineOptions { limits, ..options() }).await;
    streams_are_complete(&engine, vec![vec![1, 2, 3]], 30).await;
    assert!(fleet.num_started() > 6, "{}", fleet.num_started());
}

#[tokio::test]
async fn requests_during_a_restart_wait_for_it_and_health_reports_it() {
    let fleet = Fleet::new([dies_at(4), healthy()]);
    fleet.allow(0);
    let engine = fleet.engine(options()).await;
    let before = collect(engine.submit(request(&[1, 2], 30)));
    fleet.wait_until_asked(1).await;
    assert!(matches!(engine.health(), Health::Restarting(_)));
    let meanwhile = collect(engine.submit(request(&[3, 4], 5)));
    let mut stats = engine.stats();
    while stats.num_queued < 2 {
        tokio::task::yield_now().await;
        stats = engine.stats();
    }
    assert_eq!((stats.num_running, stats.num_allocatable_blocks), (0, 256));
    fleet.allow(1);
    assert_eq!(before.await, (expected_tokens(&[1, 2], 30), FINISHED));
    assert_eq!(meanwhile.await, (expected_tokens(&[3, 4], 5), FINISHED));
    assert!(engine.health().is_healthy());
}

#[tokio::test]
async fn a_sequence_aborted_during_a_restart_is_not_computed_again() {
    let fleet = Fleet::new([dies_at(6), healthy()]);
    fleet.allow(0);
    let engine = fleet.engine(options()).await;
    let (leaves, stays) = (engine.submit(request(&[1, 2], 300)), engine.submit(request(&[3, 4], 30)));
    fleet.wait_until_asked(1).await;
    drop(leaves);
    fleet.allow(1);
    assert_eq!(collect(stays).await.0, expected_tokens(&[3, 4], 30));
    let started = fleet.started(2).await.ranks[0].look(|seen| {
        seen.plans.iter().flat_map(|plan| &plan.new_sequences).map(|new| new.token_ids[0]).collect::<Vec<_>>()
    });
    assert_eq!(started, [3]);
}

#[tokio::test]
async fn shutting_down_does_not_wait_for_a_restart() {
    let fleet = Fleet::new([dies_at(3), healthy()]);
    fleet.allow(0);
    let engine = fleet.engine(options()).await;
    let stream = engine.submit(request(&[1], 30));
    fleet.wait_until_asked(1).await;
    engine.shut_down().await;
    assert_eq!(collect(stream).await.1, SequenceEvent::Failed(SequenceFailure::ShuttingDown));
    fleet.allow(1);
    tokio::task::yield_now().await;
    assert_eq!(fleet.num_started(), 1, "the restart went on");
}

#[tokio::test]
async fn a_group_lost_while_idle_is_restarted_at_once() {
    let fleet = Fleet::new([healthy(), healthy()]);
    let engine = fleet.engine(options()).await;
    collect(engine.submit(request(&[1], 1))).await;
    fleet.started(1).await.ranks[0].kill();
    fleet.started(2).await;
    while !engine.health().is_healthy() {
        tokio::task::yield_now().await;
    }
    assert_eq!(collect(engine.submit(request(&[2], 3))).await.0, expected_tokens(&[2], 3));
}

#[tokio::test]
async fn failed_restarts_are_retried() {
    let fleet = Fleet::new([dies_at(9), vec![], vec![], healthy()]);
    streams_are_undisturbed(&fleet, options()).await;
    assert_eq!((fleet.num_asked(), fleet.num_started()), (3, 2));
}

#[tokio::test]
async fn after_too_many_failures_in_a_row_open_and_later_streams_fail_once() {
    let fleet = Fleet::new([dies_at(5), dies_at(1), vec![], healthy()]);
    let engine = fleet.engine(EngineOptions { max_failures: 3, ..options() }).await;
    let streams: Vec<_> = (1..9).map(|first| collect(engine.submit(request(&[first], 50)))).collect();
    for (_, terminal) in join_all(streams).await {
        let reason = worker_failure(terminal);
        assert!(reason.starts_with("3 failures in a row without a finished step, the last one: "), "{reason}");
        assert!(reason.ends_with("restarting them failed: there is no other worker"), "{reason}");
    }
    assert_eq!(fleet.num_asked(), 2);
    assert_eq!(engine.health(), Health::Failed(engine.failure().await));
    worker_failure(collect(engine.submit(request(&[1], 1))).await.1);
    let grammar = engine.compile_grammar(&Grammar::Regex("a".to_owned())).await;
    assert!(matches!(grammar, Err(GrammarError::Worker(_))), "{grammar:?}");
}

/// Dies whenever a sequence that begins with 13 samples the token at position 6.
fn deadly() -> Vec<Script> {
    vec![Script { deadly: Some((13, 6)), ..Script::default() }]
}

#[tokio::test]
async fn a_sequence_that_kills_its_workers_fails_alone() {
    let fleet = Fleet::new((0..9).map(|_| deadly()));
    let engine = fleet.engine(options()).await;
    let neighbours = streams_are_complete(&engine, (1..12).map(|first| (first..first + 5).collect()).collect(), 80);
    let (tokens, terminal) = collect(engine.submit(request(&[13, 1], 50))).await;
    assert!(expected_tokens(&[13, 1], 4).starts_with(&tokens), "{tokens:?}");
    let SequenceEvent::Failed(SequenceFailure::Sequence(reason)) = terminal else { panic!("{terminal:?}") };
    assert!(reason.starts_with("the model workers stopped 3 times in a row while they computed this sequence"));
    neighbours.await;
    assert_eq!(fleet.num_started(), 4, "three workers died of it");
    assert!(engine.health().is_healthy());
}

#[tokio::test]
async fn an_innocent_sequence_that_was_in_every_loss_continues() {
    // No sequence gets past the steps that were lost, so those in both losses run alone next.
    let fleet = Fleet::new([dies_at(4), dies_at(1), healthy()]);
    streams_are_undisturbed(&fleet, options()).await;
    let plans = fleet.started(3).await.ranks[0].look(|seen| seen.plans.clone());
    let alone = plans.iter().take_while(|plan| unpack(plan).len() <= 1).count();
    // At most all four sequences: their prompts in chunks, and the two tokens that the steps in flight would have given.
    assert!((3..=15).contains(&alone), "{alone} steps with one sequence");
    assert!(plans[alone..].iter().any(|plan| unpack(plan).len() == 4), "the sequences never run together again");
}

#[tokio::test]
async fn a_third_loss_fails_only_the_sequence_that_ran_alone() {
    // After the second loss all four are in quarantine, and the third loss happens while one of them runs alone.
    let fleet = Fleet::new([dies_at(4), dies_at(1), dies_at(1), healthy()]);
    let engine = fleet.engine(options()).await;
    let prompts = prompts();
    let streams: Vec<_> = prompts.iter().map(|prompt| collect(engine.submit(request(prompt, 20)))).collect();
    let mut num_failed = 0;
    for (prompt, (tokens, terminal)) in prompts.iter().zip(join_all(streams).await) {
        if terminal == FINISHED {
            assert_eq!(tokens, expected_tokens(prompt, 20));
        } else {
            assert!(matches!(terminal, SequenceEvent::Failed(SequenceFailure::Sequence(_))), "{terminal:?}");
            num_failed += 1;
        }
    }
    assert_eq!(num_failed, 1);
    let alone = fleet.started(3).await.ranks[0].look(|seen| seen.plans.clone());
    assert!(alone.iter().all(|plan| unpack(plan).len() == 1), "{alone:?}");
    assert!(engine.health().is_healthy());
}

async fn compile(engine: &Engine, grammar: &str) -> Result<(), GrammarError> {
    engine.compile_grammar(&Grammar::Regex(grammar.to_owned())).await
}

#[tokio::test]
async fn a_compilation_waits_for_the_next_group() {
    let (_keep_shut, script) = Script::gated(0);
    let fleet = Fleet::new([vec![script], healthy()]);
    fleet.allow(0);
    let engine = fleet.engine(options()).await;
    assert_eq!(compile(&engine, "broken").await, Err(GrammarError::Invalid("it is broken".to_owned())));
    fleet.started(1).await.ranks[0].kill();
    fleet.wait_until_asked(1).await;
    let compiling = engine.compile_grammar(&Grammar::Regex("fine".to_owned()));
    let mut compiling = std::pin::pin!(compiling);
    assert!(futures::poll!(&mut compiling).is_pending());
    fleet.allow(1);
    assert_eq!(compiling.await, Ok(()));
    assert_eq!(fleet.started(2).await.ranks[0].look(|seen| seen.grammars.clone()), ["fine"]);
}

#[tokio::test]
async fn a_grammar_that_kills_its_workers_is_given_up_and_no_sequence() {
    // The streams are in all three losses, and in quarantine after the second: the grammar must not be compiled then.
    let fleet = Fleet::new((0..5).map(|_| healthy()));
    let engine = fleet.engine(options()).await;
    let streams = streams_are_complete(&engine, (1..30).map(|first| (first..first + 5).collect()).collect(), 200);
    let compiled = compile(&engine, "deadly").await;
    assert!(matches!(compiled, Err(GrammarError::Worker(_))), "{compiled:?}");
    streams.await;
    assert_eq!(fleet.num_started(), 4);
    assert_eq!(compile(&engine, "fine").await, Ok(()));
}
