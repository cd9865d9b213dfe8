//! From checked parameters to a running generation, and from there to a whole answer; the same for every route.

use std::sync::Arc;

use super::service::Service;
use crate::api::error::ApiError;
use crate::api::parameter::{Checked, ValidationError};
use crate::telemetry::{RequestRecord, RequestSummary, metrics};
use crate::text::{Finish, Generation, GenerationError, GenerationOptions, Step, StopText, TextModel, TextToken};

/// What to go on from.
pub(super) enum Prompt {
    /// As a person wrote it; the tokenizer adds its special tokens.
    Text(Arc<str>),
    /// As a chat template wrote it, special tokens included.
    Rendered(Arc<str>),
    TokenIds(Vec<u32>),
}

impl Prompt {
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
        if text.is_empty() {
            return Err(ValidationError::EmptyInput.into());
        }
        Ok(text_model.encode(text, add_special_tokens).await?)
    }
}

/// A generation on its way, and what answers say about its input.
pub(super) struct Running {
    generation: Generation,
    /// `None` when nothing about it is random.
    pub(super) seed: Option<u64>,
    pub(super) num_prompt_tokens: usize,
}

/// A generation that has ended.
pub(super) struct Finished {
    pub(super) text: String,
    pub(super) tokens: Vec<TextToken>,
    pub(super) finish: Finish,
    pub(super) seed: Option<u64>,
    pub(super) num_prompt_tokens: usize,
}

impl Running {
    /// Tokenizes, checks the lengths and submits.
    pub(super) async fn start(
        service: &Service,
        record: &RequestRecord,
        prompt: Prompt,
        parameters: Checked,
        stop_text: StopText,
    ) -> Result<Self, ApiError> {
        let mut prompt_token_ids = prompt.encode(service.text()).await?;
        let max_new_tokens = parameters.fit(&mut prompt_token_ids, &service.config().limits)?;
        let num_prompt_tokens = prompt_token_ids.len();
        metrics::prompt_accepted(num_prompt_tokens, max_new_tokens);
        let options = GenerationOptions {
            prompt_token_ids,
            max_new_tokens,
            sampling: parameters.sampling,
            stops: parameters.stops,
            stop_text,
        };
        let (received, abandoned) = (record.received(), service.abandoned());
        let generation = Generation::start(service.generator(), service.text(), options, received, abandoned);
        Ok(Self { generation, seed: parameters.seed, num_prompt_tokens })
    }

    pub(super) async fn next(&mut self) -> Result<Step, GenerationError> {
        self.generation.next().await
    }

    pub(super) async fn finish(mut self) -> Result<Finished, ApiError> {
        let (mut text, mut tokens) = (String::new(), Vec::new());
        loop {
            let step = self.next().await?;
            text.push_str(&step.text);
            tokens.push(step.token);
            if let Some(finish) = step.finish {
                let Self { seed, num_prompt_tokens, .. } = self;
                return Ok(Finished { text, tokens, finish, seed, num_prompt_tokens });
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
        validation: finish.timings.validation,
        queue: finish.timings.queue,
        inference: finish.timings.inference,
    }
}
