//! Converts messages to the shapes that a template supports: content as a string or as a list of parts, and arguments of
//! tool calls as an object or as a string.
//!
//! Content keeps its shape where the template supports it. For a template that supports only strings, a list becomes the
//! concatenation of its texts (as in TGI). For a template that supports only lists, a string becomes a list of one part.

use serde_json::{Value, json};

/// The shapes of message fields that a template supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SupportedShapes {
    pub(super) string_content: bool,
    pub(super) part_content: bool,
    pub(super) object_arguments: bool,
}

impl Default for SupportedShapes {
    /// What most templates support.
    fn default() -> Self {
        Self { string_content: true, part_content: false, object_arguments: true }
    }
}

impl SupportedShapes {
    pub(super) fn convert(self, mut message: Value) -> Value {
        if let Some(content) = message.get_mut("content") {
            self.convert_content(content);
        }
        if self.object_arguments
            && let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut)
        {
            calls.iter_mut().filter_map(|call| call.pointer_mut("/function/arguments")).for_each(parse_object);
        }
        message
    }

    fn convert_content(self, content: &mut Value) {
        match content {
            Value::Array(parts) if !self.part_content => {
                if let Some(text) = joined(parts) {
                    *content = text.into();
                }
            }
            Value::String(text) if !self.string_content && self.part_content => {
                *content = json!([{"type": "text", "text": text}]);
            }
            _ => {}
        }
    }
}

/// The concatenated texts; `None` if a part is not a text, which is left to the template.
fn joined(parts: &[Value]) -> Option<String> {
    parts.iter().map(|part| part["text"].as_str()).collect()
}

/// Arguments that are not a JSON object, as small models may write them, stay a string.
fn parse_object(arguments: &mut Value) {
    if let Some(object) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok()) {
        *arguments = Value::Object(object);
    }
}
