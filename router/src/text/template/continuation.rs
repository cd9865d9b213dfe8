//! Prompts that end within the last message: the model goes on with its text.

use serde_json::Value;

use super::{ChatInputs, TemplateError};

/// Written behind the text to find its end again; transformers' own words, so that templates treat it alike.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// Where a prompt ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// Behind the last message, or where an answer begins.
    Plain { adds_generation_prompt: bool },
    /// Behind the last message's text, as nobody said otherwise.
    Implicit,
    /// Behind the last message's text, as the request wants.
    Explicit,
}

impl Ending {
    pub(super) fn of(inputs: &ChatInputs) -> Result<Self, TemplateError> {
        match (inputs.add_generation_prompt, inputs.continue_final_message) {
            (Some(true), Some(true)) => Err(TemplateError::TwoEndings),
            (_, Some(true)) => Ok(Self::Explicit),
            (None, None) if answer(&inputs.messages).is_some() => Ok(Self::Implicit),
            (adds, _) => Ok(Self::Plain { adds_generation_prompt: adds.unwrap_or(true) }),
        }
    }

    pub(super) fn adds_generation_prompt(self) -> bool {
        match self {
            Self::Plain { adds_generation_prompt } => adds_generation_prompt,
            // COMPAT: TGI renders with it and cuts it off.
            Self::Implicit => true,
            Self::Explicit => false,
        }
    }
}

/// COMPAT: as in TGI, the prompt ends with the last occurrence of the assistant's text, without spaces at its end.
pub(super) fn cut_after_last(mut prompt: String, messages: &[Value]) -> Result<String, TemplateError> {
    let text = answer(messages).ok_or(TemplateError::NothingToContinue)?;
    // Templates may trim it.
    let text = text.trim();
    let end = prompt.rfind(text).ok_or(TemplateError::NotContinuable)? + text.len();
    prompt.truncate(end);
    prompt.truncate(prompt.trim_end().len());
    Ok(prompt)
}

/// The text of a last message by the assistant.
fn answer(messages: &[Value]) -> Option<&str> {
    let last = messages.last().filter(|message| message["role"] == "assistant")?;
    match &last["content"] {
        Value::String(text) => Some(text),
        Value::Array(parts) => parts.iter().rev().find_map(|part| part["text"].as_str()),
        _ => None,
    }
}

/// Puts a mark behind the last message's text, which is returned without it.
pub(super) fn mark(messages: &mut [Value]) -> Result<String, TemplateError> {
    let content = messages.last_mut().and_then(|message| message.get_mut("content"));
    let text = match content {
        Some(Value::Array(parts)) => parts.iter_mut().rev().find_map(|part| part.get_mut("text")),
        content => content,
    };
    let Some(Value::String(text)) = text else { return Err(TemplateError::NothingToContinue) };
    let unmarked = text.clone();
    text.push_str(MARK);
    Ok(unmarked)
}

/// The prompt up to the mark. Where the template has trimmed the mark's space, it would have trimmed the text's too.
pub(super) fn cut_at_mark(mut prompt: String, text: &str) -> Result<String, TemplateError> {
    if !prompt.contains(text.trim()) {
        return Err(TemplateError::NotContinuable);
    }
    let start = prompt.rfind(MARK.trim_end()).ok_or(TemplateError::NotContinuable)?;
    let keeps_spaces = prompt[start..].starts_with(MARK);
    prompt.truncate(start);
    if !keeps_spaces {
        prompt.truncate(prompt.trim_end().len());
    }
    Ok(prompt)
}
