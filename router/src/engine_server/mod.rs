//! Serves this server's engine and adapters to a router elsewhere, by the engine protocol.

mod adapter;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::stream::BoxStream;
use futures::{Stream, StreamExt};
use penstock_proto as worker;
use penstock_proto::engine as proto;
use penstock_proto::engine::engine_server::{Engine, EngineServer};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tonic::{Request, Response, Status};

use adapter::{ServedAdapter, ServedAdapters};

use crate::config::ApiKeys;
use crate::generation::Adapters;
use crate::generator::{Generator, RoutedQueue};
use crate::remote::{Access, CONNECTION_WINDOW_BYTES, MAX_MESSAGE_BYTES, STATUS_INTERVAL, ServerDescription, convert};
use crate::sequence::{AdapterHash, EncodedImage, GrammarError, Image, ImageError};

/// How soon a change of health is reported.
const HEALTH_INTERVAL: Duration = Duration::from_millis(100);
/// A router has one stream for each of its sequences here; further ones wait in the router.
const MAX_STREAMS: u32 = 8192;
/// A router that answers no ping within this time is gone, and its sequences are aborted.
const KEEP_ALIVE: Duration = Duration::from_secs(20);
/// Events that are sent in one message, if they are there.
const MAX_BATCH: usize = 64;
/// How long connections may take to send their last bytes.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// What an engine listener serves.
pub struct EngineListener {
    /// The bound socket.
    pub listener: TcpListener,
    /// Access control and TLS.
    pub access: Access,
    /// What routers compare and limit requests by.
    pub description: ServerDescription,
    /// How long sequences may take to finish or to move after the shutdown.
    pub grace: Duration,
    /// Counts the sequences that wait for their first step.
    pub queue: RoutedQueue,
}

/// Serves until `shutdown` is cancelled, and then until no sequence is left or the grace period is over. Routers may use the `adapters`.
pub async fn serve(
    options: EngineListener,
    generator: Arc<dyn Generator>,
    adapters: Adapters,
    shutdown: CancellationToken,
) -> Result<(), tonic::transport::Error> {
    let EngineListener { listener, access, description, grace, queue } = options;
    let closing = CancellationToken::new();
    let open = watch::Sender::new(0_usize);
    let (served, served_adapters) = watch::channel(None);
    let follow = adapter::follow(adapters.clone(), served);
    let service = Service {
        generator,
        adapters,
        served_adapters,
        max_image_bytes: description.model.max_image_bytes(),
        description: convert::description(&description),
        draining: shutdown.clone(),
        closing: closing.clone(),
        open: open.clone(),
        queue,
    };
    let engine = EngineServer::new(service)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let mut server = Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE))
        .http2_keepalive_timeout(Some(KEEP_ALIVE))
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(MAX_STREAMS);
    if let Some(tls) = access.server_tls() {
        server = server.tls_config(tls)?;
    }
    let guarded = InterceptedService::new(engine, RequireSecret(access.keys()));
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let served = server.add_service(guarded).serve_with_incoming_shutdown(incoming, closing.clone().cancelled_owned());
    let drain = async {
        shutdown.cancelled().await;
        let mut open = open.subscribe();
        if tokio::time::timeout(grace, open.wait_for(|open| *open == 0)).await.is_err() {
            tracing::warn!(grace_s = grace.as_secs_f64(), "sequences of other routers are left after the grace period");
        }
        closing.cancel();
        tokio::time::sleep(FLUSH_TIMEOUT).await;
    };
    tokio::select! {
        served = served => served,
        () = drain => Ok(()),
        never = follow => match never {},
    }
}

#[derive(Clone)]
struct RequireSecret(ApiKeys);

impl Interceptor for RequireSecret {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let given = request.metadata().get("authorization").map(|value| value.as_bytes());
        match given.and_then(|value| value.strip_prefix(b"Bearer ")) {
            Some(secret) if self.0.contains(secret) => Ok(request),
            Some(_) => Err(Status::unauthenticated("the secret is not that of this server (--engine-secret-file)")),
            None => Err(Status::unauthenticated("no secret was given; send it as `authorization: Bearer SECRET`")),
        }
    }
}

struct Service {
    generator: Arc<dyn Generator>,
    adapters: Adapters,
    served_adapters: watch::Receiver<ServedAdapters>,
    description: proto::Description,
    max_image_bytes: u64,
    draining: CancellationToken,
    closing: CancellationToken,
    /// Sequences that routers have here.
    open: watch::Sender<usize>,
    queue: RoutedQueue,
}

/// Counts a sequence as open until it is dropped.
struct OpenCount(watch::Sender<usize>);

impl OpenCount {
    fn new(open: &watch::Sender<usize>) -> Self {
        open.send_modify(|open| *open += 1);
        Self(open.clone())
    }
}

impl Drop for OpenCount {
    fn drop(&mut self) {
        self.0.send_modify(|open| *open -= 1);
    }
}

impl Service {
    /// Waits until the files of the adapters are read.
    async fn adapter(&self, hash: AdapterHash) -> Result<ServedAdapter, Status> {
        let mut served = self.served_adapters.clone();
        let served =
            served.wait_for(Option::is_some).await.map_err(|_| Status::unavailable("the server is stopped"))?;
        let found = served.iter().flat_map(|served| served.iter()).find(|adapter| adapter.hash == hash);
        found.cloned().ok_or_else(|| Status::not_found("the server does not have the adapter any more"))
    }
}

#[tonic::async_trait]
impl Engine for Service {
    type WatchStream = BoxStream<'static, Result<proto::Status, Status>>;
    type GenerateStream = Pin<Box<dyn Stream<Item = Result<proto::Events, Status>> + Send>>;

    async fn describe(&self, _: Request<proto::DescribeRequest>) -> Result<Response<proto::Description>, Status> {
        Ok(Response::new(self.description.clone()))
    }

    async fn watch(&self, _: Request<proto::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let (generator, draining, closing) = (Arc::clone(&self.generator), self.draining.clone(), self.closing.clone());
        let current = move || convert::status(&generator.health(), draining.is_cancelled(), &generator.stats());
        let (draining, mut adapters) = (self.draining.clone(), self.served_adapters.clone());
        adapters.mark_changed();
        let statuses = async_stream::stream! {
            let mut ticks = tokio::time::interval(HEALTH_INTERVAL);
            loop {
                let mut status = current();
                if adapters.has_changed().unwrap_or(false) {
                    status.adapters = adapters.borrow_and_update().as_deref().map(adapter_list);
                }
                let (health, sent_at) = ((status.unhealthy.clone(), status.is_draining), Instant::now());
                yield Ok(status);
                while sent_at.elapsed() < STATUS_INTERVAL {
                    tokio::select! {
                        () = closing.cancelled() => return,
                        () = draining.cancelled(), if !health.1 => {}
                        Ok(()) = adapters.changed() => {
                            adapters.mark_changed();
                            break;
                        }
                        _ = ticks.tick() => {}
                    }
                    let status = current();
                    if (status.unhealthy, status.is_draining) != health {
                        break;
                    }
                }
            }
        };
        Ok(Response::new(statuses.boxed()))
    }

    async fn generate(&self, request: Request<proto::Sequence>) -> Result<Response<Self::GenerateStream>, Status> {
        if self.draining.is_cancelled() {
            return Err(Status::unavailable("the server is being stopped"));
        }
        let mut request =
            convert::request(request.into_inner(), self.max_image_bytes).map_err(Status::invalid_argument)?;
        let adapter = match request.adapter_hash.take() {
            Some(hash) => Some(self.adapter(hash).await?),
            None => None,
        };
        let count = OpenCount::new(&self.open);
        let mut queued = Some(self.queue.add(&request));
        let events = adapter::submit(Arc::clone(&self.generator), self.adapters.clone(), adapter, request);
        let events = events.ready_chunks(MAX_BATCH);
        let batches = events.map(move |events| {
            let _is_open = &count;
            // The first event tells of the first step, or of the end.
            drop(queued.take());
            Ok(proto::Events { events: events.into_iter().map(convert::event).collect() })
        });
        Ok(Response::new(batches.boxed()))
    }

    async fn compile_grammar(
        &self,
        request: Request<worker::CompileGrammarRequest>,
    ) -> Result<Response<worker::CompileGrammarResponse>, Status> {
        let grammar = request.into_inner().grammar.ok_or_else(|| Status::invalid_argument("no grammar was given"))?;
        let grammar = convert::grammar(grammar).map_err(Status::invalid_argument)?;
        let error = match self.generator.compile_grammar(&grammar).await {
            Ok(()) => String::new(),
            Err(GrammarError::Invalid(reason)) => reason,
            Err(error @ GrammarError::Worker(_)) => return Err(Status::unavailable(error.to_string())),
        };
        Ok(Response::new(worker::CompileGrammarResponse { error }))
    }

    async fn encode_images(
        &self,
        request: Request<worker::EncodeImagesRequest>,
    ) -> Result<Response<worker::EncodeImagesResponse>, Status> {
        let images = request.into_inner().images.into_iter().map(|image| Image::new(image.data)).collect();
        let mut is_overloaded = false;
        let (error, images) = match self.generator.encode_images(images).await {
            Ok(images) => (String::new(), images),
            Err(ImageError::Unusable(reason)) => (reason, Vec::new()),
            Err(ImageError::Overloaded(reason)) => {
                is_overloaded = true;
                (reason, Vec::new())
            }
            Err(error @ ImageError::Worker(_)) => return Err(Status::unavailable(error.to_string())),
        };
        let encoded = |EncodedImage { token_ids, num_bytes }| worker::EncodedImage { token_ids, num_bytes };
        let images = images.into_iter().map(encoded).collect();
        Ok(Response::new(worker::EncodeImagesResponse { error, images, is_overloaded }))
    }
}

fn adapter_list(served: &[ServedAdapter]) -> proto::AdapterList {
    let adapter = |served: &ServedAdapter| proto::Adapter { name: served.name.to_string(), hash: served.hash.to_vec() };
    proto::AdapterList { adapters: served.iter().map(adapter).collect() }
}
