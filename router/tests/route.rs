//! Engines on other servers as one: real gRPC on loopback, with fake workers behind the servers. The loss of a server costs no token.
#![allow(clippy::unwrap_used, unreachable_pub)]

#[allow(dead_code, reason = "shared with tests/engine.rs")]
mod fake_worker;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fake_worker::fleet::Fleet;
use fake_worker::setting::{FINISHED, collect, limits, request, streams_are_complete};
use fake_worker::{Script, expected_tokens};
use futures::future::{BoxFuture, ready};
use futures::{FutureExt, StreamExt};
use penstock_router::engine::{EngineOptions, Generator, Health, RemoteOptions, RestartGroup, SequenceStream};
use penstock_router::remote::{
    self, Access, EngineListener, Identity, Properties, Remote, RemoteError, RequestLimits, ServerDescription,
};
use penstock_router::replica::Replicas;
use penstock_router::sequence::{
    Adapter, AdapterError, Grammar, GrammarError, Image, ImageError, SequenceEvent, SequenceFailure, SequenceRequest,
    Token, greedy,
};
use penstock_router::worker::{Description, Group, LoadOptions};
use penstock_scheduler::{Limits, Stats};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(30);
const SECRET: &str = "0123456789abcdef";

fn access() -> Access {
    Access { secret: SECRET.to_owned(), ..Access::default() }
}

fn properties(weights: &str) -> Properties {
    Properties(vec![("weights".to_owned(), weights.to_owned())])
}

/// A server without HTTP. It has threads of its own, so that it can be killed.
struct Server {
    runtime: Option<Runtime>,
    address: SocketAddr,
    fleet: Fleet,
    shutdown: CancellationToken,
}

/// What a server is started with.
struct Setup {
    address: SocketAddr,
    scripts: Vec<Vec<Script>>,
    access: Access,
    weights: &'static str,
    max_input_tokens: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            address: ([127, 0, 0, 1], 0).into(),
            scripts: vec![vec![Script::default()]],
            access: access(),
            weights: "same",
            max_input_tokens: 511,
        }
    }
}

impl Setup {
    fn of(script: Script) -> Self {
        Self { scripts: vec![vec![script]], ..Self::default() }
    }

    async fn start(self) -> Server {
        let fleet = Fleet::new(self.scripts);
        let limits = Limits { max_step_tokens: 16, ..limits() };
        let options = EngineOptions { limits, step_deadline: PATIENCE, max_failures: 5 };
        let mut group = fleet.group().await;
        let model = described(&mut group).await;
        let engine = Replicas::start(vec![(group, Arc::new(fleet.clone()) as Arc<dyn RestartGroup>)], options);
        let description =
            ServerDescription { max_input_tokens: self.max_input_tokens, ..description(model, self.weights) };
        serve(self.address, self.access, description, fleet, Arc::new(engine)).await
    }
}

impl Server {
    /// Closes every connection at once, as `kill -9` does.
    fn kill(&mut self) {
        self.runtime.take().unwrap().shutdown_background();
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    async fn wait_for_plans(&self, num_plans: u64) {
        self.fleet.started(1).await.ranks[0].wait_until(|seen| seen.plans.len() as u64 >= num_plans).await;
    }

    async fn num_plans(&self) -> usize {
        self.fleet.started(1).await.ranks[0].look(|seen| seen.plans.len())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

async fn serve(
    address: SocketAddr,
    access: Access,
    description: ServerDescription,
    fleet: Fleet,
    generator: Arc<dyn Generator>,
) -> Server {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = bind(address).await;
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let (shutdown, context) = (CancellationToken::new(), runtime.enter());
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    let listener = EngineListener { listener, access, description, grace: PATIENCE };
    runtime.spawn(remote::serve(listener, generator, shutdown.clone()));
    drop(context);
    Server { runtime: Some(runtime), address, fleet, shutdown }
}

/// Sends all tokens of a sequence, and no end.
struct Endless;

impl Generator for Endless {
    fn submit(&self, request: SequenceRequest) -> SequenceStream {
        let (events, receiver) = mpsc::unbounded_channel();
        events.send(SequenceEvent::Started { num_cached_tokens: 0 }).unwrap();
        for id in expected_tokens(&request.prompt_token_ids, request.max_new_tokens as usize) {
            events.send(SequenceEvent::Token(Token { id, logprob: -1.0, top: Vec::new() })).unwrap();
        }
        SequenceStream::new(receiver, move || drop(events))
    }

    fn compile_grammar(&self, _: &Grammar) -> BoxFuture<'static, Result<(), GrammarError>> {
        ready(Ok(())).boxed()
    }

    fn load_adapter(&self, _: Adapter, _: Vec<u64>) -> BoxFuture<'static, Result<(), AdapterError>> {
        ready(Ok(())).boxed()
    }

    fn encode_images(&self, _: Vec<Image>) -> BoxFuture<'static, Result<Vec<Vec<u32>>, ImageError>> {
        ready(Ok(Vec::new())).boxed()
    }

    fn health(&self) -> Health {
        Health::Healthy
    }

    fn stats(&self) -> Stats {
        Stats { num_blocks: 256, ..Stats::default() }
    }
}

/// Waits until a server that was killed has closed its socket.
async fn bind(address: SocketAddr) -> std::net::TcpListener {
    let bind = async {
        loop {
            match std::net::TcpListener::bind(address) {
                Ok(listener) => return listener,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    tokio::time::timeout(PATIENCE, bind).await.expect("the address is free in time")
}

async fn described(group: &mut Group) -> Description {
    let options = LoadOptions {
        model_folder: "/model".into(),
        dtype: None,
        kv_cache_dtype: None,
        block_tokens: None,
        rendezvous: String::new(),
        trust_remote_code: false,
        num_threads: None,
        watermark_gamma: None,
        watermark_delta: None,
        attention: None,
        cpu_isa: None,
        dequantize: false,
        quantize: None,
        activation_bits: None,
        deterministic: false,
        background: false,
        max_adapters: 0,
        max_adapter_rank: 0,
        speculative_model: None,
        drafts_with_mtp: false,
    };
    group.load(&options).await.unwrap()
}

fn description(model: Description, weights: &str) -> ServerDescription {
    ServerDescription {
        properties: properties(weights),
        model,
        max_input_tokens: 511,
        max_total_tokens: 512,
        max_new_tokens: None,
        max_queued_tokens: 1 << 20,
        num_blocks: 256,
        prefix_caching: false,
        step_deadline: PATIENCE,
    }
}

fn router_limits() -> RequestLimits {
    RequestLimits { max_input_tokens: 511, max_total_tokens: 512, max_new_tokens: None }
}

/// A router in front of the servers. `step_deadline` decides when a server without steps hangs.
async fn route(servers: &[&Server], step_deadline: Duration) -> Replicas {
    let remotes: Vec<_> = servers.iter().map(|server| Remote::new(&server.url(), &access()).unwrap()).collect();
    let first = remotes[0].describe().await.unwrap();
    let options = |remote| RemoteOptions {
        remote,
        properties: first.properties.clone(),
        limits: router_limits(),
        timeout: PATIENCE,
        step_deadline,
    };
    let replicas = Replicas::connect(remotes.into_iter().map(options).collect(), &first);
    replicas.ready().await;
    replicas
}

fn prompts(number: u32) -> Vec<Vec<u32>> {
    (1..=number).map(|length| (length..3 * length).collect()).collect()
}

/// Streams that run on their own.
fn streams(replicas: &Replicas) -> tokio::task::JoinHandle<()> {
    let replicas = replicas.clone();
    tokio::spawn(async move { streams_are_complete(&replicas, prompts(12), 20).await })
}

async fn wait_until(condition: impl Fn() -> bool) {
    let check = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, check).await.expect("the condition holds in time");
}

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
    let num_plans = drained.num_plans().await;
    streams_are_complete(&replicas, prompts(4), 5).await;
    assert_eq!(drained.num_plans().await, num_plans, "it gets no new sequence");
}

#[tokio::test]
async fn sequences_of_the_last_server_finish_there_while_it_drains() {
    let (gate, script) = Script::gated(5);
    let server = Setup::of(script).start().await;
    let replicas = route(&[&server], PATIENCE).await;
    let streams = streams(&replicas);
    server.wait_for_plans(6).await;
    server.shutdown.cancel();
    wait_until(|| replicas.health() == Health::Draining).await;
    gate.send_replace(u64::MAX);
    streams.await.unwrap();
}

#[tokio::test]
async fn a_server_that_answers_but_finishes_no_step_loses_its_sequences() {
    let (gate, hanging, kept) = stopping_server(5).await;
    let replicas = route(&[&hanging, &kept], Duration::from_millis(300)).await;
    running_streams(&replicas, &hanging, 5).await.await.unwrap();
    let num_plans = hanging.num_plans().await;
    streams_are_complete(&replicas, prompts(4), 5).await;
    assert_eq!(hanging.num_plans().await, num_plans, "it gets no new sequence");
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
async fn a_server_with_other_weights_gets_no_sequence() {
    let (good, other) = (Setup::default().start().await, Setup { weights: "other", ..Setup::default() }.start().await);
    let replicas = route(&[&good, &other], PATIENCE).await;
    streams_are_complete(&replicas, prompts(12), 20).await;
    assert_eq!(other.num_plans().await, 0);
}

#[tokio::test]
async fn a_server_that_accepts_less_gets_no_sequence() {
    let small = Setup { max_input_tokens: 100, ..Setup::default() }.start().await;
    let good = Setup::default().start().await;
    let replicas = route(&[&good, &small], PATIENCE).await;
    streams_are_complete(&replicas, prompts(12), 20).await;
    assert_eq!(small.num_plans().await, 0);
    let description = Remote::new(&small.url(), &access()).unwrap().describe().await.unwrap();
    let error = router_limits().check(&description).unwrap_err().to_string();
    assert!(error.contains("its --max-input-tokens is 100, that of this router is 511"), "{error}");
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
    let drained = serve(([127, 0, 0, 1], 0).into(), access(), description, fleet, Arc::new(Endless)).await;
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
