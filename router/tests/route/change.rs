//! Servers join and leave a router while streams run.

use penstock_router::generator::{Generator, Health, ReplicaReport};
use penstock_router::replica::Replicas;
use penstock_router::sequence::Grammar;

use crate::fake_worker::Script;
use crate::fake_worker::setting::{PATIENCE, wait_until};
use crate::fake_worker::setting::{collect, request, streams_are_complete};
use crate::server::{Server, Setup, prompts, remotes, route, streams};

fn set_servers(replicas: &Replicas, servers: &[&Server]) {
    let urls: Vec<_> = servers.iter().map(|server| server.url()).collect();
    assert!(replicas.set_servers(&remotes(&urls, PATIENCE)).is_empty());
}

/// URLs on which nothing listens.
fn unreachable_urls(num: usize) -> Vec<String> {
    let listeners: Vec<_> = (0..num).map(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    listeners.iter().map(|listener| format!("http://{}", listener.local_addr().unwrap())).collect()
}

fn report(replicas: &Replicas, number: usize) -> ReplicaReport {
    replicas.replicas()[number]
}

#[tokio::test]
async fn a_server_that_joins_gets_sequences_and_one_that_leaves_gives_its_own_away() {
    let (_gate, script) = Script::gated(5);
    let (leaving, joining) = (Setup::of(script).start().await, Setup::default().start().await);
    let replicas = route(&[&leaving], PATIENCE).await;
    let running = streams(&replicas);
    leaving.wait_for_plans(6).await;
    set_servers(&replicas, &[&leaving, &joining]);
    wait_until(|| replicas.stats().num_blocks == 2 * 256).await;
    set_servers(&replicas, &[&joining]);
    running.await.unwrap();
    wait_until(|| report(&replicas, 0).is_healthy.is_none()).await;
    assert_eq!(report(&replicas, 0).routed.num_handovers, 12);
    let num_sequences = leaving.num_sequences().await;
    streams_are_complete(&replicas, prompts(4), 5).await;
    assert_eq!(leaving.num_sequences().await, num_sequences, "it gets no new sequence");
    assert_eq!(replicas.stats().num_blocks, 256);
}

#[tokio::test]
async fn the_last_server_that_takes_steps_finishes_its_sequences_while_it_leaves() {
    let (gate, script) = Script::gated(5);
    let leaving = Setup::of(script).start().await;
    let mut unreachable = Setup::default().start().await;
    unreachable.kill();
    let replicas = route(&[&leaving], PATIENCE).await;
    let running = streams(&replicas);
    leaving.wait_for_plans(6).await;
    set_servers(&replicas, &[&unreachable]);
    gate.send_replace(u64::MAX);
    running.await.unwrap();
    wait_until(|| report(&replicas, 0).is_healthy.is_none()).await;
}

#[tokio::test]
async fn sequences_that_arrive_just_before_the_last_server_leaves_finish_there() {
    let leaving = Setup::default().start().await;
    let replicas = route(&[&leaving], PATIENCE).await;
    // Nothing is awaited between the two, so the engine takes both at once.
    let streams: Vec<_> = (1..9).map(|first| replicas.submit(request(&[first], 5))).collect();
    assert!(replicas.set_servers(&remotes(&unreachable_urls(1), PATIENCE)).is_empty());
    for stream in streams {
        let (tokens, _) = tokio::time::timeout(PATIENCE, collect(stream)).await.unwrap();
        assert_eq!(tokens.len(), 5);
    }
}

#[tokio::test]
async fn a_leaving_server_that_is_lost_and_returns_finishes_its_sequences() {
    let (_gate, script) = Script::gated(5);
    let mut leaving = Setup::of(script).start().await;
    let replicas = route(&[&leaving], PATIENCE).await;
    let running = streams(&replicas);
    leaving.wait_for_plans(6).await;
    assert!(replicas.set_servers(&remotes(&unreachable_urls(1), PATIENCE)).is_empty());
    leaving.kill();
    wait_until(|| matches!(replicas.health(), Health::Unreachable(_)) && replicas.stats().num_blocks == 0).await;
    let _again = Setup { address: leaving.address, ..Setup::default() }.start().await;
    running.await.unwrap();
    wait_until(|| report(&replicas, 0).is_healthy.is_none()).await;
}

#[tokio::test]
async fn sequences_of_a_leaving_server_wait_for_one_that_is_only_starting() {
    let (_gate, script) = Script::gated(5);
    let leaving = Setup::of(script).start().await;
    let mut starting = Setup::default().start().await;
    starting.kill();
    let replicas = route(&[&leaving], PATIENCE).await;
    let running = streams(&replicas);
    leaving.wait_for_plans(6).await;
    set_servers(&replicas, &[&starting]);
    let _started = Setup { address: starting.address, ..Setup::default() }.start().await;
    running.await.unwrap();
    wait_until(|| report(&replicas, 0).is_healthy.is_none()).await;
}

#[tokio::test]
async fn a_number_is_used_again_and_a_server_can_return() {
    let servers = [Setup::default().start().await, Setup::default().start().await];
    let replicas = route(&[&servers[0]], PATIENCE).await;
    for round in 0..10 {
        let (next, before) = (&servers[(round + 1) % 2], &servers[round % 2]);
        let running = streams(&replicas);
        set_servers(&replicas, &[before, next]);
        set_servers(&replicas, &[next]);
        running.await.unwrap();
        collect(replicas.submit(request(&[1, 2], 3))).await;
        let num_left = || replicas.replicas().iter().filter(|report| report.is_healthy.is_some()).count();
        wait_until(|| num_left() == 1).await;
    }
    assert!(replicas.replicas().len() <= 3);
}

#[tokio::test]
async fn servers_beyond_the_most_that_there_can_be_are_named_and_an_empty_list_changes_nothing() {
    let server = Setup::default().start().await;
    let replicas = route(&[&server], PATIENCE).await;
    let others = unreachable_urls(Replicas::MAX_ENGINES);
    let urls: Vec<_> = std::iter::once(server.url()).chain(others.iter().cloned()).collect();
    let refused = replicas.set_servers(&remotes(&urls, PATIENCE));
    assert_eq!(refused, others[Replicas::MAX_ENGINES - 1..]);
    replicas.set_servers(&[]);
    streams_are_complete(&replicas, prompts(4), 5).await;
}

#[tokio::test]
async fn every_number_can_go_to_another_server_in_one_change() {
    let (leaving, joining) = (Setup::default().start().await, Setup::default().start().await);
    let others = unreachable_urls(2 * (Replicas::MAX_ENGINES - 1));
    let (before, after) = others.split_at(Replicas::MAX_ENGINES - 1);
    let with = |server: &Server, others: &[String]| [&[server.url()], others].concat();
    let replicas = route(&[&leaving], PATIENCE).await;
    assert!(replicas.set_servers(&remotes(&with(&leaving, before), PATIENCE)).is_empty());
    let running = streams(&replicas);
    let urls = with(&joining, after);
    assert_eq!(replicas.set_servers(&remotes(&urls, PATIENCE)), urls, "no number is free yet");
    streams_are_complete(&replicas, prompts(4), 5).await;
    replicas.compile_grammar(&Grammar::Regex("[a-z]+".to_owned())).await.unwrap();
    wait_until(|| replicas.set_servers(&remotes(&urls, PATIENCE)).is_empty()).await;
    running.await.unwrap();
    assert!(futures::poll!(Box::pin(replicas.failure())).is_pending());
    wait_until(|| replicas.health().is_healthy()).await;
    let num_sequences = leaving.num_sequences().await;
    streams_are_complete(&replicas, prompts(4), 5).await;
    assert_eq!(leaving.num_sequences().await, num_sequences, "it gets no new sequence");
}
