//! From a completion's request to its running generations.

use std::sync::Arc;

use super::choice::{ChoiceReader, Echo};
use crate::api::error::ApiError;
use crate::api::openai::{self, CompletionRequest};
use crate::api::parameter::{Checked, ValidationError};
use crate::http::admission::Permit;
use crate::http::logprob::CompletionLogprobWriter;
use crate::http::running::{Prepared, Prompt, Running};
use crate::http::service::Service;
use crate::telemetry::RequestRecord;
use crate::text::StopText;

pub(super) struct Started {
    /// Those of the first prompt, then those of the next.
    pub(super) running: Vec<Running>,
    /// One for each.
    pub(super) readers: Vec<ChoiceReader>,
    pub(super) num_per_prompt: usize,
    /// So many of each prompt's are shown.
    pub(super) num_choices: usize,
    pub(super) hides_generated: bool,
    pub(super) permit: Permit,
    /// Of all prompts that are texts.
    pub(super) num_characters: usize,
}

/// Whatever can be refused is refused here, before a stream starts.
pub(super) async fn start(
    service: &Service,
    record: &RequestRecord,
    mut request: CompletionRequest,
) -> Result<Started, ApiError> {
    if request.has_suffix() {
        return Err(ApiError::Suffix);
    }
    let prompts = request.prompts()?;
    let (checked, num_choices) = check(service, &mut request, prompts.len())?;
    let permit = service.admission().admit(prompts.len() * checked.num_generations)?;
    let num_characters = prompts.iter().map(num_characters_of).sum();
    let num_per_prompt = checked.num_generations;
    let hides_generated = request.hides_generated();
    let mut all = Vec::with_capacity(prompts.len());
    for prompt in prompts {
        let (prompt, text): (_, Option<Arc<str>>) = match prompt {
            openai::Prompt::Text(text) => {
                let text = Arc::from(text);
                (Prompt::Text(Arc::clone(&text)), Some(text))
            }
            openai::Prompt::TokenIds(ids) => (Prompt::TokenIds(ids), None),
        };
        let prepared = Prepared::new(service, prompt, checked.clone(), StopText::Cut, record.received()).await?;
        let echo = request
            .echo
            .then(|| Echo::new(service.text(), text, prepared.prompt_token_ids(), request.logprobs.is_some()));
        all.push((prepared, echo));
    }
    let (mut running, mut readers) = (Vec::new(), Vec::new());
    for (prepared, echo) in all {
        for generation in prepared.start_all(service) {
            let logprobs = request.logprobs.map(|_| CompletionLogprobWriter::new(service.text().clone()));
            readers.push(ChoiceReader::new(readers.len(), echo.clone(), logprobs, hides_generated));
            running.push(generation);
        }
    }
    Ok(Started { running, readers, num_per_prompt, num_choices, hides_generated, permit, num_characters })
}

fn check(service: &Service, request: &mut CompletionRequest, num_prompts: usize) -> Result<(Checked, usize), ApiError> {
    let config = service.config();
    let max = config.limits.max_client_batch_size;
    if num_prompts > max {
        return Err(ApiError::BatchSize { given: num_prompts, max });
    }
    if request.echo && !config.decoder_prefix.is_empty() {
        let why = "the model is an encoder–decoder, whose answer does not go on from the prompt";
        return Err(ValidationError::Unsupported { field: "echo", why }.into());
    }
    let (parameters, num_choices) = request.parameters(&config.limits)?;
    if parameters.grammar.is_some() && !config.grammar_support {
        return Err(ValidationError::GrammarDisabled.into());
    }
    if parameters.decoder_input_details && !config.prefill_logprobs {
        let why = "with `logprobs` it needs a server that runs with --enable-prefill-logprobs";
        return Err(ValidationError::Unsupported { field: "echo", why }.into());
    }
    let checked = parameters.check(&config.limits)?;
    let max = config.limits.max_concurrent_requests / num_prompts;
    if checked.num_generations > max {
        return Err(ValidationError::Generations { max, given: checked.num_generations }.into());
    }
    Ok((checked, num_choices))
}

fn num_characters_of(prompt: &openai::Prompt) -> usize {
    match prompt {
        openai::Prompt::Text(text) => text.chars().count(),
        openai::Prompt::TokenIds(_) => 0,
    }
}
