//! A worker without a model: a real tonic server on a unix socket, and one for steps beside it, whose next token is a hash of all
//! tokens before it.
//!
//! It tracks each sequence as a real worker does, and panics the test when a plan breaks the protocol.

pub mod fleet;
pub mod sequences;
pub mod setting;

use std::collections::HashSet;
use std::net::Shutdown;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use futures::StreamExt;
use futures::stream::{BoxStream, Stream};
use penstock_proto as proto;
use penstock_proto::Frames;
use penstock_proto::worker_server::{Worker, WorkerServer};
use penstock_router::worker::Endpoint;
use sequences::Sequences;
use tempfile::TempDir;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::codec::{FramedRead, FramedWrite};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status, Streaming};

/// How this worker misbehaves.
#[derive(Clone, Debug, Default)]
pub struct Script {
    /// Instead of the real protocol version.
    pub protocol_version: Option<u32>,
    /// Refuses to load with this message.
    pub load_failure: Option<String>,
    /// Fails this step with a status that carries this message.
    pub failure_at_step: Option<(u64, String)>,
    /// Results from this step on are wrong.
    pub garbled_step: Option<(u64, Garble)>,
    /// Closes its stream instead of answering this step.
    pub close_at_step: Option<u64>,
    /// Never answers this step.
    pub hang_at_step: Option<(u64, Hang)>,
    /// Dies after executing this step, before answering it.
    pub die_at_step: Option<u64>,
    /// (first token, position): dies when a sequence that begins with the token samples the token at the position.
    pub deadly: Option<(u32, usize)>,
    /// The sequence whose prompt begins with this token gets a logprob that is not a number.
    pub nan_first_token: Option<u32>,
    /// The sequence whose prompt begins with this token fails when it is sampled for the second time.
    pub broken_first_token: Option<u32>,
    /// What is at fault for that failure.
    pub broken_fault: proto::Fault,
    /// Not empty: the model is an encoder–decoder.
    pub decoder_prefix: Vec<u32>,
    /// The last step that may be answered; later steps wait.
    pub gate: Option<watch::Receiver<u64>>,
    pub num_blocks: u64,
    /// While true, health requests get no response.
    pub silence: Option<watch::Receiver<bool>>,
}

impl Script {
    /// Answers steps up to `last`, and later ones when the sender allows them.
    pub fn gated(last: u64) -> (watch::Sender<u64>, Self) {
        let (open_gate, gate) = watch::channel(last);
        (open_gate, Self { gate: Some(gate), ..Self::default() })
    }
}

/// How a worker hangs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hang {
    /// Health requests are still answered.
    Step,
    /// Nothing is answered.
    Process,
}

/// How a result is wrong. Most need a result with a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Garble {
    Step,
    UnknownSequence,
    TooManyTokens,
    MissingOutput,
    ShortColumn,
    PartialNumber,
    AlternativesToNoToken,
    Timing,
}

impl Garble {
    pub const ALL: [Self; 8] = [
        Self::Step,
        Self::UnknownSequence,
        Self::TooManyTokens,
        Self::MissingOutput,
        Self::ShortColumn,
        Self::PartialNumber,
        Self::AlternativesToNoToken,
        Self::Timing,
    ];

    fn apply(self, result: &mut proto::StepResult) {
        match self {
            Self::Step => result.step += 7,
            Self::Timing => result.timing.get_or_insert_default().forward_seconds = f64::NAN,
            _ => {
                let ids = &mut result.sequence_ids;
                let Some(sampled) = result.sampled.as_mut().filter(|_| !ids.is_empty()) else { return };
                match self {
                    Self::UnknownSequence => ids[1] += 4,
                    Self::TooManyTokens => {
                        ids.extend_from_within(..8);
                        sampled.ids.extend_from_within(..4);
                        sampled.logprobs.extend_from_within(..4);
                        ids.rotate_right(8);
                    }
                    Self::ShortColumn => sampled.logprobs.truncate(0),
                    Self::PartialNumber => sampled.ids.truncate(3),
                    Self::AlternativesToNoToken => {
                        sampled.top.push(proto::TopTokens { index: 1000, ..Default::default() });
                    }
                    _ => {
                        ids.drain(..8);
                        sampled.ids.drain(..4);
                        sampled.logprobs.drain(..4);
                    }
                }
            }
        }
    }
}

/// What the worker received; shared with the test.
#[derive(Debug, Default)]
pub struct Seen {
    pub loads: Vec<proto::LoadRequest>,
    pub warm_ups: Vec<proto::WarmUpRequest>,
    pub grammars: Vec<String>,
    pub adapters: Vec<proto::LoadAdapterRequest>,
    /// Files to encode.
    pub images: Vec<Vec<u8>>,
    pub plans: Vec<proto::Plan>,
    /// The most plans in flight.
    pub max_in_flight: usize,
    /// Sequences that hold blocks.
    pub sequences: HashSet<u64>,
}

pub struct FakeWorker {
    pub socket: PathBuf,
    pub seen: watch::Receiver<Arc<Mutex<Seen>>>,
    server: JoinHandle<()>,
    connections: Arc<Mutex<Vec<StdUnixStream>>>,
}

/// The ranks of one group, with their sockets in a folder.
pub struct FakeGroup {
    pub ranks: Vec<FakeWorker>,
    _folder: TempDir,
}

impl FakeGroup {
    pub fn start(scripts: Vec<Script>) -> Self {
        // Not in TMPDIR, whose path may be too long for a socket.
        let folder = tempfile::tempdir_in("/tmp").unwrap();
        let start = |(rank, script)| FakeWorker::start(&folder.path().join(format!("rank-{rank}")), script, rank == 0);
        Self { ranks: scripts.into_iter().enumerate().map(start).collect(), _folder: folder }
    }

    pub fn endpoints(&self) -> Vec<Endpoint> {
        self.ranks.iter().map(|rank| Endpoint::Unix(rank.socket.clone())).collect()
    }
}

impl FakeWorker {
    fn start(socket: &Path, script: Script, first: bool) -> Self {
        let (updates, seen) = watch::channel(Arc::default());
        let connections = Arc::new(Mutex::new(Vec::new()));
        let mut streams = listen(&proto::steps_socket(socket), &connections);
        let listener = listen(socket, &connections);
        let death = CancellationToken::new();
        let service = Service { script, first, updates: Arc::new(updates), death: death.clone() };
        let server = tonic::transport::Server::builder().add_service(WorkerServer::new(service.clone()));
        let serve_steps = async move {
            while let Some(Ok(stream)) = streams.next().await {
                tokio::spawn(service.clone().serve_steps(stream));
            }
        };
        let server = tokio::spawn(async move {
            let (served, ()) = tokio::join!(server.serve_with_incoming(listener), serve_steps);
            served.unwrap();
        });
        tokio::spawn({
            let (connections, server) = (connections.clone(), server.abort_handle());
            async move {
                death.cancelled().await;
                server.abort();
                close(&connections);
            }
        });
        Self { socket: socket.to_owned(), seen, server, connections }
    }

    /// Closes the sockets at once, as the death of its process would.
    pub fn kill(&self) {
        self.server.abort();
        close(&self.connections);
    }

    pub fn look<T>(&self, question: impl FnOnce(&Seen) -> T) -> T {
        question(&self.seen.borrow().lock().unwrap())
    }

    /// Waits until `satisfied` holds for what the worker received.
    pub async fn wait_until(&self, mut satisfied: impl FnMut(&Seen) -> bool) {
        let mut seen = self.seen.clone();
        seen.wait_for(|seen| satisfied(&seen.lock().unwrap())).await.unwrap();
    }
}

/// The connections to a socket, which are also kept to be closed.
fn listen(
    socket: &Path,
    connections: &Arc<Mutex<Vec<StdUnixStream>>>,
) -> impl Stream<Item = std::io::Result<UnixStream>> + Send + Unpin + use<> {
    let connections = connections.clone();
    UnixListenerStream::new(UnixListener::bind(socket).unwrap()).map(move |stream| {
        let stream = stream?.into_std()?;
        connections.lock().unwrap().push(stream.try_clone()?);
        UnixStream::from_std(stream)
    })
}

fn close(connections: &Mutex<Vec<StdUnixStream>>) {
    for connection in connections.lock().unwrap().drain(..) {
        // The other side may have closed it before.
        let _ = connection.shutdown(Shutdown::Both);
    }
}

/// The token that follows these.
pub fn next_token(token_ids: &[u32]) -> u32 {
    let hash = token_ids
        .iter()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, &token| (hash ^ u64::from(token)).wrapping_mul(0x0100_0000_01b3));
    (hash >> 33) as u32 % 50_000
}

/// The tokens that a sequence with this prompt must generate.
pub fn expected_tokens(prompt: &[u32], num_tokens: usize) -> Vec<u32> {
    let mut token_ids = prompt.to_vec();
    for _ in 0..num_tokens {
        token_ids.push(next_token(&token_ids));
    }
    token_ids.split_off(prompt.len())
}

#[derive(Clone)]
struct Service {
    script: Script,
    first: bool,
    updates: Arc<watch::Sender<Arc<Mutex<Seen>>>>,
    death: CancellationToken,
}

impl Service {
    fn note(&self, change: impl FnOnce(&mut Seen)) {
        note(&self.updates, change);
    }
}

fn note(updates: &watch::Sender<Arc<Mutex<Seen>>>, change: impl FnOnce(&mut Seen)) {
    updates.send_modify(|seen| change(&mut seen.lock().unwrap()));
}

#[tonic::async_trait]
impl Worker for Service {
    async fn load(&self, request: Request<proto::LoadRequest>) -> Result<Response<proto::LoadResponse>, Status> {
        self.note(|seen| seen.loads.push(request.into_inner()));
        if let Some(message) = &self.script.load_failure {
            return Err(Status::failed_precondition(message));
        }
        Ok(Response::new(proto::LoadResponse {
            protocol_version: self.script.protocol_version.unwrap_or(proto::ProtocolVersion::Current as u32),
            architecture: "hash".to_owned(),
            dtype: "float32".to_owned(),
            device: "cpu".to_owned(),
            attention: "none".to_owned(),
            vocab_size: 50_000,
            block_tokens: 16,
            max_position_tokens: 4096,
            weight_bytes: 1000,
            kv_bytes_per_block: 16,
            phases: vec![proto::Phase { name: "read weights".to_owned(), seconds: 0.5 }],
            decoder_prefix: self.script.decoder_prefix.clone(),
            max_source_tokens: 3000,
            ..Default::default()
        }))
    }

    async fn warm_up(&self, request: Request<proto::WarmUpRequest>) -> Result<Response<proto::WarmUpResponse>, Status> {
        self.note(|seen| seen.warm_ups.push(request.into_inner()));
        Ok(Response::new(proto::WarmUpResponse { num_blocks: self.script.num_blocks, ..Default::default() }))
    }

    /// A grammar that contains "broken" is refused, one with "deadly" kills the worker, one with "endless" never ends.
    async fn compile_grammar(
        &self,
        request: Request<proto::CompileGrammarRequest>,
    ) -> Result<Response<proto::CompileGrammarResponse>, Status> {
        use proto::grammar::Kind;
        let grammar = request.into_inner().grammar.and_then(|grammar| grammar.kind);
        let Some(Kind::JsonSchema(text) | Kind::Regex(text) | Kind::Lark(text)) = grammar else {
            return Err(Status::invalid_argument("no grammar"));
        };
        self.note(|seen| seen.grammars.push(text.clone()));
        if text.contains("deadly") {
            self.death.cancel();
            std::future::pending::<()>().await;
        }
        if text.contains("endless") {
            std::future::pending::<()>().await;
        }
        let is_broken = text.contains("broken");
        let error = if is_broken { "it is broken".to_owned() } else { String::new() };
        Ok(Response::new(proto::CompileGrammarResponse { error }))
    }

    async fn load_adapter(
        &self,
        request: Request<proto::LoadAdapterRequest>,
    ) -> Result<Response<proto::LoadAdapterResponse>, Status> {
        self.note(|seen| seen.adapters.push(request.into_inner()));
        Ok(Response::new(proto::LoadAdapterResponse::default()))
    }

    async fn encode_images(
        &self,
        request: Request<proto::EncodeImagesRequest>,
    ) -> Result<Response<proto::EncodeImagesResponse>, Status> {
        let files: Vec<_> = request.into_inner().images.into_iter().map(|image| image.data).collect();
        self.note(|seen| seen.images.extend(files.clone()));
        if files.iter().any(|file| *file == b"deadly"[..]) {
            self.death.cancel();
            std::future::pending::<()>().await;
        }
        let encode = |file: Vec<u8>| proto::EncodedImage { token_ids: vec![9; file.len()], num_bytes: 1 };
        Ok(Response::new(proto::EncodeImagesResponse {
            error: String::new(),
            images: files.into_iter().map(encode).collect(),
            is_overloaded: false,
        }))
    }

    async fn health(&self, _: Request<proto::HealthRequest>) -> Result<Response<proto::HealthResponse>, Status> {
        if let Some(mut silence) = self.script.silence.clone() {
            let _ = silence.wait_for(|is_silent| !is_silent).await;
        }
        let last_step = self.updates.borrow().lock().unwrap().plans.last().map_or(0, |plan| plan.step);
        if self.script.hang_at_step.is_some_and(|(step, hang)| hang == Hang::Process && last_step >= step) {
            std::future::pending::<()>().await;
        }
        Ok(Response::new(proto::HealthResponse::default()))
    }

    type StepsStream = BoxStream<'static, Result<proto::StepResult, Status>>;

    async fn steps(&self, _: Request<Streaming<proto::Plan>>) -> Result<Response<Self::StepsStream>, Status> {
        Err(Status::unimplemented("steps have a socket of their own"))
    }
}

impl Service {
    async fn serve_steps(self, connection: UnixStream) {
        let (reader, writer) = connection.into_split();
        let plans = FramedRead::new(reader, Frames::default());
        let plans = plans.filter_map(async |plan: std::io::Result<Result<proto::Plan, Status>>| plan.ok()?.ok());
        // The router may leave at any time.
        let _ =
            self.results(plans).map(Ok).forward(FramedWrite::new(writer, Frames::<proto::StepResult>::default())).await;
    }

    fn results(
        &self,
        plans: impl Stream<Item = proto::Plan> + Send + 'static,
    ) -> BoxStream<'static, Result<proto::StepResult, Status>> {
        let mut plans = Box::pin(plans);
        let (received, queue) = tokio::sync::mpsc::unbounded_channel();
        let updates = self.updates.clone();
        let in_flight = Arc::new(Mutex::new(0_usize));
        // Reads plans as they come, so that run-ahead shows.
        tokio::spawn({
            let (updates, in_flight) = (updates.clone(), in_flight.clone());
            async move {
                while let Some(plan) = plans.next().await {
                    let now = {
                        let mut in_flight = in_flight.lock().unwrap();
                        *in_flight += 1;
                        *in_flight
                    };
                    note(&updates, |seen| {
                        seen.plans.push(plan.clone());
                        seen.max_in_flight = seen.max_in_flight.max(now);
                    });
                    let _ = received.send(plan);
                }
            }
        });
        let (script, first, death) = (self.script.clone(), self.first, self.death.clone());
        let state = (queue, Sequences::default());
        let results = futures::stream::unfold(state, move |(mut queue, mut sequences)| {
            let (script, updates, in_flight) = (script.clone(), updates.clone(), in_flight.clone());
            let death = death.clone();
            async move {
                let plan: proto::Plan = queue.recv().await?;
                if let Some(mut gate) = script.gate.clone() {
                    gate.wait_for(|last| plan.step <= *last).await.ok()?;
                }
                if script.close_at_step == Some(plan.step) {
                    return None;
                }
                if script.hang_at_step.is_some_and(|(step, _)| step == plan.step) {
                    std::future::pending::<()>().await;
                }
                if let Some((_, message)) = script.failure_at_step.as_ref().filter(|(step, _)| *step == plan.step) {
                    return Some((Err(Status::internal(message)), (queue, sequences)));
                }
                let mut result = sequences.execute(&plan, &script);
                if script.die_at_step == Some(plan.step) || script.deadly.is_some_and(|deadly| sequences.has(deadly)) {
                    death.cancel();
                    std::future::pending::<()>().await;
                }
                if !first {
                    result = proto::StepResult { step: result.step, timing: result.timing, ..Default::default() };
                }
                if let Some((_, garble)) = script.garbled_step.filter(|(step, _)| plan.step >= *step) {
                    garble.apply(&mut result);
                }
                *in_flight.lock().unwrap() -= 1;
                note(&updates, |seen| seen.sequences = sequences.by_id.keys().copied().collect());
                Some((Ok(result), (queue, sequences)))
            }
        });
        results.boxed()
    }
}
