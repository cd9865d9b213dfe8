//! Serves requests until shutdown, then drains.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::generation::{AdapterDownload, Adapters, GenerationService};
use crate::generator::{Generator, RoutedQueue};
use crate::http::connection::{self, App};
use crate::http::{self, Listener, OriginError, Service};
use crate::telemetry::metrics::Exporter;
use crate::telemetry::{Traces, TracesError};
use crate::text::TextModel;

/// How often recorded metric samples are folded into histogram buckets.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);
/// How long connections may take to send their last bytes after the grace period, and then the last traces to be exported.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);

/// The components that requests are served with.
pub struct Services {
    /// Generates token sequences.
    pub engine: Arc<dyn Generator>,
    /// Tokenizer and chat template.
    pub text: TextModel,
    /// Renders `/metrics`.
    pub metrics: Exporter,
    /// What requests may name besides the model.
    pub adapters: Adapters,
    /// Takes the downloads of adapters that clients name by their ids on the hub.
    pub adapter_downloads: mpsc::Sender<AdapterDownload>,
    /// What routers elsewhere have queued here; empty without an engine listener.
    pub routed_queue: RoutedQueue,
}

/// Why the server cannot start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// `--cors-allow-origin` is invalid.
    #[error(transparent)]
    Origin(#[from] OriginError),
    /// The trace exporter cannot be set up.
    #[error(transparent)]
    Traces(#[from] TracesError),
}

/// Serves until `shutdown` is cancelled. Then the server is unhealthy and admits no request; running requests may finish
/// within the grace period, and those that remain end with an error.
pub async fn serve(
    config: Config,
    services: Services,
    listener: Listener,
    shutdown: CancellationToken,
) -> Result<(), ServeError> {
    let grace = config.graceful_termination_timeout;
    let abandoned = CancellationToken::new();
    let closing = CancellationToken::new();
    let (vertex_routes, limits) = (config.vertex_routes.clone(), config.connections);
    let Services { engine, text, metrics, adapters, adapter_downloads, routed_queue } = services;
    let traces = config.traces.as_ref().map(|traces| Traces::start(traces, config.model_name())).transpose()?;
    let config = Arc::new(config);
    let (draining, failing) = (shutdown.clone(), abandoned.clone());
    let generation =
        GenerationService::new(Arc::clone(&config), engine, text, adapters, adapter_downloads, draining, failing);
    let service = Service::new(config, generation.clone(), metrics.clone(), routed_queue, traces.clone());
    let router = http::router(service)?;
    let app = App { router, vertex_routes, limits };
    let upkeep = tokio::spawn(run_upkeep(metrics, closing.clone()));
    let served = connection::serve(listener, app, closing.clone());

    let drain = async {
        shutdown.cancelled().await;
        tracing::info!("draining: no new requests");
        if tokio::time::timeout(grace, generation.drained()).await.is_err() {
            tracing::warn!(grace_s = grace.as_secs_f64(), "requests are still running after the grace period");
        }
        abandoned.cancel();
        // The port stays open until here, so that /health can report the shutdown.
        closing.cancel();
        tokio::time::sleep(FLUSH_TIMEOUT).await;
    };
    tokio::select! {
        () = served => {}
        () = drain => {}
    }
    closing.cancel();
    // Ends at once, because it waits only for `closing`.
    let _ = upkeep.await;
    if let Some(traces) = traces {
        traces.shut_down(FLUSH_TIMEOUT).await;
    }
    Ok(())
}

async fn run_upkeep(metrics: Exporter, closing: CancellationToken) {
    let mut ticks = tokio::time::interval(UPKEEP_INTERVAL);
    while closing.run_until_cancelled(ticks.tick()).await.is_some() {
        metrics.run_upkeep();
    }
}
