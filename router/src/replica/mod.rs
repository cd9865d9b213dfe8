//! Several engines with the same model as one, here or on other servers: each request goes to the engine that has the most of its prefix or the least
//! work, and the sequences of an engine that loses its workers continue in the others (docs/adr/0073, 0085).

mod encoding;
mod prefix;
mod routing;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use futures::future::{BoxFuture, join_all, select_all, try_join_all};
use futures::{FutureExt, TryFutureExt};
use penstock_scheduler::{SequenceId, Stats};

use crate::engine::{
    Engine, EngineOptions, Generator, Handover, Health, MovingSequence, RemoteOptions, RestartGroup, SequenceStream,
};
use crate::remote::ServerDescription;
use crate::sequence::{
    Adapter, AdapterError, Grammar, GrammarError, Image, ImageError, SequenceEvent, SequenceRequest,
};
use crate::worker::Group;
use routing::{CacheShape, Routing};

/// What an engine is started with: its first worker group, and who starts the next ones.
pub type Start = (Group, Arc<dyn RestartGroup>);

/// The running engines. Clones share them; they end with `shut_down`.
#[derive(Clone)]
pub struct Replicas(Arc<Shared>);

struct Shared {
    engines: Vec<Engine>,
    routing: Mutex<Routing>,
    /// Of all engines.
    next_id: AtomicU64,
}

/// Gives the sequences of one engine to the others.
struct ToOthers {
    shared: Weak<Shared>,
    engine: usize,
}

impl Replicas {
    /// The most engines that there can be.
    pub const MAX_ENGINES: usize = prefix::MAX_ENGINES;

    /// Starts an engine for each group. `options` are those of each of them.
    pub fn start(groups: Vec<Start>, options: EngineOptions) -> Self {
        let limits = &options.limits;
        let cache = CacheShape {
            block_tokens: limits.block_tokens as usize,
            num_blocks: groups.len() * limits.num_blocks as usize,
            prefix_caching: limits.prefix_caching,
        };
        let start = |(group, restart), handover| Engine::start(group, options, restart, handover);
        Self::new(groups, cache, start)
    }

    /// Connects to `servers`. `description` is that of any of them; it sizes the prefix index.
    pub fn connect(servers: Vec<RemoteOptions>, description: &ServerDescription) -> Self {
        let cache = CacheShape {
            block_tokens: description.model.block_tokens as usize,
            num_blocks: servers.len() * description.num_blocks as usize,
            prefix_caching: description.prefix_caching,
        };
        Self::new(servers, cache, Engine::connect)
    }

    /// `start` makes an engine of each origin.
    fn new<T>(origins: Vec<T>, cache: CacheShape, start: impl Fn(T, Option<Arc<dyn Handover>>) -> Engine) -> Self {
        let num_engines = origins.len();
        Self(Arc::new_cyclic(|shared: &Weak<Shared>| {
            let start = |(engine, origin)| {
                let to_others = ToOthers { shared: shared.clone(), engine };
                start(origin, (num_engines > 1).then(|| Arc::new(to_others) as Arc<dyn Handover>))
            };
            let engines = origins.into_iter().enumerate().map(start).collect();
            let routing = Mutex::new(Routing::new(num_engines, cache));
            Shared { engines, routing, next_id: AtomicU64::new(1) }
        }))
    }

    /// Resolves when an engine takes steps, or no engine ever will.
    pub async fn ready(&self) {
        while !self.health().is_healthy() && !self.health().is_permanent() {
            let changes = self.0.engines.iter().filter(|engine| !engine.health().is_permanent());
            let changes: Vec<_> = changes.map(|engine| engine.settled().boxed()).collect();
            if !changes.is_empty() {
                select_all(changes).await;
            }
        }
    }

    /// Resolves with the reasons when every engine has failed for good; never when they were shut down before.
    pub async fn failure(&self) -> String {
        let mut reasons = join_all(self.0.engines.iter().map(Engine::failure)).await;
        reasons.dedup();
        reasons.join("; ")
    }

    /// Ends open sequences with `ShuttingDown`; returns when every engine has ended.
    pub async fn shut_down(&self) {
        join_all(self.0.engines.iter().map(Engine::shut_down)).await;
    }

    /// Does the same in every engine that takes steps, at least in one; waits until there is one. An engine that stops taking steps
    /// meanwhile is not waited for. The error is the first one.
    fn in_all<T: Send + 'static, E: Send + 'static>(
        &self,
        act: impl Fn(&Engine) -> BoxFuture<'static, Result<T, E>> + Send + Sync + 'static,
    ) -> BoxFuture<'static, Result<Vec<T>, E>> {
        let replicas = self.clone();
        let all = async move {
            let engines = &replicas.0.engines;
            if let [engine] = &engines[..] {
                return act(engine).await.map(|one| vec![one]);
            }
            loop {
                replicas.ready().await;
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
        let [engine] = &self.0.engines[..] else { return self.0.submit(request) };
        engine.submit(request)
    }

    fn compile_grammar(&self, grammar: &Grammar) -> BoxFuture<'static, Result<(), GrammarError>> {
        let grammar = grammar.clone();
        self.in_all(move |engine| engine.compile_grammar(&grammar)).map_ok(drop).boxed()
    }

    fn load_adapter(&self, adapter: Adapter, unloaded_ids: Vec<u64>) -> BoxFuture<'static, Result<(), AdapterError>> {
        self.in_all(move |engine| engine.load_adapter(adapter.clone(), unloaded_ids.clone())).map_ok(drop).boxed()
    }

    fn encode_images(&self, images: Vec<Image>) -> BoxFuture<'static, Result<Vec<Vec<u32>>, ImageError>> {
        let [engine] = &self.0.engines[..] else { return encoding::encode(Arc::clone(&self.0), images).boxed() };
        engine.encode_images(images)
    }

    /// Healthy if any engine is; otherwise that of the engine that is closest to it.
    fn health(&self) -> Health {
        let mut all: Vec<_> = self.0.engines.iter().map(Engine::health).collect();
        all.sort_by_key(|health| (!health.is_healthy(), health.is_permanent()));
        all.into_iter().next().unwrap_or(Health::ShutDown)
    }

    fn stats(&self) -> Stats {
        self.0.engines.iter().map(Engine::stats).sum()
    }
}

impl Shared {
    fn submit(self: &Arc<Self>, request: SequenceRequest) -> SequenceStream {
        let id = SequenceId(self.next_id.fetch_add(1, Ordering::Relaxed));
        let engine = self.routing().place(id, &request, |engine| self.takes_steps(engine));
        let mut work = Work { shared: Arc::downgrade(self), id, num_tokens: 0, is_complete: false };
        self.engines[engine].submit_as(id, request).observed(move |event| work.observe(event))
    }

    fn takes_steps(&self, engine: usize) -> bool {
        self.engines[engine].health().is_healthy()
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
        let is_open = |engine| engine != self.engine && shared.takes_steps(engine);
        let adopt = |sequence: MovingSequence| {
            let Some(engine) = shared.routing().replace(sequence.id(), is_open) else { return Some(sequence) };
            shared.engines[engine].adopt(sequence);
            None
        };
        sequences.into_iter().filter_map(adopt).collect()
    }
}

/// What one sequence adds to the work of its engine, as its stream shows it.
struct Work {
    shared: Weak<Shared>,
    id: SequenceId,
    num_tokens: u64,
    is_complete: bool,
}

impl Work {
    fn observe(&mut self, event: &SequenceEvent) {
        match event {
            SequenceEvent::Token(_) => {
                self.num_tokens += 1;
                if self.num_tokens == 1
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
