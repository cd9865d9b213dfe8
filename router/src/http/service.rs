//! The state that every handler shares.

use std::sync::Arc;

use super::responses::ResponseStore;
use crate::config::Config;
use crate::generation::GenerationService;
use crate::telemetry::metrics::Exporter;

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct Service {
    config: Arc<Config>,
    generation: GenerationService,
    metrics: Exporter,
    responses: ResponseStore,
}

impl Service {
    pub(crate) fn new(config: Arc<Config>, generation: GenerationService, metrics: Exporter) -> Self {
        let responses = ResponseStore::new(config.max_stored_responses);
        Self { config, generation, metrics, responses }
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    pub(super) fn generation(&self) -> &GenerationService {
        &self.generation
    }

    pub(super) fn responses(&self) -> &ResponseStore {
        &self.responses
    }

    pub(super) fn metrics(&self) -> &Exporter {
        &self.metrics
    }
}
