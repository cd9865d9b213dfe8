//! The engine with scripted workers over real sockets: what every sequence's stream promises.
#![allow(clippy::unwrap_used, unreachable_pub)]

#[allow(dead_code, reason = "shared with tests/recovery.rs")]
mod fake_worker;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use fake_worker::fleet::Fleet;
use fake_worker::setting::{FINISHED, PATIENCE, collect, limits, request, streams_are_complete, worker_failure};
use fake_worker::{FakeGroup, Garble, Hang, Script, expected_tokens};
use futures::StreamExt;
use futures::future::BoxFuture;
use penstock_router::engine::{Engine, EngineOptions, RestartError, RestartGroup, Restarted};
use penstock_router::generator::{Generator, Health};
use penstock_router::sequence::{
    FinishReason, Image, ImageSpan, Sampling, SequenceEvent, SequenceFailure, SequenceRequest, greedy,
};
use penstock_router::worker::{Endpoint, Group, LoadOptions, PROTOCOL_VERSION, Phase, WarmUpOptions, WorkerError};
use penstock_scheduler::Limits;
use tokio::runtime::Builder;
use tokio::sync::watch;
use tokio::time::timeout;

/// No restarts: the first group loss fails the engine.
fn options(limits: Limits) -> EngineOptions {
    EngineOptions { limits, step_deadline: PATIENCE, max_failures: 1 }
}

async fn connect(group: &FakeGroup) -> Group {
    Group::connect(&group.endpoints(), PATIENCE).await.unwrap()
}

async fn engine(group: &FakeGroup) -> Engine {
    engine_with(group, options(limits())).await
}

async fn engine_with(group: &FakeGroup, options: EngineOptions) -> Engine {
    Engine::start(connect(group).await, options, Arc::new(Fleet::new([])), None)
}

#[tokio::test]
async fn concurrent_sequences_get_their_own_tokens_and_one_terminal_event() {
    let group = FakeGroup::start(vec![Script::default()]);
    let engine = engine(&group).await;
    streams_are_complete(&engine, (1..40).map(|first| (first..first + 3 * first).collect()).collect(), 25).await;
    assert!(engine.health().is_healthy());
}

#[tokio::test]
async fn the_first_event_says_that_the_sequence_left_the_queue() {
    let group = FakeGroup::start(vec![Script::default()]);
    let mut stream = engine(&group).await.submit(request(&[5, 6], 2));
    assert_eq!(stream.next().await, Some(SequenceEvent::Started { num_cached_tokens: 0 }));
    let Some(SequenceEvent::Token(token)) = stream.next().await else { panic!("no token after the start") };
    assert_eq!((token.id, token.logprob), (expected_tokens(&[5, 6], 1)[0], -0.5));
}

#[tokio::test]
async fn a_stop_token_ends_the_sequence_and_is_reported() {
    let group = FakeGroup::start(vec![Script::default()]);
    let tokens = expected_tokens(&[7, 7], 10);
    let stop_token_ids = [tokens[4]].into();
    let stream = engine(&group)
        .await
        .submit(SequenceRequest { sampling: Sampling { stop_token_ids, ..greedy() }, ..request(&[7, 7], 100) });
    assert_eq!(collect(stream).await, (tokens[..5].to_vec(), SequenceEvent::Finished(FinishReason::StopToken)));
}

#[tokio::test]
async fn dropping_a_stream_frees_its_sequence_and_no_other() {
    let (open_gate, script) = Script::gated(3);
    let group = FakeGroup::start(vec![script]);
    let engine = engine(&group).await;
    let dropped = engine.submit(request(&[1, 2, 3], 400));
    let kept = engine.submit(request(&[4, 5, 6], 20));
    group.ranks[0].wait_until(|seen| seen.sequences.len() == 2).await;
    drop(dropped);
    open_gate.send(u64::MAX).unwrap();
    assert_eq!(collect(kept).await.0, expected_tokens(&[4, 5, 6], 20));
    group.ranks[0].wait_until(|seen| seen.sequences.is_empty()).await;
    // The next sequence finds every block free again.
    collect(engine.submit(request(&[8], 1))).await;
    assert_eq!(engine.stats().num_running, 0);
}

#[tokio::test]
async fn a_broken_sequence_fails_alone_with_the_workers_words() {
    let group = FakeGroup::start(vec![Script { broken_first_token: Some(13), ..Script::default() }]);
    let engine = engine(&group).await;
    let (broken, healthy) = (engine.submit(request(&[13, 1], 50)), engine.submit(request(&[14, 1], 50)));
    let (tokens, terminal) = collect(broken).await;
    assert_eq!(tokens, expected_tokens(&[13, 1], 1));
    assert_eq!(terminal, SequenceEvent::Failed(SequenceFailure::Sequence("not a number".to_owned())));
    assert_eq!(collect(healthy).await.0, expected_tokens(&[14, 1], 50));
    assert!(engine.health().is_healthy());
}

#[tokio::test]
async fn a_failure_that_is_the_requests_fault_is_reported_as_such() {
    let broken_fault = penstock_proto::Fault::Request;
    let script = Script { broken_first_token: Some(13), broken_fault, ..Script::default() };
    let group = FakeGroup::start(vec![script]);
    let (_, terminal) = collect(engine(&group).await.submit(request(&[13, 1], 50))).await;
    assert_eq!(terminal, SequenceEvent::Failed(SequenceFailure::Request("not a number".to_owned())));
}

#[tokio::test]
async fn a_complete_grammar_without_a_stop_token_ends_its_sequence_without_an_error() {
    let broken_fault = penstock_proto::Fault::None;
    let script = Script { broken_first_token: Some(13), broken_fault, ..Script::default() };
    let group = FakeGroup::start(vec![script]);
    let ended = collect(engine(&group).await.submit(request(&[13, 1], 50))).await;
    assert_eq!(ended, (expected_tokens(&[13, 1], 1), SequenceEvent::Finished(FinishReason::StopToken)));
}

#[tokio::test]
async fn two_ranks_get_the_same_plans_and_give_the_same_tokens() {
    let group = FakeGroup::start(vec![Script::default(), Script::default()]);
    let engine = engine(&group).await;
    assert_eq!(collect(engine.submit(request(&[1, 2], 30))).await.0, expected_tokens(&[1, 2], 30));
    let plans = group.ranks.iter().map(|rank| rank.look(|seen| seen.plans.clone())).collect::<Vec<_>>();
    // The last plan, which only frees, may not have reached both ranks.
    let both = plans[0].len().min(plans[1].len());
    assert!(both >= 30);
    assert_eq!(plans[0][..both], plans[1][..both]);
}

#[tokio::test]
async fn a_result_waits_for_the_slowest_rank() {
    let (open_gate, slow) = Script::gated(1);
    let group = FakeGroup::start(vec![Script::default(), slow]);
    let engine = engine(&group).await;
    let mut stream = engine.submit(request(&[9], 3));
    assert_eq!(stream.next().await, Some(SequenceEvent::Started { num_cached_tokens: 0 }));
    assert!(matches!(stream.next().await, Some(SequenceEvent::Token(_))));
    // Rank 0 has finished step 2 and rank 1 has not: no token may arrive.
    group.ranks[0].wait_until(|seen| seen.plans.len() >= 2).await;
    assert!(futures::poll!(stream.next()).is_pending());
    open_gate.send(u64::MAX).unwrap();
    assert_eq!(collect(stream).await.0.len(), 2);
}

#[tokio::test]
async fn the_depth_of_run_ahead_does_not_change_tokens() {
    for max_steps_in_flight in [1, 2] {
        let group = FakeGroup::start(vec![Script::default()]);
        let engine = engine_with(&group, options(Limits { max_steps_in_flight, ..limits() })).await;
        streams_are_complete(&engine, (1..20).map(|length| (0..length * 7).collect()).collect(), 17).await;
        assert!(group.ranks[0].look(|seen| seen.max_in_flight) <= max_steps_in_flight as usize);
    }
}

#[tokio::test]
async fn sequences_wait_until_the_workers_have_room_for_their_images() {
    let group = FakeGroup::start(vec![Script::default()]);
    let engine = engine(&group).await;
    let with_image = |name: &str, num_bytes| {
        let image = Image::new(name.as_bytes().to_vec());
        let images = [ImageSpan { image, offset: 0, num_tokens: 1, is_whole: false, num_bytes }].into();
        engine.submit(SequenceRequest { images, ..request(&[9, 5], 20) })
    };
    // The room of the limits is 100 bytes.
    let streams: Vec<_> = ["one", "two", "one", "three"].map(|name| with_image(name, 60)).into();
    let too_large = collect(with_image("large", 101)).await.1;
    let SequenceEvent::Failed(SequenceFailure::Request(reason)) = too_large else { panic!("{too_large:?}") };
    assert!(reason.contains("take 101 bytes") && reason.contains("at most 100 are allowed"), "{reason}");
    for (tokens, terminal) in futures::future::join_all(streams.into_iter().map(collect)).await {
        assert_eq!((tokens, terminal), (expected_tokens(&[9, 5], 20), FINISHED));
    }
    group.ranks[0].look(|seen| {
        let mut held = HashMap::new();
        for plan in &seen.plans {
            plan.freed_sequence_ids.iter().for_each(|id| drop(held.remove(id)));
            held.extend(plan.new_sequences.iter().map(|new| (new.sequence_id, new.images[0].hash.clone())));
            assert!(held.values().collect::<HashSet<_>>().len() <= 1, "{held:?}");
        }
    });
}

#[tokio::test]
async fn plans_run_ahead_of_results() {
    let (open_gate, script) = Script::gated(0);
    let group = FakeGroup::start(vec![script]);
    let stream = engine(&group).await.submit(request(&[1, 2, 3], 10));
    // No result can arrive before the gate opens.
    group.ranks[0].wait_until(|seen| seen.plans.len() == 2).await;
    open_gate.send(u64::MAX).unwrap();
    assert_eq!(collect(stream).await.0, expected_tokens(&[1, 2, 3], 10));
}

#[tokio::test]
async fn a_worker_that_dies_fails_open_and_later_sequences_once() {
    let (_keep_shut, script) = Script::gated(5);
    let group = FakeGroup::start(vec![Script::default(), script]);
    let engine = engine(&group).await;
    let streams: Vec<_> = (1..30).map(|first| engine.submit(request(&[first], 100))).collect();
    group.ranks[1].wait_until(|seen| seen.plans.len() > 5).await;
    group.ranks[1].kill();
    for (_, terminal) in futures::future::join_all(streams.into_iter().map(collect)).await {
        let reason = worker_failure(terminal);
        assert!(reason.contains("rank 1"), "{reason}");
    }
    assert_eq!(engine.health(), Health::Failed(engine.failure().await));
    worker_failure(collect(engine.submit(request(&[1], 1))).await.1);
}

#[tokio::test]
async fn a_worker_that_dies_while_idle_is_noticed() {
    let group = FakeGroup::start(vec![Script::default()]);
    let engine = engine(&group).await;
    collect(engine.submit(request(&[1], 1))).await;
    group.ranks[0].kill();
    engine.failure().await;
    assert!(!engine.health().is_healthy());
}

#[tokio::test]
async fn a_step_that_fails_reports_the_workers_words() {
    let failure = Some((2, "out of memory in layer 3".to_owned()));
    let group = FakeGroup::start(vec![Script { failure_at_step: failure, ..Script::default() }]);
    let (_, terminal) = collect(engine(&group).await.submit(request(&[1], 10))).await;
    assert_eq!(worker_failure(terminal), "out of memory in layer 3");
}

#[tokio::test]
async fn a_garbled_result_fails_the_group() {
    let group = FakeGroup::start(vec![Script { garbled_step: Some((2, Garble::Step)), ..Script::default() }]);
    let (_, terminal) = collect(engine(&group).await.submit(request(&[1], 10))).await;
    assert!(worker_failure(terminal).contains("a result for step 9, expected step 2"));
}

#[tokio::test]
async fn a_logprob_that_is_not_a_number_fails_its_sequence_alone() {
    let group = FakeGroup::start(vec![Script { nan_first_token: Some(13), ..Script::default() }]);
    let engine = engine(&group).await;
    let neighbour = collect(engine.submit(request(&[1], 10)));
    let (broken, neighbour) = tokio::join!(collect(engine.submit(request(&[13], 10))), neighbour);
    let SequenceEvent::Failed(SequenceFailure::Sequence(reason)) = broken.1 else { panic!("{:?}", broken.1) };
    assert!(reason.contains("a logprob that is not a number"), "{reason}");
    assert_eq!(neighbour, (expected_tokens(&[1], 10), FINISHED));
    assert!(engine.health().is_healthy());
}

#[tokio::test]
async fn a_worker_that_hangs_is_lost_after_the_step_deadline() {
    let group = FakeGroup::start(vec![Script { hang_at_step: Some((2, Hang::Step)), ..Script::default() }]);
    let options = EngineOptions { step_deadline: Duration::from_secs(2), ..options(limits()) };
    let engine = engine_with(&group, options).await;
    let (_, terminal) = collect(engine.submit(request(&[1], 10))).await;
    let reason = worker_failure(terminal);
    assert!(reason.starts_with("a step was not finished after "), "{reason}");
    assert!(reason.ends_with(", and no rank computes"), "{reason}");
}

#[test]
fn steps_continue_while_every_thread_of_the_runtime_is_blocked() {
    // Real workers are processes of their own, so the fake one has a runtime of its own.
    let workers = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let group = {
        let _context = workers.enter();
        FakeGroup::start(vec![Script::default()])
    };
    Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
        let engine = engine(&group).await;
        let stream = engine.submit(request(&[1, 2, 3], 50));
        // Blocks the only thread of this runtime until the last step was planned.
        let last_step = async { timeout(PATIENCE, group.ranks[0].wait_until(|seen| seen.plans.len() >= 50)).await };
        let waited = std::thread::scope(|scope| scope.spawn(|| workers.block_on(last_step)).join());
        waited.unwrap().expect("steps need no thread of the blocked runtime");
        assert_eq!(collect(stream).await.0, expected_tokens(&[1, 2, 3], 50));
    });
}

/// Breaks the engine's thread.
struct PanickingRestart;

impl RestartGroup for PanickingRestart {
    fn restart(&self) -> BoxFuture<'static, Result<Restarted, RestartError>> {
        panic!("a defect in the engine's thread")
    }
}

#[tokio::test]
async fn a_panic_of_the_engines_thread_fails_open_and_later_sequences() {
    let (_keep_shut, script) = Script::gated(2);
    let group = FakeGroup::start(vec![script]);
    let options = EngineOptions { max_failures: 2, ..options(limits()) };
    let engine = Engine::start(connect(&group).await, options, Arc::new(PanickingRestart), None);
    let stream = engine.submit(request(&[1], 10));
    group.ranks[0].wait_until(|seen| !seen.sequences.is_empty()).await;
    group.ranks[0].kill();
    assert_eq!(worker_failure(collect(stream).await.1), "the engine ended unexpectedly");
    assert_eq!(engine.failure().await, "the engine ended unexpectedly");
    // The thread may still be ending, so the reason may be either.
    assert!(matches!(collect(engine.submit(request(&[1], 1))).await.1, SequenceEvent::Failed(_)));
}

#[tokio::test]
async fn shutting_down_ends_open_and_later_sequences() {
    let (_keep_shut, script) = Script::gated(2);
    let group = FakeGroup::start(vec![script]);
    let engine = engine(&group).await;
    let stream = engine.submit(request(&[1], 10));
    group.ranks[0].wait_until(|seen| !seen.sequences.is_empty()).await;
    engine.shut_down().await;
    let over = SequenceEvent::Failed(SequenceFailure::ShuttingDown);
    assert_eq!(collect(stream).await.1, over);
    assert_eq!(collect(engine.submit(request(&[1], 10))).await, (vec![], over));
    assert!(!engine.health().is_healthy());
    engine.shut_down().await;
}

fn load_options() -> LoadOptions {
    LoadOptions {
        model_folder: "/model".into(),
        dtype: None,
        kv_cache_dtype: Some("fp8_e5m2".to_owned()),
        block_tokens: None,
        rendezvous: "file:///meet".to_owned(),
        token: "token".to_owned(),
        trust_remote_code: false,
        deterministic: true,
        num_threads: Some(2),
        watermark_gamma: Some(0.25),
        watermark_delta: None,
        attention: Some("triton".to_owned()),
        cpu_isa: Some("avx2".to_owned()),
        dequantize: false,
        quantize: None,
        activation_bits: Some(16),
        background: true,
        max_adapters: 4,
        max_adapter_rank: 16,
        speculative_model: Some("/heads".into()),
        drafts_with_mtp: true,
        recent_answer_tokens: 1000,
        num_stages: 1,
    }
}

#[tokio::test]
async fn loading_and_warming_up_reach_every_rank_and_add_up_their_sizes() {
    let script = Script { num_blocks: 77, ..Script::default() };
    let group = FakeGroup::start(vec![script.clone(), script]);
    let mut connected = connect(&group).await;
    let description = connected.load(&load_options()).await.unwrap();
    assert_eq!((description.weight_bytes, description.kv_bytes_per_block), (2000, 32));
    assert_eq!(description.block_tokens, 16, "the worker's choice");
    assert_eq!((description.max_total_tokens(), description.max_new_tokens()), (4096, None));
    assert_eq!(description.pipeline_tag(), None);
    assert_eq!(description.phases, [Phase { name: "read weights".to_owned(), duration: Duration::from_millis(500) }]);
    let options = WarmUpOptions {
        max_step_tokens: 64,
        max_step_sequences: 8,
        max_sequence_tokens: None,
        num_blocks: Some(77),
        memory_fraction: 0.9,
        proven: false,
        graph_sizes: Vec::new(),
        reserves_standby: false,
        num_memory_slots: 0,
        num_disk_slots: 0,
        offload_folder: None,
        num_groups: 3,
        num_state_slots: None,
        num_snapshots: None,
    };
    assert_eq!(connected.warm_up(&options).await.unwrap().num_blocks, 77);
    for rank in &group.ranks {
        rank.look(|seen| {
            assert_eq!((seen.loads[0].block_tokens, &*seen.loads[0].rendezvous), (0, "file:///meet"));
            assert_eq!((&*seen.loads[0].dtype, &*seen.loads[0].kv_cache_dtype), ("", "fp8_e5m2"));
            assert_eq!((seen.loads[0].watermark_gamma, seen.loads[0].watermark_delta), (0.25, 0.0));
            assert_eq!((&*seen.loads[0].attention, seen.loads[0].deterministic), ("triton", true));
            assert_eq!(seen.loads[0].recent_answer_tokens, 1000);
            assert_eq!((seen.warm_ups[0].num_blocks, seen.warm_ups[0].num_groups), (77, 3));
        });
    }
    assert!(connected.probe().progress(PATIENCE).await.iter().all(Option::is_some));
}

#[tokio::test]
async fn a_worker_of_another_version_is_refused_naming_both() {
    let group = FakeGroup::start(vec![Script { protocol_version: Some(99), ..Script::default() }]);
    let mut connected = connect(&group).await;
    let error = connected.load(&load_options()).await.unwrap_err();
    assert_eq!(error, WorkerError::Version { rank: 0, theirs: 99, ours: PROTOCOL_VERSION });
    let told =
        format!("rank 0 speaks version 99 of the worker protocol, this router speaks version {PROTOCOL_VERSION}");
    assert!(error.to_string().starts_with(&told), "{error}");
}

#[tokio::test]
async fn a_refused_load_reports_the_workers_words() {
    let message = "the model has 3 KV groups and cannot be split over 5 ranks";
    let group = FakeGroup::start(vec![Script { load_failure: Some(message.to_owned()), ..Script::default() }]);
    let mut connected = connect(&group).await;
    assert_eq!(connected.load(&load_options()).await.unwrap_err().to_string(), message);
}

#[tokio::test]
async fn an_encoder_decoder_reports_its_decoder_prefix_and_its_limits() {
    let of = |decoder_prefix: &[u32]| Script { decoder_prefix: decoder_prefix.to_vec(), ..Script::default() };
    let group = FakeGroup::start(vec![of(&[2, 0]), of(&[2, 0])]);
    let mut connected = connect(&group).await;
    let description = connected.load(&load_options()).await.unwrap();
    assert_eq!((&*description.decoder_prefix, description.max_source_tokens), (&[2, 0][..], 3000));
    assert_eq!((description.max_total_tokens(), description.max_new_tokens()), (4094, Some(1094)));
    assert_eq!(description.pipeline_tag(), Some("text2text-generation"));

    let group = FakeGroup::start(vec![of(&[2]), of(&[0])]);
    let mut connected = connect(&group).await;
    let error = connected.load(&load_options()).await.unwrap_err();
    assert_eq!(error.to_string(), "the ranks do not agree on the decoder's prefix: [[2], [0]]");
}

#[tokio::test]
async fn ranks_that_disagree_are_refused() {
    let scripts = [10, 11].map(|num_blocks| Script { num_blocks, ..Script::default() });
    let group = FakeGroup::start(scripts.to_vec());
    let mut connected = connect(&group).await;
    let options = WarmUpOptions {
        max_step_tokens: 1,
        max_step_sequences: 1,
        max_sequence_tokens: None,
        num_blocks: None,
        memory_fraction: 1.0,
        proven: false,
        graph_sizes: Vec::new(),
        reserves_standby: false,
        num_memory_slots: 0,
        num_disk_slots: 0,
        offload_folder: None,
        num_groups: 3,
        num_state_slots: None,
        num_snapshots: None,
    };
    let error = connected.warm_up(&options).await.unwrap_err();
    assert_eq!(error.to_string(), "the ranks do not agree on the number of KV blocks: [10, 11]");
}

#[tokio::test(start_paused = true)]
async fn a_socket_that_never_appears_is_given_up() {
    let error =
        Group::connect(&[Endpoint::Unix("/nonexistent/rank-0".into())], Duration::from_secs(5)).await.unwrap_err();
    assert!(matches!(error, WorkerError::Unreachable { rank: 0, .. }) && error.is_loss(), "{error}");
}

/// Long enough for a health check to happen before half of it is over.
const NOTICEABLE: Duration = Duration::from_secs(8);

async fn until(engine: &Engine, is_so: impl Fn(&Health) -> bool) {
    while !is_so(&engine.health()) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_worker_is_healthy_until_half_of_its_step_deadline_is_over() {
    let (open_gate, script) = Script::gated(0);
    let group = FakeGroup::start(vec![script]);
    let options = EngineOptions { step_deadline: NOTICEABLE, ..options(limits()) };
    let engine = engine_with(&group, options).await;
    let stream = engine.submit(request(&[1, 2, 3], 10));
    group.ranks[0].wait_until(|seen| !seen.plans.is_empty()).await;
    assert_eq!(engine.health(), Health::Healthy);
    until(&engine, |health| matches!(health, Health::Stalled { step } if *step >= NOTICEABLE / 2)).await;
    open_gate.send(u64::MAX).unwrap();
    assert_eq!(collect(stream).await.0, expected_tokens(&[1, 2, 3], 10));
    until(&engine, Health::is_healthy).await;
}

#[tokio::test]
async fn a_worker_that_does_not_answer_is_noticed_even_while_idle() {
    let silence = watch::Sender::new(false);
    let silent = Script { silence: Some(silence.subscribe()), ..Script::default() };
    let group = FakeGroup::start(vec![Script::default(), silent]);
    let options = EngineOptions { step_deadline: NOTICEABLE, ..options(limits()) };
    let engine = engine_with(&group, options).await;
    collect(engine.submit(request(&[1], 1))).await;
    assert_eq!(engine.health(), Health::Healthy);
    silence.send_replace(true);
    until(&engine, |health| *health == Health::Unresponsive { rank: 1 }).await;
    silence.send_replace(false);
    until(&engine, Health::is_healthy).await;
}
