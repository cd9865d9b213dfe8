//! Several engines as one: requests are spread, and the loss of one engine's workers neither stops its streams nor costs a token.
#![allow(clippy::unwrap_used, unreachable_pub)]

#[allow(dead_code, reason = "shared with tests/engine.rs")]
mod fake_worker;

use std::sync::Arc;

use fake_worker::fleet::Fleet;
use fake_worker::setting::{PATIENCE, collect, limits, request, streams_are_complete, wait_until, worker_failure};
use fake_worker::{Script, expected_tokens};
use futures::StreamExt;
use futures::future::join_all;
use penstock_router::engine::{EngineOptions, RestartGroup};
use penstock_router::generator::{Generator, Health};
use penstock_router::replica::Replicas;
use penstock_router::sequence::{
    EncodedImage, Grammar, Image, ImageError, ImageSpan, SequenceEvent, SequenceFailure, SequenceRequest,
};
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

/// One replica for each fleet.
async fn replicas(fleets: &[&Fleet], options: EngineOptions) -> Replicas {
    let groups = join_all(fleets.iter().map(|fleet| fleet.group())).await;
    let restarts = fleets.iter().map(|fleet| Arc::new(Fleet::clone(fleet)) as Arc<dyn RestartGroup>);
    Replicas::start(groups.into_iter().zip(restarts).collect(), options)
}

fn prompts(number: u32) -> Vec<Vec<u32>> {
    (1..=number).map(|length| (length..3 * length).collect()).collect()
}

#[tokio::test]
async fn requests_are_spread_over_all_replicas() {
    let fleets = [(); 3].map(|()| Fleet::new([healthy()]));
    let replicas = replicas(&fleets.each_ref(), options()).await;
    streams_are_complete(&replicas, prompts(30), 20).await;
    for fleet in &fleets {
        let num_plans = fleet.started(1).await.ranks[0].look(|seen| seen.plans.len());
        assert!(num_plans >= 20, "a replica took {num_plans} steps");
    }
    assert_eq!(replicas.stats().num_blocks, 3 * 256);
}

#[tokio::test]
async fn first_tokens_say_nothing_about_the_speed_of_a_replica() {
    let fleets = [(); 2].map(|()| Fleet::new([healthy()]));
    let replicas = replicas(&fleets.each_ref(), options()).await;
    let speeds = || replicas.replicas().into_iter().map(|report| report.seconds_per_token).collect::<Vec<_>>();
    streams_are_complete(&replicas, prompts(60), 1).await;
    assert_eq!(speeds(), [None, None]);
    streams_are_complete(&replicas, prompts(60), 5).await;
    assert!(speeds().iter().all(Option::is_some), "{:?}", speeds());
}

#[tokio::test]
async fn streams_continue_in_other_replicas_without_waiting_for_a_restart() {
    for step in 1..=24 {
        let (lost, kept) = (Fleet::new([dies_at(step), healthy()]), Fleet::new([healthy()]));
        lost.allow(0);
        let replicas = replicas(&[&lost, &kept], options()).await;
        streams_are_complete(&replicas, prompts(8), 20).await;
        lost.wait_until_asked(1).await;
        assert_eq!((lost.num_started(), kept.num_started()), (1, 1), "step {step}");
        assert!(replicas.health().is_healthy(), "one replica takes steps");
        streams_are_complete(&replicas, prompts(4), 5).await;
    }
}

#[tokio::test]
async fn with_every_replica_lost_streams_wait_for_a_restart() {
    let (first, second) = (Fleet::new([dies_at(4), healthy()]), Fleet::new([dies_at(9), healthy()]));
    first.allow(0);
    second.allow(0);
    let replicas = replicas(&[&first, &second], options()).await;
    let streams = tokio::spawn({
        let replicas = replicas.clone();
        async move { streams_are_complete(&replicas, prompts(8), 40).await }
    });
    first.wait_until_asked(1).await;
    second.wait_until_asked(1).await;
    wait_until(|| matches!(replicas.health(), Health::Restarting(_))).await;
    first.allow(1);
    second.allow(1);
    streams.await.unwrap();
}

#[tokio::test]
async fn a_restarted_replica_gets_requests_again() {
    let (lost, kept) = (Fleet::new([dies_at(2), healthy()]), Fleet::new([healthy()]));
    let replicas = replicas(&[&lost, &kept], options()).await;
    streams_are_complete(&replicas, prompts(8), 20).await;
    let again = lost.started(2).await;
    wait_until(|| {
        drop(replicas.submit(request(&[1], 1)));
        again.ranks[0].look(|seen| !seen.plans.is_empty())
    })
    .await;
}

#[tokio::test]
async fn a_stream_that_is_dropped_while_its_sequence_moves_leaves_nothing_behind() {
    for step in 1..=8 {
        let (lost, kept) = (Fleet::new([dies_at(step)]), Fleet::new([healthy()]));
        lost.allow(0);
        let replicas = replicas(&[&lost, &kept], options()).await;
        let mut streams: Vec<_> = (1..20).map(|first| replicas.submit(request(&[first], 400))).collect();
        lost.started(1).await.ranks[0].wait_until(|seen| seen.plans.len() as u64 >= step).await;
        while let Some(mut stream) = streams.pop() {
            let _ = futures::poll!(stream.next());
            drop(stream);
            tokio::task::yield_now().await;
        }
        wait_until(|| replicas.stats().num_running + replicas.stats().num_queued == 0).await;
    }
}

#[tokio::test]
async fn a_sequence_that_brings_workers_down_costs_two_replicas_their_groups_and_no_other_stream_a_token() {
    let deadly = || vec![Script { deadly: Some((77, 3)), ..Script::default() }];
    let fleets = [(); 3].map(|()| Fleet::new([deadly(), deadly(), deadly(), deadly()]));
    let replicas = replicas(&fleets.each_ref(), options()).await;
    let poison = collect(replicas.submit(request(&[77, 1], 50)));
    let others = streams_are_complete(&replicas, prompts(12), 30);
    let ((tokens, terminal), ()) = tokio::join!(poison, others);
    assert!(expected_tokens(&[77, 1], 1).starts_with(&tokens), "{tokens:?}");
    let SequenceEvent::Failed(SequenceFailure::Sequence(reason)) = terminal else { panic!("{terminal:?}") };
    assert!(reason.contains("stopped 3 times in a row"), "{reason}");
    let num_losses = || {
        let mut num_losses: Vec<_> = fleets.iter().map(Fleet::num_asked).collect();
        num_losses.sort_unstable();
        num_losses
    };
    wait_until(|| num_losses().iter().sum::<usize>() == 3).await;
    assert_eq!(num_losses(), [0, 1, 2], "alone in the last loss");
}

#[tokio::test]
async fn the_others_serve_when_a_replica_has_failed_for_good() {
    let options = EngineOptions { max_failures: 1, ..options() };
    let (lost, kept) = (Fleet::new([dies_at(3)]), Fleet::new([dies_at(60)]));
    let replicas = replicas(&[&lost, &kept], options).await;
    streams_are_complete(&replicas, prompts(6), 20).await;
    streams_are_complete(&replicas, prompts(2), 5).await;
    assert!(futures::poll!(Box::pin(replicas.failure())).is_pending(), "one replica is left");
    let (_, terminal) = collect(replicas.submit(request(&[5], 200))).await;
    let reason = worker_failure(terminal);
    assert!(replicas.failure().await.contains(&reason));
    assert!(matches!(replicas.health(), Health::Failed(_)));
}

#[tokio::test]
async fn grammars_are_compiled_wherever_a_sequence_may_run() {
    let fleets = [(); 2].map(|()| Fleet::new([healthy()]));
    let replicas = replicas(&fleets.each_ref(), options()).await;
    let grammar = Grammar::Regex("[a-z]+".to_owned());
    replicas.compile_grammar(&grammar).await.unwrap();
    for fleet in &fleets {
        assert_eq!(fleet.started(1).await.ranks[0].look(|seen| seen.grammars.len()), 1);
    }
}

/// How many images each replica was asked to encode.
async fn num_encoded(fleets: &[Fleet]) -> Vec<usize> {
    join_all(fleets.iter().map(async |fleet| fleet.started(1).await.ranks[0].look(|seen| seen.images.len()))).await
}

#[tokio::test]
async fn an_image_is_encoded_by_one_replica_where_its_sequences_run() {
    let fleets = [(); 3].map(|()| Fleet::new([healthy()]));
    let replicas = replicas(&fleets.each_ref(), options()).await;
    let image = Image::new(b"file".to_vec());
    let expected = EncodedImage { token_ids: vec![9; 4], num_bytes: 1 };
    assert_eq!(replicas.encode_images(vec![image.clone()]).await.unwrap(), [expected]);
    let images: Arc<[_]> = [ImageSpan { image, offset: 0, num_tokens: 2, is_whole: false, num_bytes: 1 }].into();
    for length in 2..5 {
        let request = SequenceRequest { images: Arc::clone(&images), ..request(&[9; 7][..length], 3) };
        assert_eq!(collect(replicas.submit(request)).await.0.len(), 3);
    }
    assert_eq!(num_encoded(&fleets).await, [1, 0, 0]);
    for fleet in &fleets[1..] {
        assert_eq!(fleet.started(1).await.ranks[0].look(|seen| seen.plans.len()), 0);
    }
}

#[tokio::test]
async fn a_replica_without_workers_is_not_asked_to_encode_images() {
    let fleets = [Fleet::new([dies_at(1), healthy()]), Fleet::new([healthy()])];
    fleets[0].allow(0);
    let replicas = replicas(&fleets.each_ref(), options()).await;
    streams_are_complete(&replicas, prompts(2), 5).await;
    replicas.encode_images(vec![Image::new(b"file".to_vec())]).await.unwrap();
    assert_eq!(num_encoded(&fleets).await, [0, 1]);
}

#[tokio::test]
async fn an_image_that_brings_workers_down_costs_two_replicas_their_groups_and_no_stream_a_token() {
    let fleets = [(); 3].map(|()| Fleet::new([(); 5].map(|()| healthy())));
    let replicas = replicas(&fleets.each_ref(), options()).await;
    let poison = replicas.encode_images(vec![Image::new(b"deadly".to_vec())]);
    let (encoded, ()) = tokio::join!(poison, streams_are_complete(&replicas, prompts(12), 30));
    assert!(matches!(encoded, Err(ImageError::Worker(_))), "{encoded:?}");
    assert!(fleets.iter().any(|fleet| fleet.num_asked() == 0), "a replica that was never asked");
}

#[tokio::test]
async fn one_replica_alone_is_an_engine() {
    let fleet = Fleet::new([dies_at(3), healthy()]);
    let replicas = replicas(&[&fleet], options()).await;
    streams_are_complete(&replicas, prompts(6), 20).await;
    assert_eq!(fleet.num_started(), 2);
    replicas.shut_down().await;
    assert_eq!(collect_terminal(&replicas).await, SequenceEvent::Failed(SequenceFailure::ShuttingDown));
}

/// The one event of a sequence that never starts.
async fn collect_terminal(replicas: &Replicas) -> SequenceEvent {
    let mut events: Vec<_> = replicas.submit(request(&[1], 1)).collect().await;
    assert_eq!(events.len(), 1);
    events.remove(0)
}
