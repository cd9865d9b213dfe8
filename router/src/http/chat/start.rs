//! From a chat's request to its running generations.

use std::sync::Arc;

use super::choice::ChoiceReader;
use crate::api::error::ApiError;
use crate::api::openai::ChatRequest;
use crate::api::parameter::ValidationError;
use crate::http::admission::Permit;
use crate::http::running::{Prepared, Prompt, Running};
use crate::http::service::Service;
use crate::telemetry::RequestRecord;
use crate::text::{ChatInputs, StopText};

pub(super) struct Started {
    pub(super) running: Vec<Running>,
    /// One for each.
    pub(super) readers: Vec<ChoiceReader>,
    pub(super) permit: Permit,
    /// Of the rendered prompt.
    pub(super) num_characters: usize,
}

/// Whatever can be refused is refused here, before a stream starts.
pub(super) async fn start(
    service: &Service,
    record: &RequestRecord,
    mut request: ChatRequest,
) -> Result<Started, ApiError> {
    let checked = request.parameters()?.check(&service.config().limits)?;
    if checked.sampling.grammar.is_some() && !service.config().grammar_support {
        return Err(ValidationError::GrammarDisabled.into());
    }
    let permit = service.admission().admit(checked.num_generations)?;
    let inputs = ChatInputs { messages: request.template_messages()?, ..ChatInputs::default() };
    let text: Arc<str> = service.text().render_chat(inputs)?.into();
    let num_characters = text.chars().count();
    let prepared = Prepared::new(service, Prompt::Rendered(text), checked, StopText::Cut).await?;
    let reader = |index| ChoiceReader::new(index, request.logprobs.then(|| service.text().clone()));
    let readers = (0..prepared.num_generations()).map(reader).collect();
    Ok(Started { running: prepared.start_all(service, record), readers, permit, num_characters })
}
