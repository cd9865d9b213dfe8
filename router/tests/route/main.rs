//! Engines on other servers as one: real gRPC on loopback, with fake workers behind the servers. The loss of a server costs no token.
#![allow(clippy::unwrap_used, unreachable_pub)]

mod adapter;
mod change;
#[allow(dead_code, reason = "shared with tests/engine.rs")]
#[path = "../fake_worker/mod.rs"]
mod fake_worker;
#[allow(dead_code, reason = "shared with tests/http")]
#[path = "../http/server.rs"]
mod http_server;
mod kill;
#[allow(dead_code, reason = "shared with tests/http")]
#[path = "../http/model.rs"]
mod model;
mod server;

use std::time::Duration;

use fake_worker::setting::{FINISHED, collect, request, streams_are_complete};
use fake_worker::{Script, expected_tokens};
use futures::StreamExt;
use penstock_router::generator::{Generator, Health};
use penstock_router::remote::{Access, Remote, RemoteError, ServerDescription};
use penstock_router::replica::Replicas;
use penstock_router::sequence::{Grammar, SequenceEvent, SequenceFailure, SequenceRequest, greedy};
use penstock_router::tls::Identity;
use tokio::sync::watch;

use fake_worker::setting::{PATIENCE, wait_until};
use server::{Endless, NUM_STREAMS, Server, Setup, access, prompts, route, router_limits, serve_endless, streams};

/// Two servers, both connected: the first answers `num_steps` steps and no further one.
async fn stopping_server(num_steps: u64) -> (watch::Sender<u64>, Server, Server) {
    let (gate, script) = Script::gated(num_steps);
    (gate, Setup::of(script).start().await, Setup::default().start().await)
}

/// Streams on both servers, when the first one stops to answer steps.
async fn running_streams(replicas: &Replicas, stopped: &Server, num_steps: u64) -> tokio::task::JoinHandle<()> {
    wait_until(|| replicas.stats().num_blocks == 2 * 256).await;
    let streams = streams(replicas);
    stopped.wait_for_plans(num_steps + 1).await;
    streams
}

#[tokio::test]
async fn requests_are_spread_over_all_servers() {
    let servers = [Setup::default().start().await, Setup::default().start().await];
    let replicas = route(&servers.each_ref(), PATIENCE).await;
    wait_until(|| replicas.stats().num_blocks == 2 * 256).await;
    streams_are_complete(&replicas, prompts(20), 20).await;
    for server in &servers {
        assert!(server.num_plans().await >= 20);
    }
    // A cancelled stream leaves nothing on any server.
    drop((1..20).map(|first| replicas.submit(request(&[first], 400))).collect::<Vec<_>>());
    wait_until(|| replicas.stats().num_running + replicas.stats().num_queued == 0).await;
}

#[tokio::test]
async fn streams_continue_on_another_server_when_theirs_is_killed() {
    for num_steps in [0, 1, 5, 13] {
        let (_gate, mut killed, kept) = stopping_server(num_steps).await;
        let replicas = route(&[&killed, &kept], PATIENCE).await;
        let streams = running_streams(&replicas, &killed, num_steps).await;
        killed.kill();
        streams.await.unwrap();
        wait_until(|| replicas.stats().num_blocks == 256).await;
        streams_are_complete(&replicas, prompts(4), 5).await;
    }
}

#[tokio::test]
async fn sequences_of_a_server_that_drains_move_to_another_one_at_once() {
    let (_gate, drained, kept) = stopping_server(5).await;
    let replicas = route(&[&drained, &kept], PATIENCE).await;
    let streams = running_streams(&replicas, &drained, 5).await;
    drained.shutdown.cancel();
    streams.await.unwrap();
    let num_sequences = drained.num_sequences().await;
    streams_are_complete(&replicas, prompts(4), 5).await;
    assert_eq!(drained.num_sequences().await, num_sequences, "it gets no new sequence");
}

#[tokio::test]
async fn sequences_of_the_last_server_finish_there_while_it_drains() {
    let (gate, script) = Script::gated(5);
    let server = Setup::of(script).start().await;
    let replicas = route(&[&server], PATIENCE).await;
    let streams = streams(&replicas);
    server.wait_for_plans(6).await;
    // A server that drains takes no new sequence.
    wait_until(|| replicas.stats().num_running + replicas.stats().num_queued == NUM_STREAMS).await;
    server.shutdown.cancel();
    wait_until(|| replicas.health() == Health::Draining).await;
    gate.send_replace(u64::MAX);
    streams.await.unwrap();
}

#[tokio::test]
async fn a_server_that_answers_but_finishes_no_step_loses_its_sequences() {
    let (gate, hanging, kept) = stopping_server(5).await;
    let replicas = route(&[&hanging, &kept], Duration::from_secs(3)).await;
    running_streams(&replicas, &hanging, 5).await.await.unwrap();
    let (num_plans, num_sequences) = (hanging.num_plans().await, hanging.num_sequences().await);
    streams_are_complete(&replicas, prompts(4), 5).await;
    assert_eq!(hanging.num_sequences().await, num_sequences, "it gets no new sequence");
    gate.send_replace(u64::MAX);
    let used_again = async {
        while hanging.num_plans().await <= num_plans + 2 {
            streams_are_complete(&replicas, prompts(4), 5).await;
        }
    };
    tokio::time::timeout(PATIENCE, used_again).await.expect("it gets sequences again");
}

#[tokio::test]
async fn a_server_that_returns_is_used_again_and_continues_what_waited_for_it() {
    let (_gate, script) = Script::gated(5);
    let mut lost = Setup::of(script).start().await;
    let replicas = route(&[&lost], PATIENCE).await;
    let streams = streams(&replicas);
    lost.wait_for_plans(6).await;
    lost.kill();
    wait_until(|| matches!(replicas.health(), Health::Unreachable(_))).await;
    let _again = Setup { address: lost.address, ..Setup::default() }.start().await;
    streams.await.unwrap();
}

#[tokio::test]
async fn a_router_learns_what_a_server_says_of_itself() {
    let first = Setup::default().start().await;
    let described = Remote::new(&first.url(), &access()).unwrap().describe().await.unwrap();
    let described = ServerDescription { num_slots: 7, ..described };
    let fleet = first.fleet.clone();
    let second = serve_endless(access(), described.clone(), fleet).await;
    assert_eq!(Remote::new(&second.url(), &access()).unwrap().describe().await, Ok(described));
}

#[tokio::test]
async fn what_routers_have_queued_is_part_of_the_load_that_a_server_reports() {
    let (gate, script) = Script::gated(0);
    let server = Setup::of(script).start().await;
    let http = http_server::Server::serve_with_routers(Endless, server.queue.clone(), |_| ()).await;
    let replicas = route(&[&server], PATIENCE).await;
    // Its prompt fills all steps in flight.
    let first = replicas.submit(request(&[7; 200], 20));
    server.wait_for_plans(1).await;
    let mut waiting: Vec<_> = (1..=3).map(|token| replicas.submit(request(&[token; 5], 20))).collect();
    wait_until(|| server.queue.num_tokens() == 3 * 25).await;
    assert!(http.get("/metrics").await.body.contains("\npenstock_queue_tokens 75\n"));
    drop(waiting.pop());
    wait_until(|| server.queue.num_tokens() == 2 * 25).await;
    gate.send_replace(u64::MAX);
    for stream in waiting.into_iter().chain([first]) {
        assert_eq!(collect(stream).await.1, FINISHED);
    }
    assert_eq!(server.queue.num_tokens(), 0);
    assert!(http.get("/metrics").await.body.contains("\npenstock_queue_tokens 0\n"));
}

#[tokio::test]
async fn a_server_with_other_weights_gets_no_sequence() {
    let (good, other) = (Setup::default().start().await, Setup { weights: "other", ..Setup::default() }.start().await);
    let replicas = route(&[&good, &other], PATIENCE).await;
    streams_are_complete(&replicas, prompts(12), 20).await;
    assert_eq!(other.num_plans().await, 0);
}

#[tokio::test]
async fn a_server_that_accepts_less_gets_no_sequence() {
    let good = Setup::default().start().await;
    let short = Setup { max_input_tokens: 100, ..Setup::default() }.start().await;
    let narrow = Setup { max_image_bytes: 60, ..Setup::default() }.start().await;
    let replicas = route(&[&good, &short, &narrow], PATIENCE).await;
    streams_are_complete(&replicas, prompts(12), 20).await;
    for (small, reason) in [
        (short, "its --max-input-tokens is 100, that of this router is 511"),
        (narrow, "its limit of image bytes is 60, that of this router is 100"),
    ] {
        assert_eq!(small.num_plans().await, 0);
        let description = Remote::new(&small.url(), &access()).unwrap().describe().await.unwrap();
        let error = router_limits().check(&description).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

#[tokio::test]
async fn a_sequence_that_makes_servers_unhealthy_costs_no_more_than_three() {
    let deadly = || Setup::of(Script { deadly: Some((9, 5)), ..Script::default() });
    let servers = [deadly().start().await, deadly().start().await, deadly().start().await, deadly().start().await];
    servers.iter().for_each(|server| server.fleet.allow(0));
    let replicas = route(&servers.each_ref(), PATIENCE).await;
    wait_until(|| replicas.stats().num_blocks == 4 * 256).await;
    let events: Vec<_> = replicas.submit(request(&[9, 1], 20)).collect().await;
    let Some(SequenceEvent::Failed(SequenceFailure::Sequence(reason))) = events.last() else { panic!("{events:?}") };
    assert!(reason.contains("3 servers in a row"), "{reason}");
    let num_lost = || servers.iter().filter(|server| server.fleet.num_asked() > 0).count();
    wait_until(|| num_lost() >= 3).await;
    streams_are_complete(&replicas, prompts(4), 5).await;
    assert_eq!(num_lost(), 3);
}

#[tokio::test]
async fn a_complete_sequence_ends_when_its_server_drains_before_the_end_arrives() {
    let kept = Setup::default().start().await;
    let description = Remote::new(&kept.url(), &access()).unwrap().describe().await.unwrap();
    let fleet = kept.fleet.clone();
    let drained = serve_endless(access(), description, fleet).await;
    let replicas = route(&[&drained, &kept], PATIENCE).await;
    wait_until(|| replicas.stats().num_blocks == 2 * 256).await;
    let mut stream = replicas.submit(request(&[3, 4], 10));
    let mut events = Vec::new();
    for _ in 0..11 {
        events.extend(stream.next().await);
    }
    let tokens = events.iter().filter_map(|event| match event {
        SequenceEvent::Token(token) => Some(token.id),
        _ => None,
    });
    assert_eq!(tokens.collect::<Vec<_>>(), expected_tokens(&[3, 4], 10));
    drained.shutdown.cancel();
    assert_eq!(stream.collect::<Vec<_>>().await, [FINISHED]);
    assert_eq!(kept.num_plans().await, 0);
}

#[tokio::test]
async fn a_wrong_secret_is_refused() {
    let server = Setup::default().start().await;
    let wrong = Access { secret: "fedcba9876543210".to_owned(), ..Access::default() };
    let error = Remote::new(&server.url(), &wrong).unwrap().describe().await.unwrap_err();
    let RemoteError::Refused(reason) = error else { panic!("{error:?}") };
    assert!(reason.contains("the secret is not that of this server"), "{reason}");
}

#[tokio::test]
async fn with_mutual_tls_only_a_router_with_a_certificate_is_served() {
    let pem = |name: &str| std::fs::read_to_string(format!("tests/fixtures/tls/{name}.pem")).unwrap();
    let identity = |name: &str| Some(Identity { certificates: pem(name), key: pem(&format!("{name}.key")) });
    let with = |identity| Access { identity, authority: Some(pem("authority")), ..access() };
    let server = Setup { access: with(identity("server")), ..Setup::default() }.start().await;
    let url = format!("https://{}", server.address);
    Remote::new(&url, &with(identity("router"))).unwrap().describe().await.unwrap();
    for access in [with(None), Access { authority: Some(pem("router")), ..with(identity("router")) }] {
        let error = Remote::new(&url, &access).unwrap().describe().await.unwrap_err();
        assert!(matches!(error, RemoteError::Lost(_)), "{error:?}");
    }
    let plain = Remote::new(&server.url(), &access()).unwrap().describe().await.unwrap_err();
    assert!(matches!(plain, RemoteError::Lost(_)), "{plain:?}");
}

#[tokio::test]
async fn grammars_are_compiled_on_every_server() {
    let servers = [Setup::default().start().await, Setup::default().start().await];
    let replicas = route(&servers.each_ref(), PATIENCE).await;
    wait_until(|| replicas.stats().num_blocks == 2 * 256).await;
    replicas.compile_grammar(&Grammar::Regex("[a-z]+".to_owned())).await.unwrap();
    for server in &servers {
        assert_eq!(server.fleet.started(1).await.ranks[0].look(|seen| seen.grammars.len()), 1);
    }
}

#[tokio::test]
async fn a_sequence_that_began_elsewhere_continues_with_the_same_tokens() {
    let server = Setup::default().start().await;
    let replicas = route(&[&server], PATIENCE).await;
    let expected = expected_tokens(&[3, 4], 10);
    let begun = SequenceRequest { generated_token_ids: expected[..4].to_vec(), ..request(&[3, 4], 10) };
    assert_eq!(collect(replicas.submit(begun)).await.0, expected[4..]);
}

#[tokio::test]
async fn a_sequence_that_cannot_be_computed_fails_alone() {
    let server = Setup::of(Script { broken_first_token: Some(9), ..Script::default() }).start().await;
    let replicas = route(&[&server], PATIENCE).await;
    let broken = replicas.submit(SequenceRequest { sampling: greedy(), ..request(&[9, 1], 10) });
    let good = streams_are_complete(&replicas, prompts(4), 10);
    let (events, ()) = tokio::join!(broken.collect::<Vec<_>>(), good);
    assert!(matches!(events.last(), Some(SequenceEvent::Failed(_))), "{events:?}");
}
