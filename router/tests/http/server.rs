//! A server on a free port, with an engine that the test scripts unless it brings its own, and a client.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use axum::body::Bytes;
use axum::http::{HeaderMap, Request, Response, StatusCode};
use futures::future::BoxFuture;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use penstock_router::config::{AdapterConfig, ApiKeys, PriorityOrder, VertexRoutes};
use penstock_router::generator::{EventSender, Generator, Health, RoutedQueue, SequenceStream, event_channel};
use penstock_router::limits::{ConnectionLimits, QueueLimits, RequestLimits};
use penstock_router::sequence::{
    Adapter, AdapterError, EncodedImage, FinishReason, Grammar, GrammarError, Image, ImageError, SequenceEvent,
    SequenceRequest, Token,
};
use penstock_router::telemetry::metrics::Exporter;
use penstock_router::text::TextModel;
use penstock_router::{AdapterDownload, Adapters, Config, Listener, SamplingDefaults, ServeError, Services, serve};
use penstock_scheduler::Stats;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::model;

pub const LIMITS: RequestLimits = RequestLimits {
    max_concurrent_requests: 4,
    max_best_of: 2,
    max_stop_sequences: 4,
    max_top_n_tokens: 5,
    max_input_tokens: 200,
    max_total_tokens: 256,
    max_new_tokens: None,
    max_client_batch_size: 4,
};

/// How long a test waits before it fails.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A sequence that the test controls. Dropping it ends the stream early.
pub struct Sequence {
    pub request: SequenceRequest,
    events: EventSender,
    /// Resolves when the router drops the stream before its end.
    pub aborted: BoxFuture<'static, Result<(), oneshot::error::RecvError>>,
}

impl Sequence {
    pub fn send(&self, event: SequenceEvent) {
        self.events.send(event);
    }

    pub fn send_token(&self, id: u32) {
        self.send(SequenceEvent::Token(Token { id, logprob: -0.5, top: Vec::new() }));
    }

    /// Sends the events of the real engine for these tokens.
    pub fn answer(self, token_ids: &[u32]) {
        self.send(SequenceEvent::Started { num_cached_tokens: 0 });
        for (index, &id) in token_ids.iter().enumerate() {
            self.send_token(id);
            if index + 1 == self.request.max_new_tokens as usize {
                return self.send(SequenceEvent::Finished(FinishReason::Length));
            }
            if self.request.sampling.stop_token_ids.contains(&id) {
                return self.send(SequenceEvent::Finished(FinishReason::StopToken));
            }
        }
    }
}

/// The sequences that the router has submitted, in order.
pub struct Sequences(mpsc::UnboundedReceiver<Sequence>);

impl Sequences {
    pub async fn recv(&mut self) -> Option<Sequence> {
        within("a sequence", self.0.recv()).await
    }

    /// A sequence that was already submitted.
    pub fn try_recv(&mut self) -> Result<Sequence, mpsc::error::TryRecvError> {
        self.0.try_recv()
    }
}

type Script = Box<dyn Fn(Sequence) + Send + Sync>;

/// Id of each token of an image.
pub const PLACEHOLDER_ID: u32 = 7;

/// An engine that runs the test's script.
pub struct Engine {
    script: Script,
    pub requests: Mutex<Vec<SequenceRequest>>,
    /// The adapters that were loaded, and those that were freed for them, by their ids.
    pub loads: Mutex<Vec<(u64, Vec<u64>)>>,
    pub health: Mutex<Health>,
}

impl Generator for Engine {
    fn submit(&self, request: SequenceRequest) -> SequenceStream {
        let (events, receiver) = event_channel();
        let (abort, aborted) = oneshot::channel();
        self.requests.lock().unwrap().push(request.clone());
        (self.script)(Sequence { request, events, aborted: Box::pin(within("an abort", aborted)) });
        SequenceStream::new(receiver, move || {
            let _ = abort.send(());
        })
    }

    /// A grammar that contains "broken" is refused, one that contains "endless" never finishes.
    fn compile_grammar(&self, grammar: &Grammar) -> BoxFuture<'static, Result<(), GrammarError>> {
        let (Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text)) = grammar else {
            return Box::pin(std::future::ready(Ok(())));
        };
        if text.contains("endless") {
            return Box::pin(std::future::pending());
        }
        let is_broken = text.contains("broken");
        let answer = if is_broken { Err(GrammarError::Invalid("it is broken".to_owned())) } else { Ok(()) };
        Box::pin(std::future::ready(answer))
    }

    /// An adapter in a folder with "broken" in its path is refused; for one with "large" there is no memory.
    fn load_adapter(&self, adapter: Adapter, unloaded_ids: Vec<u64>) -> BoxFuture<'static, Result<(), AdapterError>> {
        self.loads.lock().unwrap().push((adapter.id, unloaded_ids));
        let answer = match adapter.path.to_string_lossy() {
            path if path.contains("broken") => Err(AdapterError::Unusable("it is broken".to_owned())),
            path if path.contains("large") => Err(AdapterError::NoMemory("it is too large".to_owned())),
            _ => Ok(()),
        };
        Box::pin(std::future::ready(answer))
    }

    /// As many tokens as an image has bytes; one that begins with "broken" is refused, and one with "busy" while others wait.
    fn encode_images(&self, images: Vec<Image>) -> BoxFuture<'static, Result<Vec<EncodedImage>, ImageError>> {
        let encode = |image: &Image| match image.data() {
            data if data.starts_with(b"broken") => Err(ImageError::Unusable("image 1 is broken".to_owned())),
            data if data.starts_with(b"busy") => Err(ImageError::Overloaded("others wait".to_owned())),
            data => Ok(EncodedImage { token_ids: vec![PLACEHOLDER_ID; data.len()], num_bytes: 1 }),
        };
        Box::pin(std::future::ready(images.iter().map(encode).collect()))
    }

    fn health(&self) -> Health {
        self.health.lock().unwrap().clone()
    }

    fn stats(&self) -> Stats {
        Stats::default()
    }
}

pub struct Server<E = Engine> {
    pub address: SocketAddr,
    pub engine: Arc<E>,
    pub shutdown: CancellationToken,
    pub served: JoinHandle<Result<(), ServeError>>,
    client: Client<hyper_util::client::legacy::connect::HttpConnector, Full<Bytes>>,
    /// What the router asks the launcher to download.
    pub downloads: tokio::sync::Mutex<mpsc::Receiver<AdapterDownload>>,
    _folder: tempfile::TempDir,
}

/// A complete response.
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: String,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no header {name}")).to_str().unwrap()
    }

    /// The events of a stream. Checks and removes the framing.
    pub fn events(&self) -> Vec<String> {
        let frames = self.body.strip_suffix("\n\n").unwrap().split("\n\n");
        frames.map(|frame| frame.strip_prefix("data: ").unwrap_or_else(|| panic!("{frame:?}")).to_owned()).collect()
    }
}

impl Answer {
    /// The events of a stream with named events. Checks that each has the name of its type.
    pub fn typed_events(&self) -> Vec<Value> {
        let frames = self.body.strip_suffix("\n\n").unwrap().split("\n\n");
        let event = |frame: &str| {
            let (name, data) = frame.split_once('\n').unwrap();
            let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            assert_eq!(Some(event["type"].as_str().unwrap()), name.strip_prefix("event: "), "{frame}");
            event
        };
        frames.map(event).collect()
    }
}

impl Server {
    /// Answers every sequence with these tokens.
    pub async fn answering(token_ids: &[u32]) -> Self {
        let token_ids = token_ids.to_vec();
        Self::scripted(move |sequence| sequence.answer(&token_ids)).await
    }

    /// Hands every sequence to the test.
    pub async fn manual() -> (Self, Sequences) {
        Self::manual_with(|_| ()).await
    }

    pub async fn manual_with(adjust: impl FnOnce(&mut Config)) -> (Self, Sequences) {
        let (sender, sequences) = mpsc::unbounded_channel();
        let script = move |sequence| {
            let _ = sender.send(sequence);
        };
        (Self::start(script, adjust).await, Sequences(sequences))
    }

    pub async fn scripted(script: impl Fn(Sequence) + Send + Sync + 'static) -> Self {
        Self::start(script, |_| ()).await
    }

    pub async fn start(script: impl Fn(Sequence) + Send + Sync + 'static, adjust: impl FnOnce(&mut Config)) -> Self {
        let health = Mutex::new(Health::Healthy);
        Self::serve(
            Engine { script: Box::new(script), requests: Mutex::default(), loads: Mutex::default(), health },
            adjust,
        )
        .await
    }

    pub fn last_request(&self) -> SequenceRequest {
        self.engine.requests.lock().unwrap().last().unwrap().clone()
    }
}

impl<E: Generator + 'static> Server<E> {
    /// Serves the test model with this engine.
    pub async fn serve(engine: E, adjust: impl FnOnce(&mut Config)) -> Self {
        Self::serve_with_routers(engine, RoutedQueue::default(), adjust).await
    }

    /// Routers have queued `routed_queue` on this server.
    pub async fn serve_with_routers(engine: E, routed_queue: RoutedQueue, adjust: impl FnOnce(&mut Config)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        model::write(folder.path());
        let mut config = config(folder.path());
        adjust(&mut config);
        let engine = Arc::new(engine);
        let text =
            TextModel::load(&config.model_folder, 1, None, Path::new(env!("CARGO_BIN_EXE_chat-renderer"))).unwrap();
        let (adapter_downloads, downloads) = mpsc::channel(1);
        let engine_of_router = Arc::clone(&engine) as Arc<dyn Generator>;
        let adapters = Adapters::new(&config.adapters, Arc::clone(&engine_of_router));
        let services =
            Services { engine: engine_of_router, text, metrics: exporter(), adapters, adapter_downloads, routed_queue };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        let served = tokio::spawn(serve(config, services, Listener::Tcp(listener), shutdown.clone()));
        let client = Client::builder(TokioExecutor::new()).build_http();
        let downloads = tokio::sync::Mutex::new(downloads);
        Self { address, engine, shutdown, served, client, downloads, _folder: folder }
    }

    pub async fn post(&self, path: &str, body: Value) -> Answer {
        self.post_text(path, "application/json", &body.to_string()).await
    }

    pub async fn post_text(&self, path: &str, content_type: &str, body: &str) -> Answer {
        whole(self.send(self.request("POST", path).header("content-type", content_type), body).await).await
    }

    /// For bodies that are not text.
    pub async fn post_bytes(&self, path: &str, body: &[u8]) -> Answer {
        let request = self.request("POST", path).header("content-type", "application/json");
        let request = request.body(Full::new(Bytes::copy_from_slice(body))).unwrap();
        whole(within("an answer", self.client.request(request)).await.unwrap()).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        whole(self.send(self.request("GET", path), "").await).await
    }

    /// The response's head; its body is not read yet.
    pub async fn open(&self, path: &str, body: Value) -> Response<hyper::body::Incoming> {
        let request = self.request("POST", path).header("content-type", "application/json");
        self.send(request, &body.to_string()).await
    }

    pub fn request(&self, method: &str, path: &str) -> axum::http::request::Builder {
        Request::builder().method(method).uri(format!("http://{}{path}", self.address))
    }

    pub async fn send(&self, request: axum::http::request::Builder, body: &str) -> Response<hyper::body::Incoming> {
        self.send_bytes(request, body.as_bytes().to_vec()).await
    }

    pub async fn send_bytes(
        &self,
        request: axum::http::request::Builder,
        body: Vec<u8>,
    ) -> Response<hyper::body::Incoming> {
        let request = request.body(Full::new(Bytes::from(body))).unwrap();
        within("an answer", self.client.request(request)).await.unwrap()
    }
}

/// Fails the test, instead of hanging, if the future does not complete.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    let result = tokio::time::timeout(TIMEOUT, future).await;
    result.unwrap_or_else(|_| panic!("{what} did not come within {TIMEOUT:?}"))
}

pub async fn whole(response: Response<hyper::body::Incoming>) -> Answer {
    let (parts, body) = response.into_parts();
    let body = within("an answer's end", body.collect()).await.unwrap().to_bytes();
    Answer { status: parts.status, headers: parts.headers, body: String::from_utf8(body.to_vec()).unwrap() }
}

/// The configuration for a model in this folder.
fn config(folder: &Path) -> Config {
    Config {
        model_id: "test/model".to_owned(),
        served_model_names: vec!["test/model".to_owned()],
        adapters: AdapterConfig::default(),
        check_model_names: false,
        trusts_request_chat_templates: false,
        strict_requests: false,
        reasoning_budget: None,
        priority_order: PriorityOrder::HighestFirst,
        model_sha: None,
        pipeline_tag: None,
        model_folder: folder.to_owned(),
        limits: LIMITS,
        decoder_prefix: Arc::default(),
        pooling: None,
        image_input: None,
        image_urls: None,
        queue: QueueLimits { max_tokens: u64::MAX, timeout: None },
        validation_workers: 1,
        payload_limit_bytes: 10_000,
        cors_allow_origins: Vec::new(),
        api_keys: ApiKeys::default(),
        compute_type: "1-cpu".to_owned(),
        grammar_support: true,
        prefill_logprobs: true,
        max_stored_responses: 0,
        sampling_defaults: SamplingDefaults::NONE,
        playground: true,
        vertex_routes: VertexRoutes::default(),
        connections: ConnectionLimits::new(&LIMITS),
        graceful_termination_timeout: Duration::from_secs(10),
        traces: None,
    }
}

/// The process's metrics recorder, which the tests of one process share.
fn exporter() -> Exporter {
    static EXPORTER: OnceLock<Exporter> = OnceLock::new();
    EXPORTER.get_or_init(|| Exporter::install(&LIMITS).unwrap()).clone()
}
