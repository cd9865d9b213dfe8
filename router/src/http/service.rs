//! The state that every handler shares.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::generation::GenerationService;
use crate::telemetry::metrics::Exporter;

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct Service {
    config: Arc<Config>,
    generation: GenerationService,
    metrics: Exporter,
}

impl Service {
    /// Cancelling `draining` makes the server unhealthy and stops admission, cancelling `abandoned` fails whatever still
    /// runs.
    pub(crate) fn new(
        config: Config,
        services: crate::Services,
        draining: CancellationToken,
        abandoned: CancellationToken,
    ) -> Self {
        let config = Arc::new(config);
        let crate::Services { engine, text, metrics } = services;
        let generation = GenerationService::new(Arc::clone(&config), engine, text, draining, abandoned);
        Self { config, generation, metrics }
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn generation(&self) -> &GenerationService {
        &self.generation
    }

    pub(crate) fn metrics(&self) -> &Exporter {
        &self.metrics
    }
}
