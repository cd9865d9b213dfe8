//! LoRA adapters of servers behind a router: a sequence goes only to servers that have the files of its adapter.

use std::path::Path;

use futures::StreamExt;
use penstock_router::config::AdapterSource;
use penstock_router::generator::Generator;
use penstock_router::replica::Replicas;
use penstock_router::sequence::{AdapterHash, SequenceEvent, SequenceFailure, SequenceRequest};

use crate::fake_worker::Script;
use crate::fake_worker::expected_tokens;
use crate::fake_worker::setting::{FINISHED, PATIENCE, collect, request, wait_until};
use crate::server::{Server, Setup, route};

fn adapter(root: &Path, name: &str, weights: &str) -> AdapterSource {
    let path = root.join(weights);
    std::fs::create_dir_all(&path).unwrap();
    std::fs::write(path.join("adapter_config.json"), "{}").unwrap();
    std::fs::write(path.join("adapter_model.safetensors"), weights).unwrap();
    AdapterSource { name: name.to_owned(), path }
}

async fn start(script: Script, adapters: Vec<AdapterSource>) -> Server {
    Setup { adapters, ..Setup::of(script) }.start().await
}

async fn known(replicas: &Replicas, names: &[&str]) {
    wait_until(|| replicas.adapter_names().iter().map(|name| &**name).eq(names.iter().copied())).await;
}

/// The hash of the adapter `law`, as this server has it.
async fn law_of(server: &Server) -> AdapterHash {
    let alone = route(&[server], PATIENCE).await;
    known(&alone, &["law"]).await;
    alone.adapter_hash("law").unwrap()
}

fn adapted(prompt: &[u32], adapter: AdapterHash) -> SequenceRequest {
    SequenceRequest { adapter_hash: Some(adapter), ..request(prompt, 20) }
}

/// The folders that the server's workers were told to load.
async fn loaded(server: &Server) -> Vec<String> {
    let worker = server.fleet.started(1).await;
    worker.ranks[0].look(|seen| {
        seen.adapters
            .iter()
            .filter_map(|load| Some(load.adapter.as_ref()?.path.rsplit('/').next()?.to_owned()))
            .collect()
    })
}

#[tokio::test]
async fn a_sequence_goes_only_to_servers_with_the_files_of_its_adapter() {
    let root = tempfile::tempdir().unwrap();
    let of = |name, weights| adapter(root.path(), name, weights);
    let first = start(Script::default(), vec![of("law", "old"), of("sql", "sql")]).await;
    let second = start(Script::default(), vec![of("law", "new")]).await;
    let replicas = route(&[&first, &second], PATIENCE).await;
    wait_until(|| replicas.stats().num_blocks == 2 * 256).await;
    known(&replicas, &["law", "sql"]).await;
    let (law, sql) = (replicas.adapter_hash("law").unwrap(), replicas.adapter_hash("sql").unwrap());
    assert_eq!(replicas.adapter_hash("poet"), None);
    for number in 1..10 {
        for hash in [law, sql] {
            let prompt = [number, 7];
            assert_eq!(
                collect(replicas.submit(adapted(&prompt, hash))).await,
                (expected_tokens(&prompt, 20), FINISHED)
            );
        }
    }
    assert!(loaded(&first).await.starts_with(&["old".to_owned(), "sql".to_owned()]));
    assert_eq!((loaded(&second).await.len(), second.num_plans().await), (0, 0));
}

#[tokio::test]
async fn a_sequence_of_a_lost_server_continues_where_the_same_files_are_and_never_with_others() {
    let root = tempfile::tempdir().unwrap();
    let of = |weights| vec![adapter(root.path(), "law", weights)];
    let (_gate, script) = Script::gated(5);
    let mut lost = start(script, of("same")).await;
    let other = start(Script::default(), of("other")).await;
    let replicas = route(&[&lost, &other], PATIENCE).await;
    let law = law_of(&lost).await;
    wait_until(|| replicas.adapter_hash("law") == Some(law)).await;
    let mut stream = replicas.submit(adapted(&[3, 4], law));
    lost.wait_for_plans(6).await;
    lost.kill();
    wait_until(|| replicas.stats().num_blocks == 256).await;
    let started = stream.next().await.unwrap();
    assert!(matches!(started, SequenceEvent::Started { .. }));
    // New requests get the adapter of the server that is left.
    let rest = law_of(&other).await;
    wait_until(|| replicas.adapter_hash("law") == Some(rest)).await;
    assert_ne!(rest, law);
    let (tokens, end) = collect(replicas.submit(adapted(&[5], rest))).await;
    assert_eq!((tokens, end), (expected_tokens(&[5], 20), FINISHED));
    let _again = Setup { address: lost.address, adapters: of("same"), ..Setup::default() }.start().await;
    let mut tokens = Vec::new();
    while let Some(SequenceEvent::Token(token)) = stream.next().await {
        tokens.push(token.id);
    }
    assert_eq!(tokens, expected_tokens(&[3, 4], 20));
    assert_eq!(loaded(&other).await, ["other"]);
}

#[tokio::test]
async fn a_sequence_whose_server_returns_with_other_files_fails() {
    let root = tempfile::tempdir().unwrap();
    let of = |weights| vec![adapter(root.path(), "law", weights)];
    let (_gate, script) = Script::gated(5);
    let mut lost = start(script, of("old")).await;
    let replicas = route(&[&lost], PATIENCE).await;
    known(&replicas, &["law"]).await;
    let stream = replicas.submit(adapted(&[3, 4], law_of(&lost).await));
    lost.wait_for_plans(6).await;
    lost.kill();
    let again = Setup { address: lost.address, adapters: of("new"), ..Setup::default() }.start().await;
    let (_, end) = collect(stream).await;
    let SequenceEvent::Failed(SequenceFailure::Sequence(reason)) = end else { panic!("{end:?}") };
    assert_eq!(reason, "the server does not have the adapter any more");
    assert_eq!(again.num_plans().await, 0);
}
