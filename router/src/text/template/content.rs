//! Makes messages of OpenAI's clients fit a template: contents as one string or as a list of parts, and arguments of
//! tool calls as an object or as a string.
//!
//! The rule for contents: a string stays a string and a list stays a list where the template writes them. A list for a
//! template which only writes strings becomes their texts, put together with nothing in between (as in TGI); a string
//! for one which only writes lists becomes a list of one part.

use serde_json::{Value, json};

/// What a template can write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Habits {
    pub(super) writes_strings: bool,
    pub(super) writes_parts: bool,
    pub(super) writes_argument_objects: bool,
}

impl Default for Habits {
    /// Most templates'.
    fn default() -> Self {
        Self { writes_strings: true, writes_parts: false, writes_argument_objects: true }
    }
}

impl Habits {
    pub(super) fn adapt(self, mut message: Value) -> Value {
        if let Some(content) = message.get_mut("content") {
            self.adapt_content(content);
        }
        if self.writes_argument_objects
            && let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut)
        {
            calls.iter_mut().filter_map(|call| call.pointer_mut("/function/arguments")).for_each(parse_object);
        }
        message
    }

    fn adapt_content(self, content: &mut Value) {
        match content {
            Value::Array(parts) if !self.writes_parts => {
                if let Some(text) = joined(parts) {
                    *content = text.into();
                }
            }
            Value::String(text) if !self.writes_strings && self.writes_parts => {
                *content = json!([{"type": "text", "text": text}]);
            }
            _ => {}
        }
    }
}

/// `None` if a part is no text: the template decides what to do with it.
fn joined(parts: &[Value]) -> Option<String> {
    parts.iter().map(|part| part["text"].as_str()).collect()
}

/// Arguments which are no JSON object, as small models may have written them, stay a string.
fn parse_object(arguments: &mut Value) {
    if let Some(object) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok()) {
        *arguments = Value::Object(object);
    }
}
