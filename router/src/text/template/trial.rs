//! Finds out what a template writes by rendering small conversations. The template's source would not tell reliably.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::input::ChatInputs;
use super::shape::{ContentShape, SupportedShapes};
use crate::text::answer::{Format, ReasoningFormat, WrittenCall};

/// Texts that no template writes by itself.
const NEEDLE: &str = "penstocktrial";
const OTHER_NEEDLE: &str = "penstockprobe";
const FUNCTION: &str = "penstock_function";

/// What a template writes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TemplateTraits {
    /// Whether it writes the tools of the request.
    pub(crate) shows_tools: bool,
    /// The name of the format in which it writes tool calls, or an instruction to write them. `None` if unknown.
    pub(crate) format: Option<String>,
    /// Whether it writes several calls of one message.
    pub(crate) parallel_calls: bool,
    /// A conversation with thoughts and tools, as far as the template writes it.
    pub(crate) written: String,
}

/// Renders trial conversations. `render` returns `None` if the template refuses the conversation.
pub(super) struct Trial<R>(pub(super) R);

impl<R: Fn(ChatInputs) -> Option<String>> Trial<R> {
    /// `source`: of the template.
    pub(super) fn run(&self, source: &str) -> (SupportedShapes, TemplateTraits) {
        let thoughts = json!({"role": "assistant", "reasoning_content": NEEDLE, "content": OTHER_NEEDLE});
        let mut written = self.messages(vec![user(NEEDLE.into()), thoughts]).unwrap_or_default();
        let prompt = ChatInputs { messages: vec![user(NEEDLE.into())], ..ChatInputs::default() };
        written.push_str(&(self.0)(prompt).unwrap_or_default());
        let reasoning = ReasoningFormat::detect(&[source, &written]);
        let (format, object_arguments) = self.call_format(reasoning);
        let parallel_calls = format.is_none_or(|format| self.writes_two_calls(format, object_arguments, reasoning));
        let instruction = self.instruction();
        let traits = TemplateTraits {
            shows_tools: instruction.is_some(),
            format: format
                .or_else(|| Format::of_instruction(instruction.as_deref().unwrap_or_default()))
                .map(|format| format.name().to_owned()),
            parallel_calls,
            written,
        };
        let shapes = SupportedShapes {
            user: self.content_shape(&[], "user", &[]),
            system: self.content_shape(&[], "system", &[user("?".into())]),
            assistant: self.content_shape(&[user("?".into())], "assistant", &[user("?".into())]),
            tool: self.content_shape(&[user("?".into()), answer(&[call(json!({}), 0, None)])], "tool", &[]),
            object_arguments,
        };
        (shapes, traits)
    }

    fn messages(&self, messages: Vec<Value>) -> Option<String> {
        self.rendered(messages, None)
    }

    fn rendered(&self, messages: Vec<Value>, tools: Option<Vec<Value>>) -> Option<String> {
        (self.0)(ChatInputs { messages, tools, add_generation_prompt: Some(false), ..ChatInputs::default() })
    }

    /// The text with the tools' names that the template adds to a conversation with tools.
    fn instruction(&self) -> Option<String> {
        let conversations = [vec![user("?".into())], vec![json!({"role": "system", "content": "?"}), user("?".into())]];
        conversations.into_iter().find_map(|messages| {
            let with_tools = self.rendered(messages.clone(), Some(vec![tool()]))?;
            let without = self.messages(messages).unwrap_or_default();
            // A template that writes the tools of every conversation would need no tools to do so.
            (with_tools.contains(FUNCTION) && !without.contains(FUNCTION)).then_some(with_tools)
        })
    }

    /// The format of calls, and whether their arguments must be objects.
    fn call_format(&self, reasoning: Option<ReasoningFormat>) -> (Option<&'static Format>, bool) {
        for as_object in [true, false] {
            for id in [None, Some(format!("functions.{FUNCTION}:0"))] {
                let arguments = if as_object { arguments(0) } else { arguments(0).to_string().into() };
                let calls = [call(arguments, 0, id)];
                if let Some(format) = self.written_calls(&calls).and_then(|text| of_calls(&text, 1, reasoning)) {
                    return (Some(format), as_object);
                }
            }
        }
        // A template that concatenates texts writes an object as Python.
        let writes = |arguments: Value| {
            let text = self.written_calls(&[call(arguments, 0, None)]);
            text.is_some_and(|text| text.contains("penstock word") && !text.contains("'word':"))
        };
        (None, writes(arguments(0)) || !writes(arguments(0).to_string().into()))
    }

    fn writes_two_calls(&self, format: &Format, as_object: bool, reasoning: Option<ReasoningFormat>) -> bool {
        let arguments = |index| if as_object { arguments(index) } else { arguments(index).to_string().into() };
        let calls = |id: &dyn Fn(usize) -> Option<String>| [0, 1].map(|index| call(arguments(index), index, id(index)));
        let ids: [&dyn Fn(usize) -> Option<String>; 2] =
            [&|_| None, &|index| Some(format!("functions.{FUNCTION}:{index}"))];
        ids.into_iter().any(|id| {
            let text = self.written_calls(&calls(id));
            text.and_then(|text| of_calls(&text, 2, reasoning)).is_some_and(|found| found == format)
        })
    }

    /// The text of an assistant's message with these calls.
    fn written_calls(&self, calls: &[Value]) -> Option<String> {
        [Some(vec![tool()]), None].into_iter().find_map(|tools| {
            let messages = |answer| vec![user(NEEDLE.into()), answer];
            let text = self.rendered(messages(answer(calls)), tools.clone())?;
            // What the template writes around any text of the assistant does not belong to the calls.
            let plain = json!({"role": "assistant", "content": OTHER_NEEDLE});
            let plain = self.rendered(messages(plain), tools).unwrap_or_default();
            let (head, tail) = plain.split_once(OTHER_NEEDLE).unwrap_or_default();
            let after_question = || text.rsplit_once(NEEDLE).map_or("", |(_, rest)| rest);
            let body = text.strip_prefix(head).filter(|_| !head.is_empty()).unwrap_or_else(after_question);
            let body = body.strip_suffix(tail).unwrap_or(body);
            body.contains("penstock").then(|| body.to_owned())
        })
    }

    /// The shapes of content that the template writes in a message of this role between these messages.
    fn content_shape(&self, before: &[Value], role: &str, after: &[Value]) -> ContentShape {
        let rendered = |content: Value| {
            let id = call_id(0);
            let message = json!({"role": role, "content": content, "tool_call_id": id, "name": FUNCTION});
            let mut message = message.as_object().cloned().unwrap_or_default();
            if role != "tool" {
                message.retain(|key, _| key == "role" || key == "content");
            }
            self.messages([before, &[message.into()], after].concat()).unwrap_or_default()
        };
        let part = |text: &str| json!({"type": "text", "text": text});
        let parts = rendered(json!([part(NEEDLE), part(OTHER_NEEDLE)]));
        // A template for strings would write the list itself, as Python or as JSON.
        let is_leaked = ["'text':", "\"text\":"].iter().any(|key| parts.contains(key));
        ContentShape {
            string: rendered(NEEDLE.into()).contains(NEEDLE),
            parts: parts.contains(NEEDLE) && parts.contains(OTHER_NEEDLE) && !is_leaked,
        }
    }
}

fn user(content: Value) -> Value {
    json!({"role": "user", "content": content})
}

fn answer(calls: &[Value]) -> Value {
    json!({"role": "assistant", "content": "", "tool_calls": calls})
}

/// Nine letters and digits, which some templates require.
fn call_id(index: usize) -> String {
    format!("call0000{index}")
}

fn call(arguments: Value, index: usize, id: Option<String>) -> Value {
    let id = id.unwrap_or_else(|| call_id(index));
    json!({"id": id, "type": "function", "function": {"name": FUNCTION, "arguments": arguments}})
}

fn parameters() -> Value {
    json!({
        "type": "object",
        "properties": {
            "word": {"type": "string", "description": "a word"},
            "count": {"type": "integer", "description": "a number"},
            "list": {"type": "array", "items": {"type": "string"}, "description": "words"},
        },
        "required": ["word"],
    })
}

fn arguments(index: usize) -> Value {
    json!({"word": format!("penstock word {index}"), "count": 12, "list": ["a", "b"]})
}

fn tool() -> Value {
    let function = json!({"name": FUNCTION, "description": "a function", "parameters": parameters()});
    json!({"type": "function", "function": function})
}

/// The format of `num_calls` trial calls.
fn of_calls(text: &str, num_calls: usize, reasoning: Option<ReasoningFormat>) -> Option<&'static Format> {
    let parameters = parameters();
    let arguments: Vec<_> = (0..num_calls).map(arguments).collect();
    let calls: Vec<_> =
        arguments.iter().map(|arguments| WrittenCall { name: FUNCTION, arguments, parameters: &parameters }).collect();
    Format::of_calls(text, &calls, reasoning)
}
