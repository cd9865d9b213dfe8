//! The state that every handler shares.

use std::sync::Arc;

use super::envelope;
use super::response_store::ResponseStore;
use crate::api::error::ApiError;
use crate::config::Config;
use crate::generation::GenerationService;
use crate::generator::RoutedQueue;
use crate::telemetry::Traces;
use crate::telemetry::metrics::Exporter;

/// COMPAT: TGI's clients name the served model so.
pub(super) const SERVED: &str = "tgi";

/// Cheap to clone.
#[derive(Clone)]
pub(crate) struct Service {
    config: Arc<Config>,
    generation: GenerationService,
    metrics: Exporter,
    routed_queue: RoutedQueue,
    traces: Option<Traces>,
    responses: ResponseStore,
    /// Unix time in seconds.
    started: u64,
}

impl Service {
    pub(crate) fn new(
        config: Arc<Config>,
        generation: GenerationService,
        metrics: Exporter,
        routed_queue: RoutedQueue,
        traces: Option<Traces>,
    ) -> Self {
        let responses = ResponseStore::new(config.max_stored_responses);
        Self { config, generation, metrics, routed_queue, traces, responses, started: envelope::unix_seconds() }
    }

    pub(super) fn config(&self) -> &Config {
        &self.config
    }

    pub(super) fn generation(&self) -> &GenerationService {
        &self.generation
    }

    /// When the server started, as Unix time in seconds.
    pub(super) fn started(&self) -> u64 {
        self.started
    }

    /// The adapter that a request asks for by naming it as the model.
    pub(super) fn adapter_named(&self, asked: Option<&str>) -> Option<String> {
        asked.filter(|name| self.generation().adapters().contains(name)).map(str::to_owned)
    }

    /// The model's name in the answer to a request that asks for this one. `tgi` and no name mean the served model.
    pub(super) fn model_name(&self, asked: Option<&str>) -> Result<String, ApiError> {
        let config = self.config();
        if let Some(adapter) = self.adapter_named(asked) {
            return Ok(adapter);
        }
        match asked {
            Some(name)
                if config.checks_model_names() && !config.served_model_names.iter().any(|served| served == name) =>
            {
                Err(ApiError::UnknownModel { given: name.to_owned(), served: config.served_model_names.join(", ") })
            }
            None | Some(SERVED) => Ok(config.model_name().to_owned()),
            Some(name) => Ok(name.to_owned()),
        }
    }

    pub(super) fn responses(&self) -> &ResponseStore {
        &self.responses
    }

    /// The queue of finished spans, if the server records any.
    pub(super) fn traces(&self) -> Option<&Traces> {
        self.traces.as_ref()
    }

    /// Tokens, prompt and new ones, of all generations that wait for their first step, those of routers included.
    pub(super) fn queued_tokens(&self) -> u64 {
        self.generation.queued_tokens() + self.routed_queue.num_tokens()
    }

    pub(super) fn metrics(&self) -> &Exporter {
        &self.metrics
    }
}
