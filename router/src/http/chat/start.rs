//! From a chat's request to its running generations.

use std::sync::Arc;

use serde_json::{Value, json};

use super::choice::{CallIds, ChoiceOptions, ChoiceReader};
use crate::api::error::ApiError;
use crate::api::openai::{ChatRequest, ToolSet};
use crate::api::parameter::{Checked, ValidationError};
use crate::http::admission::Permit;
use crate::http::running::{Prepared, Prompt, Running};
use crate::http::service::Service;
use crate::telemetry::RequestRecord;
use crate::text::{AnswerStyle, StopText, Thinking, ToolChoice, ToolError, ToolFormat};

pub(in crate::http) struct Started {
    pub(in crate::http) running: Vec<Running>,
    /// One for each.
    pub(super) readers: Vec<ChoiceReader>,
    pub(in crate::http) permit: Permit,
    /// Of the rendered prompt.
    pub(super) num_characters: usize,
}

/// What the model reads of a chat.
pub(in crate::http) struct ChatPrompt {
    pub(in crate::http) text: Arc<str>,
    tool_set: Option<ToolSet>,
}

/// Renders the template over the conversation and its tools.
pub(in crate::http) async fn render(service: &Service, request: &mut ChatRequest) -> Result<ChatPrompt, ApiError> {
    let tool_set = request.tool_set();
    let mut inputs = request.template_inputs()?;
    if let Some(set) = &tool_set {
        let style = service.text().answer_style(true);
        if let Some(text) = style.tool_prompt(&set.values, set.prompt.as_deref()) {
            append_text(inputs.messages.last_mut(), text);
        }
        inputs.tools = Some(set.values.clone());
    }
    Ok(ChatPrompt { text: service.text().render_chat(inputs).await?.into(), tool_set })
}

/// Whatever can be refused is refused here, before a stream starts.
pub(in crate::http) async fn start(
    service: &Service,
    record: &RequestRecord,
    mut request: ChatRequest,
) -> Result<Started, ApiError> {
    let checked = request.parameters()?.check(&service.config().limits)?;
    let permit = service.admission().admit(checked.num_generations)?;
    let ChatPrompt { text: prompt, tool_set } = render(service, &mut request).await?;
    let style = service.text().answer_style(tool_set.is_some());
    let num_characters = prompt.chars().count();
    let thinking = style.thinking(&prompt);
    let checked = constrain(checked, style, thinking, tool_set.as_ref(), service.config().grammar_support)?;
    let prepared = Prepared::new(service, Prompt::Rendered(prompt), checked, StopText::Cut, record.received()).await;
    let prepared = prepared.map_err(|error| match error {
        // The client sent no grammar: ours holds the schemas of its tools.
        ApiError::Validation(ValidationError::Grammar(reason)) if tool_set.is_some() => {
            ApiError::Tool(format!("the tools' parameters are not schemas that can be used: {reason}"))
        }
        error => error,
    })?;
    let prepared = prepared.showing(style.shown_token_ids(tool_set.is_some(), thinking));

    let call_ids = tool_set.as_ref().map(|_| match style.tool_format() {
        ToolFormat::MistralList | ToolFormat::MistralNamed => CallIds::Mistral,
        _ => CallIds::OpenAi,
    });
    let options = ChoiceOptions { logprobs_of: request.logprobs.then(|| service.text().clone()), call_ids };
    let reader = |index| ChoiceReader::new(index, options.clone(), style.parser(tool_set.is_some(), thinking));
    let readers = (0..prepared.num_generations()).map(reader).collect();
    Ok(Started { running: prepared.start_all(service), readers, permit, num_characters })
}

/// Puts the tools' grammar, or the client's, where the thoughts leave it.
fn constrain(
    mut checked: Checked,
    style: &AnswerStyle,
    thinking: Thinking,
    tool_set: Option<&ToolSet>,
    grammar_support: bool,
) -> Result<Checked, ApiError> {
    let own = checked.sampling.grammar.take();
    if own.is_some() && !grammar_support {
        return Err(ValidationError::GrammarDisabled.into());
    }
    checked.sampling.grammar = match (own, tool_set) {
        (Some(_), Some(_)) => {
            let message =
                "a grammar (`response_format`) and tools cannot both say what the answer is; send one of them";
            return Err(ApiError::Tool(message.to_owned()));
        }
        (Some(grammar), None) => Some(style.wrapped(thinking, grammar)),
        (None, None) => None,
        (None, Some(set)) => {
            let refused = |error: ToolError| ApiError::Tool(error.to_string());
            let grammar = style.tool_grammar(thinking, &set.tools, &set.choice, set.parallel).map_err(refused)?;
            // The model may still call tools as it was trained to, but it cannot be made to.
            if !grammar_support && set.choice != ToolChoice::Auto {
                return Err(ValidationError::GrammarDisabled.into());
            }
            grammar.filter(|_| grammar_support)
        }
    };
    if checked.ignore_eos && checked.sampling.grammar.is_some() {
        return Err(ValidationError::IgnoreEosWithGrammar.into());
    }
    Ok(checked)
}

fn append_text(message: Option<&mut Value>, text: String) {
    match message.and_then(|message| message.get_mut("content")) {
        Some(Value::String(content)) => content.push_str(&text),
        Some(Value::Array(parts)) => parts.push(json!({"type": "text", "text": text})),
        _ => {}
    }
}
