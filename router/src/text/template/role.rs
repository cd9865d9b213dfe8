//! Puts instructions where a template writes them. Every message of the roles `system` and `developer` is written, whatever the template
//! knows: `developer` becomes `system` where it is no role of its own, and what the template would drop or refuse becomes a part of a
//! neighbouring message. Calls of OpenAI's former API (`function_call` and `function`) become those of its present one. Messages of other
//! roles are marked, to find out whether the template writes them.

use serde_json::{Value, json};

const DEVELOPER: &str = "developer";
const SYSTEM: &str = "system";
const USER: &str = "user";
const ASSISTANT: &str = "assistant";
const TOOL: &str = "tool";
const FUNCTION: &str = "function";
/// The id of a call that has none, as in OpenAI's former API. Some templates require nine letters and digits.
const CALL_ID: &str = "call00000";

/// The roles that a template may know.
pub(super) const KNOWN: [&str; 6] = [SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL, FUNCTION];

/// The roles in which a template writes instructions and the results of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SupportedRoles {
    /// Whether `developer` is a role that it tells from unknown ones.
    pub(super) developer: bool,
    /// Whether it writes a system message before the first message.
    pub(super) system: bool,
    /// Whether it writes several messages with instructions before the first message.
    pub(super) several: bool,
    /// Whether it writes system messages within the conversation.
    pub(super) late_system: bool,
    /// The same of `developer`.
    pub(super) late_developer: bool,
    /// Whether it surely writes the results of calls.
    pub(super) tool: bool,
    /// Whether it writes messages of this role.
    pub(super) function: bool,
}

impl Default for SupportedRoles {
    /// Leaves the conversation as it is.
    fn default() -> Self {
        Self {
            developer: true,
            system: true,
            several: true,
            late_system: true,
            late_developer: true,
            tool: false,
            function: true,
        }
    }
}

/// Instructions within a conversation, as text of the user's turn: the form that Claude Code uses.
pub(crate) fn reminder(text: &str) -> String {
    format!("<system-reminder>\n{text}\n</system-reminder>")
}

impl SupportedRoles {
    /// The conversation with its instructions where the template writes them.
    pub(super) fn convert(self, messages: Vec<Value>) -> Vec<Value> {
        let mut turns = Turns::default();
        let mut leading = Vec::new();
        for mut message in messages {
            if !self.developer && is(&message, DEVELOPER) {
                message["role"] = SYSTEM.into();
            }
            if is(&message, ASSISTANT) {
                use_tool_calls(&mut message);
            } else if is(&message, FUNCTION) && self.tool && !self.function {
                message["role"] = TOOL.into();
                message["tool_call_id"] = CALL_ID.into();
            }
            let is_instruction = is(&message, SYSTEM) || is(&message, DEVELOPER);
            let is_written = if is(&message, SYSTEM) { self.late_system } else { self.late_developer };
            match is_instruction {
                true if turns.is_empty() => leading.push(message),
                true if !is_written => turns.remind(reminder(&text(&message["content"]))),
                _ => turns.push(message),
            }
        }
        let mut messages = turns.finish();
        if leading.len() > 1 && !(self.several && self.system) {
            let mut first = leading.remove(0);
            leading.drain(..).for_each(|message| append(&mut first, message["content"].clone()));
            leading.push(first);
        }
        match leading.pop_if(|message| !self.system && is(message, SYSTEM)) {
            Some(message) => prepend(&mut messages, message["content"].clone()),
            None => drop(messages.splice(..0, leading)),
        }
        messages
    }

    /// Whether the template may drop a message because of its role.
    pub(super) fn is_doubtful(self, message: &Value) -> bool {
        match message["role"].as_str() {
            Some(SYSTEM | DEVELOPER | USER | ASSISTANT) => false,
            Some(TOOL) => !self.tool,
            _ => true,
        }
    }

    /// Replaces the text of each converted message that the template may drop. Returns the message's role and its new text.
    pub(super) fn mark_doubtful(self, messages: &mut [Value]) -> Vec<(String, String)> {
        let mut marked = Vec::new();
        for (index, message) in messages.iter_mut().enumerate() {
            if !self.is_doubtful(message) || text(&message["content"]).trim().is_empty() {
                continue;
            }
            let mark = needle(index);
            match &mut message["content"] {
                Value::Array(parts) => parts.retain_mut(|part| {
                    let is_text = part["text"].is_string();
                    if is_text {
                        part["text"] = mark.clone().into();
                    }
                    is_text
                }),
                content => *content = mark.clone().into(),
            }
            marked.push((message["role"].as_str().unwrap_or_default().to_owned(), mark));
        }
        marked
    }
}

/// A text that no template writes by itself.
pub(super) fn needle(index: usize) -> String {
    format!("penstock{index}needle")
}

/// Moves a call of OpenAI's former API to where templates read calls.
fn use_tool_calls(message: &mut Value) {
    if message["tool_calls"].is_null()
        && let Some(call) = message.as_object_mut().and_then(|fields| fields.shift_remove("function_call"))
        && call.is_object()
    {
        message["tool_calls"] = json!([{"id": CALL_ID, "type": "function", "function": call}]);
    }
}

/// The messages after the leading instructions.
#[derive(Default)]
struct Turns {
    messages: Vec<Value>,
    /// The last message is a user's, and ends with a reminder: a further message of the user continues it, because roles may have to
    /// alternate.
    is_reminded: bool,
    /// For the next message of the user: the results of calls come first.
    reminders: Vec<String>,
}

impl Turns {
    fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    fn remind(&mut self, text: String) {
        match self.messages.last_mut().filter(|message| is(message, USER)) {
            Some(message) => {
                append(message, text.into());
                self.is_reminded = true;
            }
            None => self.reminders.push(text),
        }
    }

    fn push(&mut self, mut message: Value) {
        if is(&message, TOOL) {
            return self.messages.push(message);
        }
        if is(&message, USER) {
            if let Some(last) = self.messages.last_mut().filter(|_| std::mem::take(&mut self.is_reminded)) {
                return append(last, message["content"].take());
            }
            if !self.reminders.is_empty() {
                message["content"] = joined(self.take_reminders(), message["content"].take());
            }
        } else {
            self.flush();
        }
        self.is_reminded = false;
        self.messages.push(message);
    }

    fn flush(&mut self) {
        if !self.reminders.is_empty() {
            let content = self.take_reminders();
            self.messages.push(json!({"role": USER, "content": content}));
        }
    }

    fn take_reminders(&mut self) -> Value {
        std::mem::take(&mut self.reminders).join("\n\n").into()
    }

    fn finish(mut self) -> Vec<Value> {
        self.flush();
        self.messages
    }
}

fn is(message: &Value, role: &str) -> bool {
    message["role"] == role
}

/// Puts instructions before the first message, as a part of it if it is the user's.
fn prepend(messages: &mut Vec<Value>, content: Value) {
    match messages.first_mut().filter(|message| is(message, USER)) {
        Some(message) => message["content"] = joined(content, message["content"].take()),
        None => messages.insert(0, json!({"role": USER, "content": content})),
    }
}

fn append(message: &mut Value, content: Value) {
    message["content"] = joined(message["content"].take(), content);
}

/// Both contents, with an empty line between them.
fn joined(one: Value, other: Value) -> Value {
    if let (Value::Array(_), _) | (_, Value::Array(_)) = (&one, &other) {
        let (mut one, mut other) = (parts(one), parts(other));
        if let Some(Value::String(text)) =
            other.first_mut().and_then(|part| part.get_mut("text")).filter(|_| !one.is_empty())
        {
            text.insert_str(0, "\n\n");
        } else if let Some(Value::String(text)) = one.last_mut().and_then(|part| part.get_mut("text")) {
            text.push_str("\n\n");
        }
        one.append(&mut other);
        return one.into();
    }
    let texts = [text(&one), text(&other)];
    texts.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n\n").into()
}

fn parts(content: Value) -> Vec<Value> {
    match content {
        Value::Array(parts) => parts,
        content => [text(&content)]
            .into_iter()
            .filter(|text| !text.is_empty())
            .map(|text| json!({"type": "text", "text": text}))
            .collect(),
    }
}

/// The text of a content.
fn text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    }
}

#[cfg(test)]
#[path = "role_tests.rs"]
mod tests;
