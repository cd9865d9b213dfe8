//! Opens generations: the one path from a request to its running sequences.

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Instant;

use penstock_scheduler::Stats;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::adapter::{AdapterLease, AdapterUpdateError, Adapters};
use super::adapter_download::{AdapterDownload, AdapterPlace, download};
use super::admission::{Admission, Permit, QueueReservation};
use super::chat::{ChatAnswer, ToolCallIds};
use super::content_stop::ContentStop;
use super::deadline::{Deadlines, reached};
use super::error::GenerationError;
use super::image::{self, GivenImage, ImageSource};
use super::parameter::{Checked, ReasoningBudget};
use super::request::{GenerationRequest, Prompt};
use super::running::{Generations, Running, StartedPrompt};
use super::text_stream::{SequenceOptions, ShownTokens, StopText, TextStream};
use super::validation::ValidationError;
use crate::config::{Config, PriorityOrder};
use crate::engine::{Generator, Health, ReplicaReport};
use crate::fetch::Fetcher;
use crate::sequence::{
    ContentSalt, EncodedImage, Image, ImageInput, ImageSpan, Sampling, SequenceRequest, ThoughtLimit,
};
use crate::telemetry::{RequestRecord, Warnings, metrics};
use crate::text::{AnswerParser, TextModel, ThoughtMarkers};

/// What requests are generated with. Cheap to clone.
#[derive(Clone)]
pub(crate) struct GenerationService {
    inner: Arc<Inner>,
}

struct Inner {
    config: Arc<Config>,
    generator: Arc<dyn Generator>,
    text: TextModel,
    admission: Admission,
    adapters: Adapters,
    adapter_downloads: mpsc::Sender<AdapterDownload>,
    /// `None`: images come with their requests only.
    fetcher: Option<Fetcher>,
    draining: CancellationToken,
    abandoned: CancellationToken,
    /// Hashes salts with a secret of this process, so that no client can find two salts with one hash.
    salts: RandomState,
}

/// A checked request, with its place in the server.
struct Admitted {
    prompts: Vec<Prepared>,
    adapter_id: Option<String>,
    num_per_prompt: usize,
    deadlines: Deadlines,
    permit: Permit,
}

/// A checked and encoded prompt, with queue space reserved for each of its generations.
struct Prepared {
    prompt: StartedPrompt,
    images: Arc<[ImageSpan]>,
    max_new_tokens: u32,
    checked: Checked,
    shown_token_ids: Arc<[u32]>,
    /// One for each generation; empty unless the prompt is a chat.
    parsers: Vec<AnswerParser>,
    /// One for each generation.
    reservations: Vec<QueueReservation>,
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
            inner: Arc::new(Inner {
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

    pub(super) fn config(&self) -> &Config {
        &self.inner.config
    }

    pub(super) fn generator(&self) -> &dyn Generator {
        self.inner.generator.as_ref()
    }

    pub(crate) fn adapters(&self) -> &Adapters {
        &self.inner.adapters
    }

    pub(super) fn admission(&self) -> &Admission {
        &self.inner.admission
    }

    /// Cancelled when the grace period of a shutdown is over.
    pub(super) fn abandoned(&self) -> &CancellationToken {
        &self.inner.abandoned
    }

    pub(crate) fn text(&self) -> &TextModel {
        &self.inner.text
    }

    pub(crate) fn health(&self) -> Health {
        self.inner.generator.health()
    }

    pub(crate) fn stats(&self) -> Stats {
        self.inner.generator.stats()
    }

    pub(crate) fn replicas(&self) -> Vec<ReplicaReport> {
        self.inner.generator.replicas()
    }

    /// Tokens, prompt and new ones, of all admitted generations that wait for their first step.
    pub(crate) fn queued_tokens(&self) -> u64 {
        self.inner.admission.queued_tokens()
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.inner.draining.is_cancelled()
    }

    /// Returns when no request holds a permit. Call it after `draining` is cancelled.
    pub(crate) async fn drained(&self) {
        self.inner.admission.drained().await;
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
            Some(name) => Some(Arc::new(self.in_time(deadlines, self.adapters().lease(name)).await?)),
            None => None,
        };
        let mut generations =
            Generations { prompts: Vec::with_capacity(prompts.len()), num_per_prompt, running: Vec::new(), permit };
        for prompt in prompts {
            self.submit(prompt, adapter.as_ref(), stop_text, deadlines, record, &mut generations);
        }
        if streams && self.config().queue.timeout.is_some() {
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
        let Inner { config, admission, .. } = &*self.inner;
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
        let mut prompts = Vec::with_capacity(given.len());
        for prompt in given {
            prompts.push(self.prepare(prompt, checked.clone(), deadlines, record).await?);
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
        let _permit = self.inner.admission.permit(1)?;
        self.adapters().expect_free(name, replaces)?;
        let folder = match place {
            AdapterPlace::Folder(folder) => folder,
            AdapterPlace::Hub(id) => {
                let downloading = download(&self.inner.adapter_downloads, id);
                let unlimited = Deadlines::new(Instant::now(), None, None);
                self.in_time(unlimited, async { Ok(downloading.await) }).await??
            }
        };
        // The time of a download is not time in a queue.
        let deadlines = Deadlines::new(Instant::now(), None, self.config().queue.timeout);
        let adding = self.adapters().add(name, folder, replaces);
        // Waiting for a place may fail, and so may the adapter.
        self.in_time(deadlines, async { Ok(adding.await) }).await?
    }

    /// Serves an adapter no longer; its running requests go on.
    pub(crate) fn remove_adapter(&self, name: &str) -> Result<(), AdapterUpdateError> {
        self.adapters().remove(name)
    }

    /// Renders, encodes, checks the lengths, reserves queue space and compiles the grammar, in the order of TGI's checks.
    async fn prepare(
        &self,
        prompt: Prompt,
        mut checked: Checked,
        deadlines: Deadlines,
        record: &RequestRecord,
    ) -> Result<Prepared, GenerationError> {
        let Inner { config, generator, text: model, admission, .. } = &*self.inner;
        let (mut images, mut is_framed) = (Vec::new(), false);
        let (text, token_ids, answer) = match prompt {
            Prompt::Text(text) => (Some(text), Vec::new(), None),
            Prompt::Illustrated(text, sources) => {
                images = self.read_images(&sources)?;
                let framed = self.image_input().and_then(|input| image::framed(&text, input));
                is_framed = framed.is_some();
                (Some(framed.unwrap_or(text)), Vec::new(), None)
            }
            Prompt::TokenIds(ids) => (None, ids, None),
            Prompt::Chat(chat) => {
                images = self.read_images(&chat.images)?;
                let chat = self.in_time(deadlines, chat.render(model, self.image_input())).await?;
                let mut text = Arc::clone(&chat.prompt);
                if let Some(input) = self.image_input().filter(|_| !images.is_empty()) {
                    text = image::place_in_template(text, input);
                }
                let answer = ChatAnswer::new(chat);
                record.warn(answer.constrain(&mut checked, config.grammar_support)?.into_iter().collect());
                (Some(text), Vec::new(), Some(answer))
            }
        };
        if text.as_ref().map_or(token_ids.is_empty(), |text| text.is_empty()) {
            return Err(ValidationError::EmptyInput.into());
        }
        checked.check_truncate(&config.limits)?;
        let vocabulary = model.vocabulary_size();
        let mut token_ids = match &text {
            Some(text) => {
                let adds_special_tokens = !is_framed && checked.add_special_tokens.unwrap_or(answer.is_none());
                let encode = model.encode(Arc::clone(text), adds_special_tokens);
                self.in_time(deadlines, async { Ok(encode.await?) }).await?
            }
            None => match token_ids.iter().find(|&&id| id >= vocabulary) {
                Some(&given) => return Err(ValidationError::TokenId { field: "prompt", vocabulary, given }.into()),
                None => token_ids,
            },
        };
        let spans;
        (token_ids, spans) = self.place_images(token_ids, images, &checked, deadlines).await?;
        if text.is_some() {
            self.check_tokens_of_text(&token_ids)?;
        }
        let max_new_tokens = checked.fit(&mut token_ids, &config.limits)?;
        checked.check_token_ids(vocabulary)?;
        let bad_words = model.encode_bad_words(&checked.bad_words);
        let bad_words = self.in_time(deadlines, async { Ok(bad_words.await?) }).await?;
        if checked.grammar.is_some() && !config.grammar_support {
            return Err(ValidationError::GrammarDisabled.into());
        }
        if let Some(answer) = &answer
            && let Some(limit) = self.in_time(deadlines, self.thought_limit(&checked, answer, record)).await?
        {
            checked.limit_thoughts(limit);
        }
        checked.restrict(bad_words);
        let num_tokens = token_ids.len() as u64 + u64::from(max_new_tokens);
        let reservations = admission.reserve(checked.num_generations, num_tokens)?;
        if let Some(grammar) = &checked.grammar {
            let compiled = generator.compile_grammar(grammar);
            let compiled = self.in_time(deadlines, async { Ok(compiled.await?) }).await;
            compiled.map_err(|error| match &answer {
                Some(answer) => answer.grammar_error(error),
                None => error,
            })?;
        }
        let parsers = answer.iter().flat_map(|answer| (0..checked.num_generations).map(|_| answer.parser())).collect();
        let shown_token_ids = answer.as_ref().map(ChatAnswer::shown_token_ids).unwrap_or_default();
        let tool_call_ids: Option<ToolCallIds> = answer.as_ref().and_then(ChatAnswer::tool_call_ids);
        let prompt = StartedPrompt { text, token_ids, tool_call_ids };
        Ok(Prepared { prompt, images: spans, max_new_tokens, checked, shown_token_ids, parsers, reservations })
    }

    /// The limit of the thoughts of an answer, if it has any. A budget without effect is a warning.
    async fn thought_limit(
        &self,
        checked: &Checked,
        answer: &ChatAnswer,
        record: &RequestRecord,
    ) -> Result<Option<ThoughtLimit>, GenerationError> {
        let given = checked.reasoning_budget;
        if let Some(ReasoningBudget { field, .. }) = given.filter(|_| !answer.has_thoughts()) {
            let mut warnings = Warnings::default();
            warnings.push(format!("`{field}` has no effect: the model's chat template has no markers of thoughts"));
            record.warn(warnings);
        }
        let max_tokens = given.map(|budget| budget.max_tokens).or(self.config().reasoning_budget);
        let (Some(max_tokens), Some(markers)) = (max_tokens, answer.thought_markers()) else { return Ok(None) };
        let ThoughtMarkers { open, close, end, reopens } = markers;
        let end_ids = self.text().encode(end.into(), false).await?;
        Ok(Some(ThoughtLimit { max_tokens, open, close: close.to_owned(), end_ids, reopens }))
    }

    /// Encodes the images of a prompt, and puts their tokens into their places.
    async fn place_images(
        &self,
        token_ids: Vec<u32>,
        images: Vec<GivenImage>,
        checked: &Checked,
        deadlines: Deadlines,
    ) -> Result<(Vec<u32>, Arc<[ImageSpan]>), GenerationError> {
        let Some(input) = self.image_input().filter(|_| !images.is_empty()) else {
            return Ok((token_ids, Arc::default()));
        };
        if checked.truncate.is_some() {
            return Err(ValidationError::TruncateImages.into());
        }
        let (images, encoded) = self.encode_images(&token_ids, images, deadlines).await?;
        let (token_ids, spans) = image::expand(&token_ids, input, images, &encoded);
        image::check_room(&spans, input)?;
        Ok((token_ids, spans))
    }

    /// Refuses a text with a token that the model has no embedding for.
    pub(super) fn check_tokens_of_text(&self, token_ids: &[u32]) -> Result<(), ValidationError> {
        let vocabulary = self.text().num_embeddings();
        match token_ids.iter().find(|&&id| id >= vocabulary) {
            Some(&given) => {
                let token = self.text().spellings(&[given]).concat();
                Err(ValidationError::TokenOfText { token, vocabulary, given })
            }
            None => Ok(()),
        }
    }

    /// How images stand in prompts; `None`: the model reads none.
    pub(super) fn image_input(&self) -> Option<&ImageInput> {
        self.inner.config.image_input.as_ref()
    }

    /// Fetches and encodes the images of a prompt, after a check that it has a place for each. Returns them with what the workers made of them.
    pub(super) async fn encode_images(
        &self,
        token_ids: &[u32],
        images: Vec<GivenImage>,
        deadlines: Deadlines,
    ) -> Result<(Vec<Image>, Vec<EncodedImage>), GenerationError> {
        image::check_places(token_ids, self.image_input(), images.len())?;
        let fetch = image::fetch(images, self.inner.fetcher.as_ref());
        let images = self.in_time(deadlines, async { Ok(fetch.await?) }).await?;
        let encode = self.inner.generator.encode_images(images.clone());
        let encoded = self.in_time(deadlines, async { Ok(encode.await?) }).await?;
        Ok((images, encoded))
    }

    /// Checks the images of a prompt.
    pub(super) fn read_images(&self, sources: &[ImageSource]) -> Result<Vec<GivenImage>, ValidationError> {
        match (sources.first(), self.image_input()) {
            (Some(first), None) => Err(image::unreadable(first)),
            _ => image::read(sources, self.inner.fetcher.is_some()),
        }
    }

    /// What separates cached blocks with the same tokens: the images, or, if all tokens of a prompt attend to each other, the whole
    /// prompt.
    fn content_salts(&self, token_ids: &[u32], images: &[ImageSpan]) -> Arc<[ContentSalt]> {
        let salts = &self.inner.salts;
        if self.image_input().is_some_and(|input| input.is_prompt_whole) {
            let hashes: Vec<_> = images.iter().map(|span| span.image.hash()).collect();
            return [ContentSalt { offset: 0, salt: salts.hash_one((token_ids, hashes)) }].into();
        }
        images.iter().map(|span| ContentSalt { offset: span.offset, salt: salts.hash_one(span.image.hash()) }).collect()
    }

    /// Submits the generations of one prompt.
    fn submit(
        &self,
        prepared: Prepared,
        adapter: Option<&Arc<AdapterLease>>,
        stop_text: StopText,
        deadlines: Deadlines,
        record: &RequestRecord,
        generations: &mut Generations,
    ) {
        let Inner { config, generator, text: model, abandoned, salts, .. } = &*self.inner;
        let Prepared { prompt, images, max_new_tokens, checked, shown_token_ids, parsers, reservations } = prepared;
        let group = (reservations.len() > 1).then(rand::random);
        let mut parsers = parsers.into_iter();
        let content_salts = self.content_salts(&prompt.token_ids, &images);
        let here = adapter.and_then(|lease| lease.adapter());
        let adapter_hash = adapter.and_then(|lease| lease.hash_elsewhere());
        let has_own = self.image_input().is_some_and(|input| input.has_adapter);
        let uses_own = has_own && !images.is_empty() && adapter.is_none();
        for (index, reservation) in reservations.into_iter().enumerate() {
            let parser = parsers.next();
            let content_stop = (parser.is_some() && !checked.stop_strings.is_empty())
                .then(|| ContentStop::new(checked.stop_strings.clone(), stop_text));
            let num_prompt_tokens = prompt.token_ids.len();
            let seed = checked.seed_of(index);
            metrics::prompt_accepted(num_prompt_tokens, max_new_tokens);
            let shown_seed = checked.seed.map(|_| seed);
            let request = SequenceRequest {
                prompt_token_ids: prompt.token_ids.clone(),
                generated_token_ids: Vec::new(),
                num_source_tokens: 0,
                max_new_tokens,
                sampling: Sampling { seed, ..checked.sampling.clone() },
                grammar: checked.grammar.clone(),
                images: Arc::clone(&images),
                num_second_text_tokens: 0,
                needs_prompt_outputs: false,
                priority: match config.priority_order {
                    PriorityOrder::HighestFirst => checked.priority,
                    PriorityOrder::LowestFirst => -checked.priority,
                },
                group,
                // The keys and values of a prefix are the adapter's.
                cache_salt: match (&checked.cache_salt, here.map(|adapter| adapter.id), adapter_hash, uses_own) {
                    (None, None, None, false) => None,
                    of_sequence => Some(salts.hash_one(of_sequence)),
                },
                content_salts: Arc::clone(&content_salts),
                adapter: here.cloned(),
                adapter_hash,
                timeline: record.trace().map(|trace| trace.add_sequence(num_prompt_tokens, shown_seed)),
            };
            let options = SequenceOptions {
                request,
                decoder_prefix: Arc::clone(&config.decoder_prefix),
                ignore_eos: checked.ignore_eos,
                stop_strings: if parser.is_some() { Vec::new() } else { checked.stop_strings.clone() },
                stop_text,
                shown: if checked.shows_special_tokens {
                    ShownTokens::All
                } else {
                    ShownTokens::These(Arc::clone(&shown_token_ids))
                },
                num_alternatives: checked.num_alternatives,
                deadlines,
            };
            let stream = TextStream::start(generator.as_ref(), model, options, reservation, abandoned.clone());
            let adapter = adapter.cloned();
            generations.running.push(Running {
                stream,
                parser,
                content_stop,
                seed: shown_seed,
                num_prompt_tokens,
                _adapter: adapter,
            });
        }
        generations.prompts.push(prompt);
    }

    /// Awaits what precedes the queue, within the request's deadlines and until a shutdown's grace period is over.
    pub(super) async fn in_time<T>(
        &self,
        deadlines: Deadlines,
        future: impl Future<Output = Result<T, GenerationError>>,
    ) -> Result<T, GenerationError> {
        tokio::select! {
            biased;
            result = future => result,
            () = self.inner.abandoned.cancelled() => Err(GenerationError::ShuttingDown),
            () = reached(deadlines.answer) => Err(GenerationError::Timeout),
            () = reached(deadlines.first_step) => Err(self.inner.admission.queue_timeout()),
        }
    }
}
