//! From checked parameters to a running generation, and from there to a whole answer; the same for every route.

use std::sync::Arc;
use std::time::Instant;

use futures::future::try_join_all;

use super::admission::Claim;
use super::service::Service;
use crate::api::error::ApiError;
use crate::api::parameter::{Checked, ValidationError};
use crate::sequence::Sampling;
use crate::telemetry::{RequestSummary, metrics};
use crate::text::{
    Finish, Generation, GenerationError, GenerationOptions, PromptToken, Step, StopText, TextModel, TextToken,
};

/// What to go on from.
pub(super) enum Prompt {
    /// As a person wrote it; the tokenizer adds its special tokens.
    Text(Arc<str>),
    /// As a chat template wrote it, special tokens included.
    Rendered(Arc<str>),
    TokenIds(Vec<u32>),
}

impl Prompt {
    fn is_empty(&self) -> bool {
        match self {
            Self::Text(text) | Self::Rendered(text) => text.is_empty(),
            Self::TokenIds(ids) => ids.is_empty(),
        }
    }

    async fn encode(self, text_model: &TextModel) -> Result<Vec<u32>, ApiError> {
        let (text, add_special_tokens) = match self {
            Self::Text(text) => (text, true),
            Self::Rendered(text) => (text, false),
            Self::TokenIds(ids) => {
                let vocabulary = text_model.vocabulary_size();
                return match ids.iter().find(|&&id| id >= vocabulary) {
                    Some(&given) => Err(ValidationError::TokenId { vocabulary, given }.into()),
                    None => Ok(ids),
                };
            }
        };
        Ok(text_model.encode(text, add_special_tokens).await?)
    }
}

/// A request that passed every check, as tokens; each of its generations starts from here.
pub(super) struct Prepared {
    prompt_token_ids: Vec<u32>,
    max_new_tokens: u32,
    checked: Checked,
    stop_text: StopText,
    shown_token_ids: Arc<[u32]>,
    /// Where the generations of one request share the prompt.
    group: Option<u64>,
    patience: Patience,
    /// One for each generation.
    claims: Vec<Claim>,
}

/// Until when a request may wait, and for what.
#[derive(Clone, Copy)]
struct Patience {
    received: Instant,
    /// For its answer's end: the client's own.
    answer: Option<Instant>,
    /// For its first step: the server's.
    start: Option<Instant>,
}

impl Patience {
    fn new(service: &Service, checked: &Checked, received: Instant) -> Self {
        let after = |timeout| received + timeout;
        Self { received, answer: checked.timeout.map(after), start: service.config().queue.timeout.map(after) }
    }

    /// For what comes before the queue.
    async fn wait<T>(
        &self,
        service: &Service,
        future: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        tokio::select! {
            biased;
            result = future => result,
            () = service.abandoned().cancelled_owned() => Err(ApiError::ShuttingDown),
            () = until(self.answer) => Err(ApiError::Timeout),
            () = until(self.start) => Err(service.admission().give_up()),
        }
    }
}

/// Never, without a deadline.
async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
        None => std::future::pending().await,
    }
}

impl Prepared {
    /// Tokenizes, checks the lengths, finds room in the queue, and has the grammar compiled, in the order of TGI's checks.
    pub(super) async fn new(
        service: &Service,
        prompt: Prompt,
        checked: Checked,
        stop_text: StopText,
        received: Instant,
    ) -> Result<Self, ApiError> {
        let limits = &service.config().limits;
        let patience = Patience::new(service, &checked, received);
        if prompt.is_empty() {
            return Err(ValidationError::EmptyInput.into());
        }
        checked.check_truncate(limits)?;
        let mut prompt_token_ids = patience.wait(service, prompt.encode(service.text())).await?;
        let max_new_tokens = checked.fit(&mut prompt_token_ids, limits)?;
        checked.check_token_ids(service.text().vocabulary_size())?;
        if checked.sampling.grammar.is_some() && !service.config().grammar_support {
            return Err(ValidationError::GrammarDisabled.into());
        }
        let tokens = prompt_token_ids.len() as u64 + u64::from(max_new_tokens);
        let claims = service.admission().claim(checked.num_generations, tokens)?;
        if let Some(grammar) = &checked.sampling.grammar {
            let compiled = service.generator().compile_grammar(grammar);
            patience.wait(service, async { Ok(compiled.await?) }).await?;
        }
        let group = (checked.num_generations > 1).then(rand::random);
        let shown_token_ids = Arc::new([]);
        Ok(Self { prompt_token_ids, max_new_tokens, checked, stop_text, shown_token_ids, group, patience, claims })
    }

    /// These special tokens are part of the answer's text.
    pub(super) fn showing(self, shown_token_ids: Arc<[u32]>) -> Self {
        Self { shown_token_ids, ..self }
    }

    pub(super) fn prompt_token_ids(&self) -> &[u32] {
        &self.prompt_token_ids
    }

    pub(super) fn num_generations(&self) -> usize {
        self.checked.num_generations
    }

    /// All of the request's generations, in their order.
    pub(super) fn start_all(mut self, service: &Service) -> Vec<Running> {
        let claims = std::mem::take(&mut self.claims);
        claims.into_iter().enumerate().map(|(index, claim)| self.start(service, index, claim)).collect()
    }

    fn start(&self, service: &Service, index: usize, claim: Claim) -> Running {
        let Self { checked, patience, .. } = self;
        metrics::prompt_accepted(self.prompt_token_ids.len(), self.max_new_tokens);
        let options = GenerationOptions {
            prompt_token_ids: self.prompt_token_ids.clone(),
            decoder_prefix: Arc::clone(&service.config().decoder_prefix),
            max_new_tokens: self.max_new_tokens,
            sampling: Sampling { seed: checked.seed_of(index), ..checked.sampling.clone() },
            ignore_eos: checked.ignore_eos,
            stops: checked.stops.clone(),
            stop_text: self.stop_text,
            shown_token_ids: Arc::clone(&self.shown_token_ids),
            priority: checked.priority,
            group: self.group,
            deadline: patience.answer,
            queue_deadline: patience.start,
        };
        let (generator, text, abandoned) = (service.generator(), service.text(), service.abandoned());
        let generation = Generation::start(generator, text, options, patience.received, abandoned);
        let seed = checked.seed.map(|_| checked.seed_of(index));
        Running { generation, claim, seed, num_prompt_tokens: self.prompt_token_ids.len() }
    }
}

/// Where nobody waits for ever, a stream's status tells whether it was let in: returns when all have left the queue.
pub(super) async fn started(service: &Service, running: &mut [Running]) -> Result<(), ApiError> {
    if service.config().queue.timeout.is_some() {
        try_join_all(running.iter_mut().map(Running::started)).await?;
    }
    Ok(())
}

/// A generation on its way, and what answers say about its input.
pub(super) struct Running {
    generation: Generation,
    claim: Claim,
    /// `None` when nothing about it is random.
    pub(super) seed: Option<u64>,
    pub(super) num_prompt_tokens: usize,
}

/// A generation that has ended.
pub(super) struct Finished {
    pub(super) text: String,
    pub(super) tokens: Vec<TextToken>,
    /// Empty unless their logprobs were asked for.
    pub(super) prompt_tokens: Vec<PromptToken>,
    pub(super) finish: Finish,
    pub(super) seed: Option<u64>,
    pub(super) num_prompt_tokens: usize,
}

impl Running {
    pub(super) async fn next(&mut self) -> Result<Step, ApiError> {
        if self.claim.is_queued() {
            self.started().await?;
        }
        Ok(self.generation.next().await?)
    }

    /// Returns when it has left the queue.
    async fn started(&mut self) -> Result<(), ApiError> {
        self.generation.started().await.map_err(|error| match error {
            GenerationError::QueueTimeout => self.claim.give_up(),
            error => error.into(),
        })?;
        self.claim.leave_queue();
        Ok(())
    }

    /// Complete when the first token is here.
    pub(super) fn take_prompt_tokens(&mut self) -> Vec<PromptToken> {
        self.generation.take_prompt_tokens()
    }

    pub(super) async fn finish(mut self) -> Result<Finished, ApiError> {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        loop {
            let step = self.next().await?;
            text.push_str(&step.text);
            tokens.push(step.token);
            if let Some(finish) = step.finish {
                let prompt_tokens = self.take_prompt_tokens();
                let Self { seed, num_prompt_tokens, .. } = self;
                return Ok(Finished { text, tokens, prompt_tokens, finish, seed, num_prompt_tokens });
            }
        }
    }

    pub(super) fn summary(&self, finish: &Finish) -> RequestSummary {
        summary(self.num_prompt_tokens, finish)
    }
}

impl Finished {
    pub(super) fn summary(&self) -> RequestSummary {
        summary(self.num_prompt_tokens, &self.finish)
    }
}

fn summary(num_prompt_tokens: usize, finish: &Finish) -> RequestSummary {
    RequestSummary {
        num_prompt_tokens,
        num_generated_tokens: finish.num_generated_tokens as usize,
        num_cached_tokens: finish.num_cached_tokens,
        validation: finish.timings.validation,
        queue: finish.timings.queue,
        inference: finish.timings.inference,
    }
}
