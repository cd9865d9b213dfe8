//! Opens generations: the one path from a request to its running sequences.

use std::hash::RandomState;
use std::sync::Arc;
use std::time::Instant;

use penstock_scheduler::Stats;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::adapter::{AdapterUpdateError, Adapters};
use super::adapter_download::{AdapterDownload, AdapterPlace, download};
use super::admission::{Admission, Permit};
use super::context::Context;
use super::deadline::Deadlines;
use super::error::GenerationError;
use super::preparation::{Preparation, Prepared};
use super::request::GenerationRequest;
use super::running::{Generations, StartedPrompt};
use super::submission::Submission;
use super::validation::ValidationError;
use crate::config::Config;
use crate::fetch::Fetcher;
use crate::generator::{Generator, Health, ReplicaReport};
use crate::telemetry::RequestRecord;
use crate::text::TextModel;

/// What requests are generated with. Cheap to clone.
#[derive(Clone)]
pub(crate) struct GenerationService {
    context: Arc<Context>,
}

/// A checked request, with its place in the server.
struct Admitted {
    prompts: Vec<Prepared>,
    adapter_id: Option<String>,
    num_per_prompt: usize,
    deadlines: Deadlines,
    permit: Permit,
}

impl GenerationService {
    /// Cancelling `draining` stops admission, cancelling `abandoned` fails the generations that still run.
    pub(crate) fn new(
        config: Arc<Config>,
        generator: Arc<dyn Generator>,
        text: TextModel,
        adapters: Adapters,
        adapter_downloads: mpsc::Sender<AdapterDownload>,
        draining: CancellationToken,
        abandoned: CancellationToken,
    ) -> Self {
        let max_requests = config.limits.max_concurrent_requests;
        let admission = Admission::new(max_requests, config.queue.max_tokens, draining.clone());
        let fetcher = config.image_urls.clone().map(Fetcher::new);
        Self {
            context: Arc::new(Context {
                config,
                generator,
                text,
                admission,
                adapters,
                adapter_downloads,
                fetcher,
                draining,
                abandoned,
                salts: RandomState::new(),
            }),
        }
    }

    pub(super) fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn adapters(&self) -> &Adapters {
        &self.context.adapters
    }

    pub(crate) fn text(&self) -> &TextModel {
        &self.context.text
    }

    pub(crate) fn health(&self) -> Health {
        self.context.generator.health()
    }

    pub(crate) fn stats(&self) -> Stats {
        self.context.generator.stats()
    }

    pub(crate) fn replicas(&self) -> Vec<ReplicaReport> {
        self.context.generator.replicas()
    }

    /// Tokens, prompt and new ones, of all admitted generations that wait for their first step.
    pub(crate) fn queued_tokens(&self) -> u64 {
        self.context.admission.queued_tokens()
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.context.draining.is_cancelled()
    }

    /// Returns when no request holds a permit. Call it after `draining` is cancelled.
    pub(crate) async fn drained(&self) {
        self.context.admission.drained().await;
    }

    /// Starts all generations of a request. Every refusal happens here, before a stream's first byte.
    pub(crate) async fn start(
        &self,
        request: GenerationRequest,
        record: &RequestRecord,
    ) -> Result<Generations, GenerationError> {
        let (stop_text, streams) = (request.stop_text, request.streams);
        let Admitted { prompts, adapter_id, num_per_prompt, deadlines, permit } = self.admit(request, record).await?;
        // After the prompts, whose images may be fetched from slow hosts: other requests wait for the adapter's place.
        let adapter = match &adapter_id {
            Some(name) => Some(Arc::new(self.context.in_time(deadlines, self.adapters().lease(name)).await?)),
            None => None,
        };
        let submission = Submission { context: &self.context, adapter, stop_text, deadlines, record };
        let (prompts, running): (_, Vec<_>) = prompts.into_iter().map(|prompt| submission.submit(prompt)).unzip();
        let running = running.into_iter().flatten().collect();
        let mut generations = Generations { prompts, num_per_prompt, running, permit };
        if streams && self.context.config.queue.timeout.is_some() {
            generations.started().await?;
        }
        Ok(generations)
    }

    /// The prompts of a request that `start` would not refuse, each with the most tokens that it would generate.
    pub(crate) async fn render(
        &self,
        request: GenerationRequest,
        record: &RequestRecord,
    ) -> Result<Vec<(StartedPrompt, u32)>, GenerationError> {
        let admitted = self.admit(request, record).await?;
        Ok(admitted.prompts.into_iter().map(|prepared| (prepared.prompt, prepared.max_new_tokens)).collect())
    }

    /// Makes every check of a request, and reserves its place.
    async fn admit(&self, request: GenerationRequest, record: &RequestRecord) -> Result<Admitted, GenerationError> {
        let Context { config, admission, .. } = &*self.context;
        if let Some(pooling) = &config.pooling {
            return Err(ValidationError::Task { served: pooling.task }.into());
        }
        if let Some(trace) = record.trace() {
            trace.set_parameters(request.described());
        }
        let GenerationRequest { prompts: given, mut parameters, .. } = request;
        record.warn(std::mem::take(&mut parameters.warnings));
        record.warn(parameters.grammar.iter().flat_map(|constraint| &constraint.left_out).collect());
        let num_per_prompt = parameters.num_generations(&config.limits, given.len())?;
        let permit = admission.admit(given.len() * num_per_prompt)?;
        let checked = parameters.check(&config.limits, num_per_prompt)?;
        let deadlines = Deadlines::new(record.received(), checked.timeout, config.queue.timeout);
        if let Some(name) = &checked.adapter_id {
            self.adapters().expect_usable(name)?;
        }
        let preparation = Preparation { context: &self.context, deadlines, record };
        let mut prompts = Vec::with_capacity(given.len());
        for prompt in given {
            // Boxed, because each future around it would have its size.
            prompts.push(Box::pin(preparation.prepare(prompt, checked.clone())).await?);
        }
        Ok(Admitted { prompts, adapter_id: checked.adapter_id, num_per_prompt, deadlines, permit })
    }

    /// Loads an adapter, after a download if it is on the hub, and serves it by this name. `replaces`: also if another adapter has the
    /// name. Takes a permit.
    pub(crate) async fn add_adapter(
        &self,
        name: &str,
        place: AdapterPlace,
        replaces: bool,
    ) -> Result<(), AdapterUpdateError> {
        let _permit = self.context.admission.permit(1)?;
        self.adapters().expect_free(name, replaces)?;
        let folder = match place {
            AdapterPlace::Folder(folder) => folder,
            AdapterPlace::Hub(id) => {
                let downloading = download(&self.context.adapter_downloads, id);
                let unlimited = Deadlines::new(Instant::now(), None, None);
                self.context.in_time(unlimited, async { Ok(downloading.await) }).await??
            }
        };
        // The time of a download is not time in a queue.
        let deadlines = Deadlines::new(Instant::now(), None, self.context.config.queue.timeout);
        let adding = self.adapters().add(name, folder, replaces);
        // Waiting for a place may fail, and so may the adapter.
        self.context.in_time(deadlines, async { Ok(adding.await) }).await?
    }

    /// Serves an adapter no longer; its running requests go on.
    pub(crate) fn remove_adapter(&self, name: &str) -> Result<(), AdapterUpdateError> {
        self.adapters().remove(name)
    }
}
