//! Servers of an engine for the tests of a router in front of them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::{BoxFuture, ready};
use penstock_router::Adapters;
use penstock_router::config::{AdapterConfig, AdapterSource};
use penstock_router::engine::{EngineOptions, RemoteOptions, RestartGroup};
use penstock_router::engine_server::{self, EngineListener};
use penstock_router::generator::{Generator, Health, RoutedQueue, SequenceStream, event_channel};
use penstock_router::remote::{Access, Properties, Remote, RequestLimits, ServerDescription};
use penstock_router::replica::Replicas;
use penstock_router::sequence::{
    Adapter, AdapterError, EncodedImage, Grammar, GrammarError, Image, ImageError, ImageInput, SequenceEvent,
    SequenceRequest, Token,
};
use penstock_router::worker::{Description, Group, LoadOptions};
use penstock_scheduler::{Limits, Stats};
use tokio::runtime::{Builder, Runtime};
use tokio_util::sync::CancellationToken;

use crate::fake_worker::fleet::Fleet;
use crate::fake_worker::setting::{PATIENCE, limits, streams_are_complete};
use crate::fake_worker::{Script, expected_tokens};

pub const SECRET: &str = "0123456789abcdef";
const MAX_IMAGE_BYTES: u64 = 100;

pub fn access() -> Access {
    Access { secret: SECRET.to_owned(), ..Access::default() }
}

pub fn properties(weights: &str) -> Properties {
    Properties(vec![("weights".to_owned(), weights.to_owned())])
}

/// A server without HTTP of its own. It has threads of its own, so that it can be killed.
pub struct Server {
    runtime: Option<Runtime>,
    pub address: SocketAddr,
    pub fleet: Fleet,
    pub shutdown: CancellationToken,
    /// What routers have queued here.
    pub queue: RoutedQueue,
}

/// What a server is started with.
pub struct Setup {
    pub address: SocketAddr,
    pub scripts: Vec<Vec<Script>>,
    pub access: Access,
    pub weights: &'static str,
    pub max_input_tokens: u32,
    pub max_image_bytes: u64,
    /// The server's LoRA adapters.
    pub adapters: Vec<AdapterSource>,
}

impl Default for Setup {
    fn default() -> Self {
        Self {
            address: ([127, 0, 0, 1], 0).into(),
            scripts: vec![vec![Script::default()]],
            access: access(),
            weights: "same",
            max_input_tokens: 511,
            max_image_bytes: MAX_IMAGE_BYTES,
            adapters: Vec::new(),
        }
    }
}

impl Setup {
    pub fn of(script: Script) -> Self {
        Self { scripts: vec![vec![script]], ..Self::default() }
    }

    pub async fn start(self) -> Server {
        let fleet = Fleet::new(self.scripts);
        let limits = Limits { max_step_tokens: 16, ..limits() };
        let options = EngineOptions { limits, step_deadline: PATIENCE, max_failures: 5 };
        let mut group = fleet.group().await;
        let mut model = described(&mut group).await;
        model.image_input = Some(image_input(self.max_image_bytes));
        let engine = Replicas::start(vec![(group, Arc::new(fleet.clone()) as Arc<dyn RestartGroup>)], options);
        let description =
            ServerDescription { max_input_tokens: self.max_input_tokens, ..description(model, self.weights) };
        let engine: Arc<dyn Generator> = Arc::new(engine);
        let config = AdapterConfig { sources: self.adapters, max_loaded: 1, can_change: false };
        let adapters = Adapters::new(&config, Arc::clone(&engine));
        serve((self.address, self.access, description), fleet, engine, adapters).await
    }
}

impl Server {
    /// Closes every connection at once, as `kill -9` does.
    pub fn kill(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub async fn wait_for_plans(&self, num_plans: u64) {
        self.fleet.started(1).await.ranks[0].wait_until(|seen| seen.plans.len() as u64 >= num_plans).await;
    }

    pub async fn num_plans(&self) -> usize {
        self.fleet.started(1).await.ranks[0].look(|seen| seen.plans.len())
    }

    /// That it has taken into its steps. Plans say less: one that only frees what a stream leaves may come after its end.
    pub async fn num_sequences(&self) -> usize {
        self.fleet.started(1).await.ranks[0].look(|seen| seen.plans.iter().map(|plan| plan.new_sequences.len()).sum())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

pub async fn serve(
    (address, access, description): (SocketAddr, Access, ServerDescription),
    fleet: Fleet,
    generator: Arc<dyn Generator>,
    adapters: Adapters,
) -> Server {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let listener = bind(address).await;
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let (shutdown, queue, context) = (CancellationToken::new(), RoutedQueue::default(), runtime.enter());
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    let listener = EngineListener { listener, access, description, grace: PATIENCE, queue: queue.clone() };
    runtime.spawn(engine_server::serve(listener, generator, adapters, shutdown.clone()));
    drop(context);
    Server { runtime: Some(runtime), address, fleet, shutdown, queue }
}

/// A server of `Endless`.
pub async fn serve_endless(access: Access, description: ServerDescription, fleet: Fleet) -> Server {
    let (address, engine) = (([127, 0, 0, 1], 0).into(), Arc::new(Endless));
    let adapters = Adapters::new(&AdapterConfig::default(), Arc::clone(&engine) as Arc<dyn Generator>);
    serve((address, access, description), fleet, engine, adapters).await
}

/// Sends all tokens of a sequence, and no end.
pub struct Endless;

impl Generator for Endless {
    fn submit(&self, request: SequenceRequest) -> SequenceStream {
        let (events, receiver) = event_channel();
        events.send(SequenceEvent::Started { num_cached_tokens: 0 });
        for id in expected_tokens(&request.prompt_token_ids, request.max_new_tokens as usize) {
            events.send(SequenceEvent::Token(Token { id, logprob: -1.0, top: Vec::new() }));
        }
        SequenceStream::new(receiver, move || drop(events))
    }

    fn compile_grammar(&self, _: &Grammar) -> BoxFuture<'static, Result<(), GrammarError>> {
        ready(Ok(())).boxed()
    }

    fn load_adapter(&self, _: Adapter, _: Vec<u64>) -> BoxFuture<'static, Result<(), AdapterError>> {
        ready(Ok(())).boxed()
    }

    fn encode_images(&self, _: Vec<Image>) -> BoxFuture<'static, Result<Vec<EncodedImage>, ImageError>> {
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
pub async fn bind(address: SocketAddr) -> std::net::TcpListener {
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

pub async fn described(group: &mut Group) -> Description {
    let options = LoadOptions {
        model_folder: "/model".into(),
        dtype: None,
        kv_cache_dtype: None,
        block_tokens: None,
        rendezvous: String::new(),
        token: String::new(),
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
        recent_answer_tokens: 0,
        num_stages: 1,
    };
    group.load(&options).await.unwrap()
}

fn image_input(max_bytes: u64) -> ImageInput {
    ImageInput {
        placeholder_id: 9,
        placeholder: "<image>".to_owned(),
        template_text: String::new(),
        is_whole: false,
        is_prompt_whole: false,
        text_prefix: String::new(),
        text_suffix: String::new(),
        max_bytes,
        has_adapter: false,
    }
}

pub fn description(model: Description, weights: &str) -> ServerDescription {
    ServerDescription {
        properties: properties(weights),
        model,
        max_input_tokens: 511,
        max_total_tokens: 512,
        max_new_tokens: None,
        max_queued_tokens: 1 << 20,
        num_blocks: 256,
        num_slots: 0,
        prefix_caching: false,
        step_deadline: PATIENCE,
    }
}

pub fn router_limits() -> RequestLimits {
    RequestLimits {
        max_input_tokens: 511,
        max_total_tokens: 512,
        max_new_tokens: None,
        max_image_bytes: MAX_IMAGE_BYTES,
    }
}

/// How a router uses the servers with these URLs. `step_deadline` decides when a server without steps hangs.
pub fn remotes(urls: &[String], step_deadline: Duration) -> Vec<RemoteOptions> {
    let options = |url: &String| RemoteOptions {
        remote: Remote::new(url, &access()).unwrap(),
        properties: properties("same"),
        limits: router_limits(),
        timeout: PATIENCE,
        step_deadline,
    };
    urls.iter().map(options).collect()
}

/// A router in front of the servers.
pub async fn route(servers: &[&Server], step_deadline: Duration) -> Replicas {
    let remotes = remotes(&servers.iter().map(|server| server.url()).collect::<Vec<_>>(), step_deadline);
    let first = remotes[0].remote.describe().await.unwrap();
    let replicas = Replicas::connect(remotes, &first);
    replicas.ready().await;
    replicas
}

pub fn prompts(number: u32) -> Vec<Vec<u32>> {
    (1..=number).map(|length| (length..3 * length).collect()).collect()
}

pub const NUM_STREAMS: usize = 12;

/// Streams that run on their own.
pub fn streams(replicas: &Replicas) -> tokio::task::JoinHandle<()> {
    let replicas = replicas.clone();
    tokio::spawn(async move { streams_are_complete(&replicas, prompts(NUM_STREAMS as u32), 20).await })
}
