//! What every handler works with.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use super::admission::Admission;
use crate::config::Config;
use crate::engine::Generator;
use crate::telemetry::metrics::Exporter;
use crate::text::TextModel;

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct Service {
    inner: Arc<Inner>,
}

struct Inner {
    config: Config,
    generator: Arc<dyn Generator>,
    text: TextModel,
    metrics: Exporter,
    admission: Admission,
    draining: CancellationToken,
    abandoned: CancellationToken,
}

impl Service {
    /// `draining`: not healthy any more, nobody new comes in. `abandoned`: what still runs fails.
    pub(crate) fn new(
        config: Config,
        services: crate::Services,
        draining: CancellationToken,
        abandoned: CancellationToken,
    ) -> Self {
        let admission =
            Admission::new(config.limits.max_concurrent_requests, config.queue.max_tokens, draining.clone());
        let crate::Services { engine: generator, text, metrics } = services;
        Self { inner: Arc::new(Inner { config, generator, text, metrics, admission, draining, abandoned }) }
    }

    pub(super) fn config(&self) -> &Config {
        &self.inner.config
    }

    pub(super) fn generator(&self) -> &dyn Generator {
        self.inner.generator.as_ref()
    }

    pub(super) fn text(&self) -> &TextModel {
        &self.inner.text
    }

    pub(super) fn metrics(&self) -> &Exporter {
        &self.inner.metrics
    }

    pub(super) fn admission(&self) -> &Admission {
        &self.inner.admission
    }

    pub(super) fn is_draining(&self) -> bool {
        self.inner.draining.is_cancelled()
    }

    pub(super) fn abandoned(&self) -> CancellationToken {
        self.inner.abandoned.clone()
    }

    /// Returns when no request is generating any more.
    pub(crate) async fn drained(&self) {
        self.inner.admission.drained().await;
    }

    pub(crate) fn run_upkeep(&self) {
        self.inner.metrics.run_upkeep();
    }
}
