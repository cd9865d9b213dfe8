//! Serves a started model: opens the listeners, watches the workers, drains, and stops them.

mod config;
mod ready;

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::future::{BoxFuture, join_all, select_all};
use penstock_router::config::ApiKeys;
use penstock_router::engine_server::{self, EngineListener};
use penstock_router::generator::{Generator, RoutedQueue};
use penstock_router::remote::{Access, ServerDescription};
use penstock_router::replica::Replicas;
use penstock_router::telemetry::metrics::{self, Exporter};
use penstock_router::worker::Description;
use penstock_router::{Adapters, Services};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::listen::listener::{Reserved, ReservedPort};
use crate::model::adapter_download;
use crate::model::local::LocalModel;
use crate::phase::Phases;
use crate::resolve::SequenceLimits;
use crate::setup::Setup;
use crate::worker::supervisor::Supervisor;

/// Time limit for workers to exit. They drop their work, so this is ample.
const WORKER_GRACE: Duration = Duration::from_secs(10);

/// A model that is ready to serve.
pub(crate) struct Started {
    pub(crate) replicas: Replicas,
    /// One for each replica; none if the workers are on other servers.
    pub(crate) supervisors: Vec<Supervisor>,
    /// Its links to files are removed on drop.
    pub(crate) local: LocalModel,
    pub(crate) model: Description,
    pub(crate) limits: SequenceLimits,
    /// Blocks of all replicas together.
    pub(crate) num_blocks: usize,
    pub(crate) phases: Phases,
    /// Description for routers elsewhere; `None` without `--engine-listen`.
    pub(crate) description: Option<ServerDescription>,
    /// Keeps the replicas equal to those of `--replica-file`; `None` without it.
    pub(crate) follower: Option<BoxFuture<'static, Infallible>>,
}

/// Listeners of the server, and the secrets that clients and routers must show.
pub(crate) struct Entrances {
    pub(crate) listener: Reserved,
    pub(crate) api_keys: ApiKeys,
    /// The port of `--engine-listen`.
    pub(crate) engine: Option<ReservedPort>,
    /// The secret and the certificates of routers.
    pub(crate) access: Option<Access>,
}

/// Serves until `stop`, drains, and stops the workers. `began` is when the start began.
pub(crate) async fn serve(
    setup: Setup<'_>,
    mut started: Started,
    entrances: Entrances,
    began: Instant,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let Entrances { listener, api_keys, engine, access } = entrances;
    let config = config::config(setup, &started, api_keys)?;
    let exporter = Exporter::install(&config.limits)?;
    metrics::kv_pool(started.num_blocks, started.model.block_tokens);
    metrics::standby_groups(0);
    let place = listener.place();
    // The socket's file is removed when serving ends.
    let (listener, _socket_file) = listener.open()?;
    let routed_queue = RoutedQueue::default();
    let grace = setup.settings.graceful_termination_timeout;
    let engine = match (engine, access, started.description.take()) {
        (Some(port), Some(access), Some(description)) => {
            let queue = routed_queue.clone();
            Some(EngineListener { listener: open_engine(port, &access)?, access, description, grace, queue })
        }
        _ => None,
    };
    ready::log(&started, began.elapsed(), &place, !config.api_keys.is_empty());
    // After a failure of the workers every open request has failed, so draining takes no time.
    let drain = stop.child_token();
    let Started { replicas, mut supervisors, local, follower, .. } = started;
    let LocalModel { text, folder: _folder, .. } = local;
    let (adapter_downloads, asked) = mpsc::channel(1);
    let generator: Arc<dyn Generator> = Arc::new(replicas.clone());
    let adapters = Adapters::new(&config.adapters, Arc::clone(&generator));
    let services = Services {
        engine: Arc::clone(&generator),
        text,
        metrics: exporter,
        adapters: adapters.clone(),
        adapter_downloads,
        routed_queue,
    };
    let watch = async {
        let reason = tokio::select! {
            reason = failure(&replicas, &mut supervisors) => reason,
            never = adapter_download::run(asked, setup.python, setup.args()) => match never {},
            never = or_never(follower) => match never {},
        };
        drain.cancel();
        reason
    };
    let served = Box::pin(async {
        let http = penstock_router::serve(config, services, listener, drain.clone());
        let engine = serve_engine(engine, generator, adapters, &drain);
        let (http, engine) = tokio::join!(http, engine);
        engine.and(http.map_err(Into::into))
    });
    let (served, failure) = join_until_served(served, watch).await;
    replicas.shut_down().await;
    join_all(supervisors.into_iter().map(|supervisor| supervisor.stop(WORKER_GRACE))).await;
    served?;
    failure.map_or(Ok(()), |reason| Err(anyhow::anyhow!(reason)))
}

/// Opens the port of `--engine-listen`.
fn open_engine(port: ReservedPort, access: &Access) -> anyhow::Result<TcpListener> {
    let scheme = if access.identity.is_some() { "https" } else { "http" };
    tracing::info!(engine = format!("{scheme}://{}", port.address), "routers can use this server's engine");
    Ok(port.open()?)
}

/// Serves routers until `drain`, and cancels it on failure; returns at once without `--engine-listen`.
async fn serve_engine(
    engine: Option<EngineListener>,
    generator: Arc<dyn Generator>,
    adapters: Adapters,
    drain: &CancellationToken,
) -> anyhow::Result<()> {
    let Some(engine) = engine else { return Ok(()) };
    let served = engine_server::serve(engine, generator, adapters, drain.clone()).await;
    drain.cancel();
    served.context("cannot serve --engine-listen")
}

/// Never resolves without a future.
async fn or_never(future: Option<BoxFuture<'static, Infallible>>) -> Infallible {
    match future {
        Some(future) => future.await,
        None => std::future::pending().await,
    }
}

/// Awaits `served`. Also returns the reason if the workers failed before that.
async fn join_until_served<T>(
    served: impl Future<Output = T>,
    failure: impl Future<Output = String>,
) -> (T, Option<String>) {
    let (mut served, mut failure) = (std::pin::pin!(served), std::pin::pin!(failure));
    tokio::select! {
        served = &mut served => (served, None),
        reason = &mut failure => (served.await, Some(reason)),
    }
}

/// Supervises the workers. Resolves when they cannot be restarted any more, with the best explanation there is.
async fn failure(replicas: &Replicas, supervisors: &mut [Supervisor]) -> String {
    if supervisors.is_empty() {
        return replicas.failure().await; // The workers are elsewhere.
    }
    let supervising = select_all(supervisors.iter_mut().map(|supervisor| Box::pin(supervisor.run())));
    let mut reason = tokio::select! {
        reason = replicas.failure() => reason,
        (never, ..) = supervising => match never {},
    };
    // A process that exited knows more than the engine's lost connection.
    for supervisor in supervisors {
        if let Some(exit) = supervisor.exit_reason().await.filter(|exit| !reason.contains(exit)) {
            reason = format!("{reason}; {exit}");
        }
    }
    reason
}
