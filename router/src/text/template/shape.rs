//! Converts messages to the shapes that a template supports: content as a string or as a list of parts, and arguments of
//! tool calls as an object or as a string.
//!
//! Content keeps its shape where the template supports it in messages of the role. For a template that supports only strings, a list becomes the
//! concatenation of its texts (as in TGI), in which each image is the text that stands for it. For a template that supports only lists, a string
//! becomes a list of one part.

use serde_json::{Value, json};

use super::input::ChatInputs;
use super::python_json::{self, Style};

/// The shapes of a message's content that a template writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ContentShape {
    pub(super) string: bool,
    pub(super) parts: bool,
}

/// The shapes of message fields that a template supports. Other roles than these are treated like users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SupportedShapes {
    pub(super) user: ContentShape,
    pub(super) system: ContentShape,
    pub(super) assistant: ContentShape,
    pub(super) tool: ContentShape,
    pub(super) object_arguments: bool,
    pub(super) tools: ToolPlace,
}

/// The variable from which a template reads the tools of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum ToolPlace {
    /// The variable `tools`.
    #[default]
    Tools,
    /// SmolLM3's variable for tools that are called with JSON.
    XmlTools,
    /// The field `tools` of the system message, as JSON text: Phi-4-mini.
    SystemMessage,
}

impl ToolPlace {
    pub(super) const ALL: [Self; 3] = [Self::Tools, Self::XmlTools, Self::SystemMessage];

    pub(super) fn convert(self, inputs: &mut ChatInputs) {
        let Some(tools) = &inputs.tools else { return };
        match self {
            Self::Tools => {}
            Self::XmlTools => {
                let given = ["xml_tools", "python_tools"].iter().any(|name| inputs.kwargs.contains_key(*name));
                if !given {
                    inputs.kwargs.insert("xml_tools".to_owned(), tools.clone().into());
                }
            }
            Self::SystemMessage => {
                let functions: Vec<_> = tools.iter().map(|tool| tool["function"].clone()).collect();
                let text = python_json::to_string(&functions.into(), &Style::default());
                if inputs.messages.first().is_none_or(|message| message["role"] != "system") {
                    inputs.messages.insert(0, json!({"role": "system", "content": ""}));
                }
                inputs.messages[0]["tools"] = text.into();
            }
        }
    }
}

impl Default for SupportedShapes {
    /// What most templates support.
    fn default() -> Self {
        let content = ContentShape { string: true, parts: false };
        Self {
            user: content,
            system: content,
            assistant: content,
            tool: content,
            object_arguments: true,
            tools: ToolPlace::default(),
        }
    }
}

impl SupportedShapes {
    pub(super) fn convert(self, mut message: Value, image_text: Option<&str>) -> Value {
        let shape = match message["role"].as_str() {
            Some("system" | "developer") => self.system,
            Some("assistant") => self.assistant,
            Some("tool") => self.tool,
            _ => self.user,
        };
        if let Some(content) = message.get_mut("content") {
            shape.convert(content, image_text);
        }
        if self.object_arguments
            && let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut)
        {
            calls.iter_mut().filter_map(|call| call.pointer_mut("/function/arguments")).for_each(parse_object);
        }
        message
    }
}

impl ContentShape {
    fn convert(self, content: &mut Value, image_text: Option<&str>) {
        match content {
            Value::Array(parts) if !self.parts => {
                if let Some(text) = joined(parts, image_text) {
                    *content = text.into();
                }
            }
            Value::String(text) if !self.string && self.parts => {
                *content = json!([{"type": "text", "text": text}]);
            }
            _ => {}
        }
    }
}

/// The concatenated texts; `None` if a part is neither a text nor an image, which is left to the template.
fn joined(parts: &[Value], image_text: Option<&str>) -> Option<String> {
    let texts = parts.iter().map(|part| if part["type"] == "image" { image_text } else { part["text"].as_str() });
    texts.collect()
}

/// Arguments that are not a JSON object, as small models may write them, stay a string.
fn parse_object(arguments: &mut Value) {
    if let Some(object) = arguments.as_str().and_then(|text| serde_json::from_str(text).ok()) {
        *arguments = Value::Object(object);
    }
}
