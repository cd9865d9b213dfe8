//! Several engines with the same model as one, here or on other servers: each request goes to the engine that has the most of its prefix or
//! the least work, and the sequences of an engine that loses its workers, or that leaves, continue in the others
//! (docs/adr/replicas-and-routing.md).

mod encoding;
mod engine_set;
mod list;
mod prefix;
mod routing;
#[cfg(test)]
mod simulation;
mod slowness;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use futures::future::{BoxFuture, join_all, select_all, try_join_all};
use futures::{FutureExt, TryFutureExt};
use penstock_scheduler::{SequenceId, Stats};
use tokio::sync::watch;

use crate::engine::{Engine, EngineOptions, Handover, MovingSequence, RemoteOptions, RestartGroup};
use crate::generator::{Generator, Health, MAX_ENGINES, ReplicaReport, Routed, SequenceStream};
use crate::remote::ServerDescription;
use crate::sequence::{
    Adapter, AdapterError, AdapterHash, EncodedImage, Grammar, GrammarError, Image, ImageError, SequenceEvent,
    SequenceFailure, SequenceRequest,
};
use crate::worker::Group;
use list::List;
use routing::{CacheShape, Routing};

/// What an engine is started with: its first worker group, and who starts the next ones.
pub type Start = (Group, Arc<dyn RestartGroup>);

/// The running engines. Clones share them; they end with `shut_down`.
#[derive(Clone)]
pub struct Replicas(Arc<Shared>);

struct Shared {
    /// Reading it blocks changes, so a sequence is never submitted to an engine that has left.
    list: watch::Sender<List>,
    /// Whether there is one engine for ever. It needs no routing.
    is_alone: bool,
    routing: Mutex<Routing>,
    /// The next id, for sequences of all engines.
    next_id: AtomicU64,
}

/// Gives the sequences of one engine to the others.
struct ToOthers {
    shared: Weak<Shared>,
    engine: usize,
}

impl Replicas {
    /// The most engines that there can be.
    pub const MAX_ENGINES: usize = MAX_ENGINES;

    /// Starts an engine for each group. `options` are those of each of them.
    pub fn start(groups: Vec<Start>, options: EngineOptions) -> Self {
        let limits = &options.limits;
        let cache = CacheShape {
            block_tokens: limits.block_tokens as usize,
            num_blocks: limits.num_blocks as usize + limits.num_slots(),
            prefix_caching: limits.prefix_caching,
        };
        let is_alone = groups.len() == 1;
        let replicas = Self::empty(cache, is_alone);
        replicas.0.list.send_modify(|list| {
            for (group, restart) in groups {
                let start = |handover| Engine::start(group, options, restart, (!is_alone).then_some(handover));
                replicas.add(list, String::new(), start);
            }
        });
        replicas
    }

    /// Connects to `servers`. `description` is that of any of them; it sizes the prefix index.
    pub fn connect(servers: Vec<RemoteOptions>, description: &ServerDescription) -> Self {
        let cache = CacheShape {
            block_tokens: description.model.block_tokens as usize,
            num_blocks: (description.num_blocks + description.num_slots) as usize,
            prefix_caching: description.prefix_caching,
        };
        let replicas = Self::empty(cache, false);
        replicas.set_servers(&servers);
        replicas
    }

    /// Makes `servers` the ones that are used: connects to new ones, and lets the sequences of the others move on before their connections end.
    /// Returns the servers for which there is no number until others have left; call it again for them. Until one of `servers` has a number,
    /// one of the others stays. An empty list changes nothing.
    pub fn set_servers(&self, servers: &[RemoteOptions]) -> Vec<String> {
        let mut refused = Vec::new();
        if servers.is_empty() {
            return refused;
        }
        self.0.list.send_if_modified(|list| {
            let is_kept = |name: &str| servers.iter().any(|server| server.remote.url() == name);
            let mut num_new = 0;
            for server in servers.iter().filter(|server| !list.has(server.remote.url())).cloned().collect::<Vec<_>>() {
                let name = server.remote.url().to_owned();
                let number = self.add(list, name.clone(), |handover| Engine::connect(server, Some(handover)));
                let Some(number) = number else {
                    refused.push(name);
                    continue;
                };
                tracing::info!("replica {number} is {name}");
                if let Some(new) = list.get(number) {
                    self.remove_when_left(number, name, new.engine.clone());
                }
                num_new += 1;
            }
            let left = list.leave(|name| !is_kept(name));
            for (number, name) in &left {
                let num_sequences = self.0.routing().num_sequences(*number);
                tracing::info!(
                    "replica {number} ({name}) was removed from the list; its {num_sequences} sequences move"
                );
            }
            num_new + left.len() > 0
        });
        refused
    }

    fn empty(cache: CacheShape, is_alone: bool) -> Self {
        let routing = Mutex::new(Routing::new(cache));
        Self(Arc::new(Shared {
            list: watch::Sender::new(List::default()),
            is_alone,
            routing,
            next_id: AtomicU64::new(1),
        }))
    }

    /// Adds the engine that `start` makes, and returns its number. `None`: there is no place for it.
    fn add(&self, list: &mut List, name: String, start: impl FnOnce(Arc<dyn Handover>) -> Engine) -> Option<usize> {
        let number = list.free_number()?;
        list.insert(number, name, start(Arc::new(ToOthers { shared: Arc::downgrade(&self.0), engine: number })));
        self.0.routing().add_engine(number);
        Some(number)
    }

    /// Frees the engine's number once it has left. An engine that ended by itself stays in the list, which thus is never empty.
    fn remove_when_left(&self, number: usize, name: String, engine: Engine) {
        let (shared, mut list) = (Arc::downgrade(&self.0), self.0.list.subscribe());
        tokio::spawn(async move {
            engine.ended().await;
            if list.wait_for(|list| list.is_leaving(number)).await.is_err() {
                return;
            }
            if let Some(shared) = shared.upgrade() {
                // First, because the number may be used again as soon as it is free.
                shared.routing().remove_engine(number);
                shared.list.send_modify(|list| list.remove(number));
                tracing::info!("replica {number} ({name}) has left");
            }
        });
    }

    /// Resolves when an engine takes steps, or no engine ever will.
    pub async fn ready(&self) {
        let mut list = self.0.list.subscribe();
        loop {
            let engines = list.borrow_and_update().engines();
            if self.health().is_healthy() || self.health().is_permanent() {
                return;
            }
            let changes = engines.iter().filter(|engine| !engine.health().is_permanent());
            let settled: Vec<_> = changes.map(|engine| engine.settled().boxed()).collect();
            if settled.is_empty() {
                // The sender is in `self`.
                let _ = list.changed().await;
                continue;
            }
            tokio::select! {
                _ = select_all(settled) => {}
                _ = list.changed() => {}
            }
        }
    }

    /// Resolves with the reasons when every engine has failed for good; never when they were shut down before.
    pub async fn failure(&self) -> String {
        let mut list = self.0.list.subscribe();
        loop {
            let engines = list.borrow_and_update().engines();
            tokio::select! {
                mut reasons = join_all(engines.iter().map(Engine::failure)), if !engines.is_empty() => {
                    reasons.dedup();
                    return reasons.join("; ");
                }
                _ = list.changed() => {}
            }
        }
    }

    /// Ends open sequences with `ShuttingDown`; returns when every engine has ended.
    pub async fn shut_down(&self) {
        let engines = self.engines();
        join_all(engines.iter().map(Engine::shut_down)).await;
    }

    fn engines(&self) -> Vec<Engine> {
        self.0.list.borrow().engines()
    }

    /// The only engine that there will ever be.
    fn alone(&self) -> Option<Engine> {
        self.0.is_alone.then(|| self.engines().pop()).flatten()
    }

    /// Does the same in every engine that takes steps, at least in one; waits until there is one. An engine that stops taking steps
    /// meanwhile is not waited for. The error is the first one.
    fn in_all<T: Send + 'static, E: Send + 'static>(
        &self,
        act: impl Fn(&Engine) -> BoxFuture<'static, Result<T, E>> + Send + Sync + 'static,
    ) -> BoxFuture<'static, Result<Vec<T>, E>> {
        let replicas = self.clone();
        let all = async move {
            if let Some(engine) = replicas.alone() {
                return act(&engine).await.map(|one| vec![one]);
            }
            loop {
                replicas.ready().await;
                let engines = replicas.engines();
                if replicas.health().is_permanent() {
                    return try_join_all(engines.iter().take(1).map(&act)).await;
                }
                let act = |engine: &Engine| {
                    let (act, engine) = (act(engine), engine.clone());
                    async move {
                        tokio::select! {
                            result = act => result.map(Some),
                            () = engine.paused() => Ok(None),
                        }
                    }
                };
                let able = engines.iter().filter(|engine| engine.health().is_healthy());
                let done: Vec<_> = try_join_all(able.map(act)).await?.into_iter().flatten().collect();
                if !done.is_empty() {
                    return Ok(done);
                }
            }
        };
        all.boxed()
    }
}

impl Generator for Replicas {
    fn submit(&self, request: SequenceRequest) -> SequenceStream {
        match self.alone() {
            Some(engine) => engine.submit(request),
            None => self.0.submit(request),
        }
    }

    fn compile_grammar(&self, grammar: &Grammar) -> BoxFuture<'static, Result<(), GrammarError>> {
        let grammar = grammar.clone();
        self.in_all(move |engine| engine.compile_grammar(&grammar)).map_ok(drop).boxed()
    }

    fn load_adapter(&self, adapter: Adapter, unloaded_ids: Vec<u64>) -> BoxFuture<'static, Result<(), AdapterError>> {
        self.in_all(move |engine| engine.load_adapter(adapter.clone(), unloaded_ids.clone())).map_ok(drop).boxed()
    }

    fn adapter_hash(&self, name: &str) -> Option<AdapterHash> {
        self.0.list.borrow().adapter(name)
    }

    fn adapter_names(&self) -> Vec<Arc<str>> {
        self.0.list.borrow().adapter_names().into_iter().collect()
    }

    fn encode_images(&self, images: Vec<Image>) -> BoxFuture<'static, Result<Vec<EncodedImage>, ImageError>> {
        match self.alone() {
            Some(engine) => engine.encode_images(images),
            None => encoding::encode(Arc::clone(&self.0), images).boxed(),
        }
    }

    /// Healthy if any engine is; otherwise that of the engine that is closest to it.
    fn health(&self) -> Health {
        let mut all: Vec<_> = self.engines().iter().map(Engine::health).collect();
        all.sort_by_key(|health| (!health.is_healthy(), health.is_permanent(), *health == Health::Leaving));
        all.into_iter().next().unwrap_or(Health::ShutDown)
    }

    fn stats(&self) -> Stats {
        self.engines().iter().map(Engine::stats).sum()
    }

    fn replicas(&self) -> Vec<ReplicaReport> {
        if self.0.is_alone {
            return Vec::new();
        }
        let list = self.0.list.borrow();
        let routing = self.0.routing();
        let report = |(number, routed): (usize, Routed)| {
            let engine = list.get(number).map(|replica| &replica.engine);
            ReplicaReport {
                number,
                is_healthy: engine.map(|engine| engine.health().is_healthy()),
                stats: engine.map(Engine::stats).unwrap_or_default(),
                routed,
                seconds_per_token: engine.and_then(Engine::seconds_per_token),
            }
        };
        routing.routed().iter().copied().enumerate().map(report).collect()
    }
}

impl Shared {
    fn submit(self: &Arc<Self>, request: SequenceRequest) -> SequenceStream {
        let id = SequenceId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let shared = Arc::downgrade(self);
        let mut work = Work { shared, id, is_waiting: Arc::default(), num_tokens: 0, is_complete: false };
        let list = self.list.borrow();
        let candidates = list.candidates(request.adapter_hash.as_ref());
        let engine = (!candidates.is_empty()).then(|| {
            let mut routing = self.routing();
            routing.observe_speed(&list.speeds(&candidates));
            let engine = routing.place(id, &request, &candidates);
            work.is_waiting = routing.is_waiting(id);
            engine
        });
        let Some(replica) = engine.and_then(|engine| list.get(engine)) else {
            return SequenceStream::failed(SequenceFailure::Worker("there is no replica for it".to_owned()));
        };
        replica.engine.submit_as(id, request).observed(move |event| work.observe(event))
    }

    fn routing(&self) -> MutexGuard<'_, Routing> {
        // A panic leaves counts that are a little off, which only makes choices worse.
        self.routing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Handover for ToOthers {
    fn hand_over(&self, sequences: Vec<MovingSequence>, has_lost_cache: bool) -> Vec<MovingSequence> {
        let Some(shared) = self.shared.upgrade() else { return sequences };
        if has_lost_cache {
            shared.routing().forget_prefixes(self.engine);
        }
        let list = shared.list.borrow();
        let is_open = |number: &usize| *number != self.engine && list.takes_steps(*number);
        let adopt = |sequence: MovingSequence| {
            let request = sequence.request();
            let candidates = list.candidates(request.adapter_hash.as_ref());
            let open: Vec<_> = candidates.into_iter().filter(is_open).collect();
            let engine = shared.routing().replace(sequence.id(), &request, &open);
            let Some(replica) = engine.and_then(|engine| list.get(engine)) else { return Some(sequence) };
            replica.engine.adopt(sequence);
            None
        };
        sequences.into_iter().filter_map(adopt).collect()
    }
}

/// What one sequence adds to the work of its engine, as its stream shows it.
struct Work {
    shared: Weak<Shared>,
    id: SequenceId,
    /// For the first token from its engine. True again when the sequence has moved.
    is_waiting: Arc<AtomicBool>,
    num_tokens: u64,
    is_complete: bool,
}

impl Work {
    fn observe(&mut self, event: &SequenceEvent) {
        match event {
            SequenceEvent::Token(_) => {
                self.num_tokens += 1;
                if self.is_waiting.load(Ordering::Relaxed)
                    && let Some(shared) = self.shared.upgrade()
                {
                    shared.routing().prompt_computed(self.id);
                }
            }
            SequenceEvent::Finished(_) => self.is_complete = true,
            _ => {}
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        if let Some(shared) = self.shared.upgrade() {
            shared.routing().end(self.id, self.is_complete.then_some(self.num_tokens));
        }
    }
}
