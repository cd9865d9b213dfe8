//! The workers of a server that is ready: their deaths, and others in their place.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::BoxFuture;
use penstock_router::engine::{RestartError, RestartGroup, RestartTimes, Restarted};
use penstock_router::worker::{Group, LoadOptions, WarmUpOptions};
use tokio::sync::{mpsc, oneshot};

use crate::fork_server::ForkServer;
use crate::reserve::{Reserve, ReserveEvent};
use crate::start::{self, StartError};
use crate::workers::{WorkerOptions, Workers};

/// How long to wait for a lost worker's own explanation. A dead process has given it by then.
const EXPLANATION_PATIENCE: Duration = Duration::from_millis(100);

/// When workers have been ready for so long, others are started that wait to take their place: loading takes what their
/// first steps need.
const RESERVE_DELAY: Duration = Duration::from_secs(1);
/// After those in reserve died, as when memory was short.
const RESERVE_RETRY: Duration = Duration::from_secs(60);

/// How to make a group like the first one.
pub struct Recipe {
    pub workers: WorkerOptions,
    /// The rendezvous is each group's own.
    pub load: LoadOptions,
    /// With as many blocks as the first group has; what that one has proven is not proven again.
    pub warm_up: WarmUpOptions,
    /// Of all ranks; `None`: there is no room for a second copy beside the first.
    pub weight_bytes: Option<u64>,
}

/// A group that has its weights.
pub struct Loaded {
    pub group: Group,
    /// When it answered.
    pub connected: Instant,
}

pub type Loading = BoxFuture<'static, Result<Loaded, StartError>>;

impl Recipe {
    /// Connects to workers that were spawned, and loads the model.
    pub fn load(&self, workers: &Workers) -> Loading {
        let sockets = workers.sockets().to_vec();
        let load = LoadOptions { rendezvous: workers.rendezvous(), ..self.load.clone() };
        let loading = async move {
            let mut group = start::connect(&sockets).await?;
            let connected = Instant::now();
            group.load(&load).await?;
            Ok(Loaded { group, connected })
        };
        loading.boxed()
    }
}

/// Owns the processes. Lives on the main thread (see `process::python_module`), and the engine asks it from another.
pub struct Supervisor {
    recipe: Recipe,
    fork_server: ForkServer,
    /// `None`: they are gone, and others could not be started.
    workers: Option<Workers>,
    reserve: Option<Reserve>,
    /// `None`: there is one, or none can be.
    reserve_due: Option<Instant>,
    num_groups: usize,
    requests: mpsc::UnboundedReceiver<Request>,
    /// Of the workers that died last, unless others were started since.
    last_words: Option<String>,
}

type Answer = Result<Restarted, RestartError>;
type Request = oneshot::Sender<Answer>;

/// The engine's side.
pub struct Restarter {
    requests: mpsc::UnboundedSender<Request>,
}

impl RestartGroup for Restarter {
    fn restart(&self) -> BoxFuture<'static, Answer> {
        let (request, answer) = oneshot::channel();
        // Where nobody listens any more, nobody answers.
        let _ = self.requests.send(request);
        let stopping = || RestartError("the server is shutting down".to_owned());
        answer.map(move |answer| answer.unwrap_or_else(|_| Err(stopping()))).boxed()
    }
}

impl Supervisor {
    /// `workers` are the first group, forked by `fork_server`.
    pub fn new(recipe: Recipe, fork_server: ForkServer, workers: Workers) -> (Self, Restarter) {
        let (sender, requests) = mpsc::unbounded_channel();
        let supervisor = Self {
            recipe,
            fork_server,
            workers: Some(workers),
            reserve: None,
            reserve_due: Some(Instant::now() + RESERVE_DELAY),
            num_groups: 1,
            requests,
            last_words: None,
        };
        (supervisor, Restarter { requests: sender })
    }

    /// Restarts when asked. To be dropped when the server has ended.
    pub async fn run(&mut self) -> Infallible {
        loop {
            tokio::select! {
                words = death(self.workers.as_mut()) => self.bury(words),
                event = next_event(self.reserve.as_mut()) => match event {
                    ReserveEvent::Ready => tracing::info!("workers are in reserve"),
                    ReserveEvent::Lost(reason) => {
                        tracing::info!("no workers are in reserve any more: {reason}");
                        self.reserve = None;
                        self.reserve_due = Some(Instant::now() + RESERVE_RETRY);
                    }
                },
                () = sleep_until(self.reserve_due) => self.start_reserve(),
                Some(mut request) = self.requests.recv() => {
                    tokio::select! {
                        answer = self.restart() => {
                            // An error means that the engine has given up.
                            let _ = request.send(answer);
                        }
                        () = request.closed() => {}
                    }
                }
            }
        }
    }

    /// What the workers said that died last, unless others took their place.
    pub async fn last_words(&mut self) -> Option<String> {
        if self.last_words.is_none()
            && let Some(workers) = &mut self.workers
        {
            self.last_words = start::last_words(workers).await;
        }
        self.last_words.take()
    }

    /// Asks the workers to end, and kills what has not after `grace`.
    pub async fn stop(self, grace: Duration) {
        drop(self.reserve);
        if let Some(workers) = self.workers {
            workers.stop(grace).await;
        }
        self.fork_server.stop().await;
    }

    fn start_reserve(&mut self) {
        self.reserve_due = None;
        match Reserve::start(&self.recipe, &mut self.fork_server, self.num_groups) {
            Ok(reserve) => {
                self.num_groups += 1;
                self.reserve = Some(reserve);
            }
            Err(reason) => tracing::info!("no workers are kept in reserve: {reason}"),
        }
    }

    fn bury(&mut self, words: String) {
        tracing::warn!("{words}");
        self.last_words = Some(words);
        if let Some(workers) = &self.workers {
            // Then the engine notices as well, whoever still holds the dead one's socket.
            workers.disband();
        }
    }

    async fn restart(&mut self) -> Answer {
        let mut times = RestartTimes::default();
        let mut lap = Lap::start();
        if let Some(mut workers) = self.workers.take() {
            if self.last_words.is_none()
                && let Ok(words) = tokio::time::timeout(EXPLANATION_PATIENCE, workers.death()).await
            {
                tracing::warn!("{words}");
            }
            if !workers.kill().await {
                self.fork_server.abandon().await;
            }
        }
        self.last_words = None;
        self.reserve_due = None;
        times.stop = lap.next();
        let reserve = self.reserve.take().filter(Reserve::is_alive);
        let (workers, loading) = match reserve {
            Some(reserve) => reserve.into_parts(),
            None => {
                let workers = Workers::spawn(&self.recipe.workers, &mut self.fork_server, self.num_groups);
                self.num_groups += 1;
                let workers = workers.map_err(|error| RestartError(error.to_string()))?;
                let loading = self.recipe.load(&workers);
                (workers, loading)
            }
        };
        let workers = self.workers.insert(workers);
        times.spawn = lap.next();
        let warm_up = self.recipe.warm_up;
        let prepare = async {
            let Loaded { mut group, connected } = loading.await?;
            times.connect = lap.until(connected);
            times.load = lap.next();
            let pool = group.warm_up(&warm_up).await?;
            times.warm_up = lap.next();
            match warm_up.num_blocks {
                Some(promised) if u64::from(pool.num_blocks) < promised => {
                    let num_blocks = pool.num_blocks;
                    Err(StartError::Died(format!("they have {num_blocks} KV blocks, the first ones had {promised}")))
                }
                _ => Ok(group),
            }
        };
        let group = start::while_alive(workers, prepare).await.map_err(|error| RestartError(error.to_string()))?;
        self.reserve_due = Some(Instant::now() + RESERVE_DELAY);
        Ok(Restarted { group, times })
    }
}

async fn death(workers: Option<&mut Workers>) -> String {
    match workers {
        Some(workers) => workers.death().await,
        None => std::future::pending().await,
    }
}

async fn next_event(reserve: Option<&mut Reserve>) -> ReserveEvent {
    match reserve {
        Some(reserve) => reserve.next_event().await,
        None => std::future::pending().await,
    }
}

async fn sleep_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due.into()).await,
        None => std::future::pending().await,
    }
}

/// Time between one call and the next.
struct Lap {
    since: Instant,
}

impl Lap {
    fn start() -> Self {
        Self { since: Instant::now() }
    }

    fn next(&mut self) -> Duration {
        self.until(Instant::now())
    }

    /// None, if that was before.
    fn until(&mut self, end: Instant) -> Duration {
        let end = end.max(self.since);
        end - std::mem::replace(&mut self.since, end)
    }
}
