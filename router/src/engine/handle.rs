//! The engine as the rest of the program holds it: a cheap handle on the thread that runs the steps.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::BoxFuture;
use penstock_scheduler::{SequenceId, Stats};
use tokio::sync::mpsc::{self, UnboundedSender};
use tokio::sync::{oneshot, watch};

use super::adapter;
use super::command::Command;
use super::grammar::{self, Compiler};
use super::image;
use super::moving::{Handover, MovingSequence};
use super::options::{EngineOptions, RemoteOptions};
use super::owner::Owner;
use super::remote_loop::RemoteLoop;
use super::restart::RestartGroup;
use super::speed::Speed;
use super::step_loop::StepLoop;
use crate::generator::Generator;
use crate::generator::Health;
use crate::generator::SequenceStream;
use crate::generator::event_channel;
use crate::sequence::{
    Adapter, AdapterError, EncodedImage, Grammar, GrammarError, Image, ImageError, SequenceEvent, SequenceFailure,
    SequenceRequest, ServerAdapters,
};
use crate::worker::Group;

/// The running engine. Clones share it; it ends with `shut_down`, or when the last clone and stream are dropped.
#[derive(Clone)]
pub struct Engine {
    commands: UnboundedSender<Command>,
    next_id: Arc<AtomicU64>,
    health: watch::Receiver<Health>,
    stats: watch::Receiver<Stats>,
    adapters: watch::Receiver<Arc<ServerAdapters>>,
    compiler: watch::Receiver<Compiler>,
    speed: Speed,
}

impl Engine {
    /// Starts the thread that takes steps on `group`, and on those that `restart` starts each time that a group is lost. Until then,
    /// `handover` lets other engines continue its sequences.
    ///
    /// The thread has a runtime of its own, so that busy threads of the caller's runtime never delay a step. An engine whose
    /// thread cannot be started has failed: see `failure`.
    pub fn start(
        group: Group,
        options: EngineOptions,
        restart: Arc<dyn RestartGroup>,
        handover: Option<Arc<dyn Handover>>,
    ) -> Self {
        let (commands, receiver) = mpsc::unbounded_channel();
        let step_loop = StepLoop::new(options, restart, handover, receiver);
        let (health, stats) = step_loop.status().subscribe();
        let (adapters, speed) = (step_loop.status().adapters(), step_loop.status().speed().clone());
        let compiler = step_loop.compilers().subscribe();
        let thread = std::thread::Builder::new().name("penstock-engine".to_owned());
        let run = move || match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime.block_on(step_loop.run(group)),
            Err(error) => tracing::error!("cannot start the engine's runtime: {error}"),
        };
        if let Err(error) = thread.spawn(run) {
            tracing::error!("cannot start the engine's thread: {error}");
        }
        Self { commands, next_id: Arc::new(AtomicU64::new(1)), health, stats, adapters, compiler, speed }
    }

    /// Uses the engine of another server, from the current runtime. It never fails for good: a server that is lost may return.
    pub fn connect(options: RemoteOptions, handover: Option<Arc<dyn Handover>>) -> Self {
        let (commands, receiver) = mpsc::unbounded_channel();
        let remote_loop = RemoteLoop::new(options, handover, receiver);
        let (health, stats) = remote_loop.status().subscribe();
        let (adapters, speed) = (remote_loop.status().adapters(), remote_loop.status().speed().clone());
        let compiler = remote_loop.compilers().subscribe();
        tokio::spawn(remote_loop.run());
        Self { commands, next_id: Arc::new(AtomicU64::new(1)), health, stats, adapters, compiler, speed }
    }

    /// Resolves when the engine takes steps, or never will.
    pub(crate) async fn settled(&self) {
        // An error means that the engine has ended.
        let _ = self.health.clone().wait_for(|health| health.is_healthy() || health.is_permanent()).await;
    }

    /// Resolves when the engine takes no steps.
    pub(crate) async fn paused(&self) {
        let _ = self.health.clone().wait_for(|health| !health.is_healthy()).await;
    }

    /// Gives the sequences of an engine on another server to other engines, now and as soon as one takes them, and ends without them.
    /// Nothing may be submitted afterwards.
    pub(crate) fn leave(&self) {
        // An error means that it has ended.
        let _ = self.commands.send(Command::Leave);
    }

    /// Resolves when the engine has ended, with no sequence left.
    pub(crate) async fn ended(&self) {
        let _ = self.health.clone().wait_for(Health::is_permanent).await;
    }

    /// The adapters of the engine's server, also of one that is not connected at this moment; empty for workers here.
    pub(crate) fn server_adapters(&self) -> Arc<ServerAdapters> {
        Arc::clone(&self.adapters.borrow())
    }

    /// Mean time between two tokens of a sequence, if known.
    pub(crate) fn seconds_per_token(&self) -> Option<f64> {
        self.speed.seconds_per_token()
    }

    /// Resolves with the reason when the engine fails for good; never when it was shut down before.
    pub async fn failure(&self) -> String {
        let mut health = self.health.clone();
        let failed = health.wait_for(|health| matches!(health, Health::Failed(_))).await;
        match failed.as_deref() {
            Ok(Health::Failed(reason)) => reason.clone(),
            _ => {
                drop(failed);
                std::future::pending().await
            }
        }
    }

    /// `Generator::submit` with an id that no other sequence has, in none of the engines that this one hands sequences over to. An engine
    /// is used with this method or the other one.
    pub(crate) fn submit_as(&self, id: SequenceId, request: SequenceRequest) -> SequenceStream {
        // Bounded in effect: see `SequenceStream`.
        let (events, receiver) = event_channel();
        let (request, owner) = (Box::new(request), Arc::new(Owner::new(self.commands.clone())));
        let command = Command::Submit { id, request, events, owner: Arc::clone(&owner) };
        if let Err(refused) = self.commands.send(command)
            && let Command::Submit { events, .. } = refused.0
        {
            events.send(SequenceEvent::Failed(SequenceFailure::ShuttingDown));
        }
        SequenceStream::new(receiver, move || owner.abort(id))
    }

    /// Continues a sequence that another engine had. The order of its events is kept.
    pub(crate) fn adopt(&self, moving: MovingSequence) {
        let owner = moving.sequence.owner();
        // If it was aborted, it ends here.
        owner.replace(self.commands.clone(), || {
            if let Err(refused) = self.commands.send(Command::Adopt(Box::new(moving)))
                && let Command::Adopt(moving) = refused.0
            {
                moving.sequence.end(SequenceEvent::Failed(SequenceFailure::ShuttingDown));
            }
        });
    }

    /// Ends open sequences with `ShuttingDown` and closes the stream of steps; returns when that is done.
    pub async fn shut_down(&self) {
        let (done, wait) = oneshot::channel();
        if self.commands.send(Command::ShutDown { done }).is_ok() {
            // An error means that the loop has ended meanwhile.
            let _ = wait.await;
        }
    }
}

impl Generator for Engine {
    fn submit(&self, request: SequenceRequest) -> SequenceStream {
        self.submit_as(SequenceId(self.next_id.fetch_add(1, Ordering::Relaxed)), request)
    }

    fn compile_grammar(&self, grammar: &Grammar) -> BoxFuture<'static, Result<(), GrammarError>> {
        Box::pin(grammar::compile(self.compiler.clone(), grammar.clone()))
    }

    fn load_adapter(&self, adapter: Adapter, unloaded_ids: Vec<u64>) -> BoxFuture<'static, Result<(), AdapterError>> {
        Box::pin(adapter::load(self.compiler.clone(), adapter, unloaded_ids))
    }

    fn encode_images(&self, images: Vec<Image>) -> BoxFuture<'static, Result<Vec<EncodedImage>, ImageError>> {
        Box::pin(image::encode(self.compiler.clone(), images))
    }

    fn health(&self) -> Health {
        self.health.borrow().clone()
    }

    fn stats(&self) -> Stats {
        *self.stats.borrow()
    }
}
