//! Builds the messages that a template renders from the conversations of the dialects whose messages consist of blocks or
//! items.
//!
//! Consecutive texts of one speaker are one message, joined by empty lines, because many templates demand that roles
//! alternate. The results of calls come before the text of their turn.

use serde_json::{Map, Value, json};

use crate::generation::ImageSource;
use crate::text::reminder;

/// A conversation so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Conversation {
    /// Instructions before the first message.
    system: Vec<String>,
    messages: Vec<Value>,
    /// The user's turn, if that is the last one.
    user: Vec<PromptPart>,
    /// Images of all messages, in their order.
    images: Vec<ImageSource>,
    /// The assistant's turn, if that is the last one.
    assistant: Option<AssistantTurn>,
    /// Id and name of the calls that have no result yet.
    unanswered: Vec<(String, String)>,
}

/// A part of a user's turn, or of the result of a call.
#[derive(Clone, Debug)]
pub(super) enum PromptPart {
    Text(String),
    Image(ImageSource),
}

#[derive(Clone, Debug, Default)]
struct AssistantTurn {
    content: Vec<String>,
    reasoning: Vec<String>,
    calls: Vec<Value>,
}

impl Conversation {
    /// Instructions. Few templates accept them within the conversation, so there they become a reminder in the user's
    /// turn, in the form that Claude Code uses.
    pub(super) fn system(&mut self, text: String) -> Result<(), String> {
        if self.messages.is_empty() && self.user.is_empty() && self.assistant.is_none() {
            self.system.push(text);
            return Ok(());
        }
        self.user(PromptPart::Text(reminder(&text)))
    }

    pub(super) fn user(&mut self, part: PromptPart) -> Result<(), String> {
        self.end_assistant();
        self.user.push(part);
        Ok(())
    }

    pub(super) fn text(&mut self, text: String) -> Result<(), String> {
        self.assistant()?.content.push(text);
        Ok(())
    }

    pub(super) fn reasoning(&mut self, text: String) -> Result<(), String> {
        self.assistant()?.reasoning.push(text);
        Ok(())
    }

    /// A call of the assistant. `arguments`: JSON text.
    pub(super) fn call(&mut self, id: String, name: String, arguments: &str) -> Result<(), String> {
        if self.unanswered.iter().any(|(known, _)| *known == id) {
            return Err(format!("the id `{id}` occurs twice"));
        }
        let function = json!({"name": name, "arguments": arguments});
        self.assistant()?.calls.push(json!({"id": id, "type": "function", "function": function}));
        self.unanswered.push((id, name));
        Ok(())
    }

    /// The result of a call.
    pub(super) fn result(&mut self, id: &str, parts: Vec<PromptPart>) -> Result<(), String> {
        let Some(position) = self.unanswered.iter().position(|(known, _)| known == id) else {
            return Err(format!("`{id}` is not the id of an earlier call without a result"));
        };
        self.end_assistant();
        let (id, name) = self.unanswered.remove(position);
        let content = self.content(parts);
        self.messages.push(json!({"role": "tool", "tool_call_id": id, "name": name, "content": content}));
        Ok(())
    }

    /// The messages for the template, and their images. `instructions` come first.
    pub(super) fn into_messages(
        mut self,
        instructions: Option<String>,
    ) -> Result<(Vec<Value>, Vec<ImageSource>), String> {
        self.end_assistant();
        self.end_user()?;
        let system: Vec<_> = instructions.into_iter().chain(self.system).filter(|text| !text.is_empty()).collect();
        if !system.is_empty() {
            self.messages.insert(0, json!({"role": "system", "content": joined(system)}));
        }
        Ok((self.messages, self.images))
    }

    fn assistant(&mut self) -> Result<&mut AssistantTurn, String> {
        if self.assistant.is_none() {
            self.end_user()?;
        }
        Ok(self.assistant.get_or_insert_default())
    }

    fn end_assistant(&mut self) {
        let Some(AssistantTurn { content, reasoning, calls }) = self.assistant.take() else { return };
        let mut message = Map::from_iter([("role".to_owned(), "assistant".into())]);
        message.insert("content".to_owned(), joined(content).into());
        if !reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), joined(reasoning).into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".to_owned(), calls.into());
        }
        self.messages.push(message.into());
    }

    /// The user's turn has a result for every call.
    fn end_user(&mut self) -> Result<(), String> {
        if let Some((id, _)) = self.unanswered.first() {
            return Err(format!("the call `{id}` has no result"));
        }
        if !self.user.is_empty() {
            let parts = std::mem::take(&mut self.user);
            let content = self.content(parts);
            self.messages.push(json!({"role": "user", "content": content}));
        }
        Ok(())
    }

    /// The parts as one text, or, with images, as a list.
    fn content(&mut self, parts: Vec<PromptPart>) -> Value {
        let (mut values, mut texts) = (Vec::new(), Vec::new());
        let text = |texts: Vec<String>| json!({"type": "text", "text": joined(texts)});
        for part in parts {
            match part {
                PromptPart::Text(text) => texts.push(text),
                PromptPart::Image(image) => {
                    if !texts.is_empty() {
                        values.push(text(std::mem::take(&mut texts)));
                    }
                    values.push(json!({"type": "image"}));
                    self.images.push(image);
                }
            }
        }
        if values.is_empty() {
            return joined(texts).into();
        }
        if !texts.is_empty() {
            values.push(text(texts));
        }
        values.into()
    }
}

/// Texts of separate blocks as one text.
pub(super) fn joined(texts: Vec<String>) -> String {
    texts.join("\n\n")
}
