//! Supervises the workers of a running server: reaps groups that fail and replaces them.

use std::convert::Infallible;
use std::fmt::Display;
use std::time::{Duration, Instant};

use futures::FutureExt;
use futures::future::{self, BoxFuture};
use penstock_router::engine::{RestartError, RestartGroup, RestartTimes, Restarted};
use penstock_router::telemetry::metrics;
use penstock_router::worker::{HealthProbe, RankProgress};
use tokio::sync::{mpsc, oneshot};

use crate::worker::group::{self, EXIT_REASON_TIMEOUT, GroupError, Loaded, Recipe};
use crate::worker::host::Hosts;
use crate::worker::process::Workers;
use crate::worker::standby::{StandbyEvent, StandbyGroup};

/// A standby group starts this long after a group became ready, so that its load does not slow the first steps down, and once the
/// group's KV pool has its memory, so that only the rest counts as available.
const STANDBY_DELAY: Duration = Duration::from_secs(1);
/// Time limit of the question whether a group's KV pool has its memory.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// Delay after a standby group was lost, for example for want of memory.
const STANDBY_RETRY: Duration = Duration::from_secs(60);

/// Owns the worker processes. It runs on the main thread (see `python::module`); the engine's requests arrive over
/// a channel.
pub(crate) struct Supervisor {
    recipe: Recipe,
    hosts: Hosts,
    /// `None` after a failed restart.
    workers: Option<Workers>,
    /// Asks the current group.
    probe: HealthProbe,
    standby: Option<StandbyGroup>,
    /// Time at which a standby group starts; `None` if there is one, or if there can be none.
    standby_due: Option<Instant>,
    num_groups: usize,
    requests: mpsc::UnboundedReceiver<Request>,
    /// Reason for the current group's failure; `None` while it is alive or before its exit is seen.
    exit_reason: Option<String>,
}

type Answer = Result<Restarted, RestartError>;
type Request = oneshot::Sender<Answer>;

/// The engine's handle to the supervisor.
pub(crate) struct Restarter {
    requests: mpsc::UnboundedSender<Request>,
}

impl RestartGroup for Restarter {
    fn restart(&self) -> BoxFuture<'static, Answer> {
        let (request, answer) = oneshot::channel();
        // If the supervisor is gone, the answer's sender is dropped with the request.
        let _ = self.requests.send(request);
        let stopping = || RestartError("the server is shutting down".to_owned());
        answer.map(move |answer| answer.unwrap_or_else(|_| Err(stopping()))).boxed()
    }
}

impl Supervisor {
    /// `workers` is the first group, forked by `hosts`; `probe` asks it.
    pub(crate) fn new(recipe: Recipe, hosts: Hosts, workers: Workers, probe: HealthProbe) -> (Self, Restarter) {
        let (sender, requests) = mpsc::unbounded_channel();
        let supervisor = Self {
            recipe,
            hosts,
            workers: Some(workers),
            probe,
            standby: None,
            standby_due: Some(Instant::now() + STANDBY_DELAY),
            num_groups: 1,
            requests,
            exit_reason: None,
        };
        (supervisor, Restarter { requests: sender })
    }

    /// Restarts the group when asked, and keeps a standby group. Drop the future when the server has stopped serving.
    pub(crate) async fn run(&mut self) -> Infallible {
        loop {
            tokio::select! {
                reason = or_never(self.workers.as_mut().map(Workers::exit)) => self.reap(reason),
                event = or_never(self.standby.as_mut().map(StandbyGroup::next_event)) => match event {
                    StandbyEvent::Ready => {
                        metrics::standby_groups(1);
                        tracing::info!("the standby group is ready");
                    }
                    StandbyEvent::Lost(reason) => {
                        let seconds = STANDBY_RETRY.as_secs();
                        tracing::info!("the standby group failed, the next one starts in {seconds} s: {reason}");
                        metrics::standby_groups(0);
                        self.standby = None;
                        self.standby_due = Some(Instant::now() + STANDBY_RETRY);
                    }
                },
                () = or_never(self.standby_due.map(|due| tokio::time::sleep_until(due.into()))) => {
                    self.start_standby().await;
                }
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

    /// Why the current group failed, if it did. Waits a moment for an exit that has not been seen yet.
    pub(crate) async fn exit_reason(&mut self) -> Option<String> {
        if self.exit_reason.is_none()
            && let Some(workers) = &mut self.workers
        {
            self.exit_reason = group::exit_reason(workers).await;
        }
        self.exit_reason.take()
    }

    /// Asks the workers to exit, and kills those that have not after `grace`.
    pub(crate) async fn stop(self, grace: Duration) {
        drop(self.standby);
        if let Some(workers) = self.workers {
            workers.stop(grace).await;
        }
        self.hosts.stop().await;
    }

    async fn start_standby(&mut self) {
        let has_its_memory = |rank: &Option<RankProgress>| rank.is_some_and(|rank| !rank.is_backing_pool);
        if !self.probe.progress(PROBE_TIMEOUT).await.iter().all(has_its_memory) {
            self.standby_due = Some(Instant::now() + STANDBY_DELAY);
            return;
        }
        self.standby_due = None;
        match StandbyGroup::start(&self.recipe, &mut self.hosts, self.num_groups) {
            Ok(standby) => {
                self.num_groups += 1;
                self.standby = Some(standby);
            }
            Err(reason) => tracing::info!("there is no standby group: {reason}"),
        }
    }

    /// Records a worker's exit and kills the rest of its group.
    fn reap(&mut self, reason: String) {
        tracing::warn!("{reason}");
        self.exit_reason = Some(reason);
        if let Some(workers) = &self.workers {
            // The engine then notices too: another process may still hold the dead worker's socket open.
            workers.kill_now();
        }
    }

    async fn restart(&mut self) -> Answer {
        let mut times = RestartTimes::default();
        let mut lap = Lap::start();
        if let Some(mut workers) = self.workers.take() {
            if self.exit_reason.is_none()
                && let Ok(reason) = tokio::time::timeout(EXIT_REASON_TIMEOUT, workers.exit()).await
            {
                tracing::warn!("{reason}");
            }
            if !workers.kill().await {
                self.hosts.abandon().await;
            }
        }
        self.exit_reason = None;
        self.standby_due = None;
        times.stop = lap.next();
        metrics::standby_groups(0);
        let (workers, loading) = match self.standby.take().and_then(StandbyGroup::into_ready) {
            Some((workers, loaded)) => (workers, future::ready(Ok(loaded)).boxed()),
            None => {
                let workers = Workers::spawn(&self.recipe.workers, &mut self.hosts, self.num_groups);
                self.num_groups += 1;
                let workers = workers.map_err(restart_error)?;
                let loading = self.recipe.load(&workers, false);
                (workers, loading)
            }
        };
        let workers = self.workers.insert(workers);
        times.spawn = lap.next();
        let recipe = &self.recipe;
        let prepare = async {
            let Loaded { mut group, connected } = loading.await?;
            times.connect = lap.until(connected);
            times.load = lap.next();
            recipe.warm_up(&mut group).await?;
            times.warm_up = lap.next();
            Ok::<_, GroupError>(group)
        };
        let group = group::run(workers, prepare).await.map_err(restart_error)?;
        self.probe = group.probe();
        self.standby_due = Some(Instant::now() + STANDBY_DELAY);
        Ok(Restarted { group, times })
    }
}

fn restart_error(error: impl Display) -> RestartError {
    RestartError(error.to_string())
}

/// Never resolves without a future.
async fn or_never<F: Future>(future: Option<F>) -> F::Output {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// Measures consecutive spans of time.
struct Lap {
    since: Instant,
}

impl Lap {
    fn start() -> Self {
        Self { since: Instant::now() }
    }

    /// Ends a span now and begins the next one.
    fn next(&mut self) -> Duration {
        self.until(Instant::now())
    }

    /// Ends a span at `end`; zero if the span began later than that.
    fn until(&mut self, end: Instant) -> Duration {
        let end = end.max(self.since);
        end - std::mem::replace(&mut self.since, end)
    }
}
