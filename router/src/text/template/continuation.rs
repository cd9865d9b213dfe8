//! Prompts that end inside the last message, whose text the model continues.

use serde_json::Value;

use super::error::TemplateError;
use super::input::ChatInputs;

/// Appended to the text of the last message to find its end in the prompt. It is transformers' marker, so that templates
/// treat it the same way.
const MARK: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// The end of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PromptEnd {
    /// After the last message, or at the start of the assistant's turn.
    AfterMessages { adds_generation_prompt: bool },
    /// After the last message's text, because the assistant wrote it and the request does not say otherwise.
    InLastMessageByDefault,
    /// After the last message's text, as the request says.
    InLastMessage,
}

impl PromptEnd {
    pub(super) fn of(inputs: &ChatInputs) -> Result<Self, TemplateError> {
        match (inputs.add_generation_prompt, inputs.continue_final_message) {
            (Some(true), Some(true)) => Err(TemplateError::TwoEndings),
            (_, Some(true)) => Ok(Self::InLastMessage),
            (None, None) if answer(&inputs.messages).is_some() => Ok(Self::InLastMessageByDefault),
            (adds, _) => Ok(Self::AfterMessages { adds_generation_prompt: adds.unwrap_or(true) }),
        }
    }

    pub(super) fn adds_generation_prompt(self) -> bool {
        match self {
            Self::AfterMessages { adds_generation_prompt } => adds_generation_prompt,
            // COMPAT: TGI renders with the generation prompt and cuts it off.
            Self::InLastMessageByDefault => true,
            Self::InLastMessage => false,
        }
    }
}

/// COMPAT: as in TGI, the prompt ends with the last occurrence of the assistant's text, without trailing whitespace.
pub(super) fn cut_after_last(mut prompt: String, messages: &[Value]) -> Result<String, TemplateError> {
    let text = answer(messages).ok_or(TemplateError::NothingToContinue)?;
    // Templates may trim the text.
    let text = text.trim();
    let end = prompt.rfind(text).ok_or(TemplateError::NotContinuable)? + text.len();
    prompt.truncate(end);
    prompt.truncate(prompt.trim_end().len());
    Ok(prompt)
}

/// The text of the last message, if the assistant wrote it.
fn answer(messages: &[Value]) -> Option<&str> {
    let last = messages.last().filter(|message| message["role"] == "assistant")?;
    match &last["content"] {
        Value::String(text) => Some(text),
        Value::Array(parts) => parts.iter().rev().find_map(|part| part["text"].as_str()),
        _ => None,
    }
}

/// Appends the mark to the last message's text, and returns the text without it.
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

/// The prompt up to the mark. Trailing whitespace of the text is removed if the template trimmed the mark's.
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
