//! Finds out what a template writes by rendering small conversations. The template's source would not tell reliably.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::after_answer::AfterAnswer;
use super::input::ChatInputs;
use super::role::{KNOWN, SupportedRoles, needle};
use super::shape::{ContentShape, SupportedShapes, ToolPlace};
use crate::text::answer::{Format, Frame, WrittenCall};

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
    pub(crate) after_answer: AfterAnswer,
}

/// A format that a template writes.
#[derive(Clone, Copy)]
struct WrittenFormat {
    format: &'static Format,
    /// How many of the trial's arguments were read back.
    num_arguments: usize,
    as_object: bool,
}

/// Renders trial conversations. `render` returns `None` if the template refuses the conversation.
pub(super) struct Probe<R>(pub(super) R);

impl<R: Fn(ChatInputs) -> Option<String>> Probe<R> {
    /// `source`: of the template.
    pub(super) fn run(&self, source: &str) -> (SupportedShapes, TemplateTraits) {
        let thoughts = json!({"role": "assistant", "reasoning_content": NEEDLE, "content": OTHER_NEEDLE});
        let mut written = self.messages(vec![user(NEEDLE.into()), thoughts]).unwrap_or_default();
        let prompt = ChatInputs { messages: vec![user(NEEDLE.into())], ..ChatInputs::default() };
        written.push_str(&(self.0)(prompt).unwrap_or_default());
        let frame = Frame::detect(&[source, &written]);
        let (written_format, object_arguments) = self.call_format(frame);
        let parallel_calls = written_format.is_none_or(|written| self.writes_two_calls(written, frame));
        let (tool_place, instruction) = self.instruction().unzip();
        let described = Format::of_instruction(instruction.as_deref().unwrap_or_default());
        // A template may write calls as bare JSON that its instruction asks to mark.
        let format = match written_format.map(|written| written.format) {
            Some(format) if described.is_none() || !format.is_bare() => Some(format),
            _ => described,
        };
        let traits = TemplateTraits {
            shows_tools: instruction.is_some(),
            format: format.map(|format| format.name().to_owned()),
            parallel_calls,
            written,
            after_answer: self.after_answer(),
        };
        let shapes = SupportedShapes {
            user: self.content_shape(&[], "user", &[]),
            system: self.content_shape(&[], "system", &[user("?".into())]),
            assistant: self.content_shape(&[user("?".into())], "assistant", &[user("?".into())]),
            tool: self.content_shape(&[user("?".into()), answer(&[call(json!({}), 0, None)])], "tool", &[]),
            object_arguments,
            tools: tool_place.unwrap_or_default(),
        };
        (shapes, traits)
    }

    /// The roles in which the template writes instructions. `shapes`: the shapes of messages that it writes.
    pub(super) fn roles(&self, shapes: SupportedShapes) -> SupportedRoles {
        let render = |roles: &[&str]| {
            let message = |(index, role)| shapes.convert(json!({"role": role, "content": needle(index)}), None);
            self.messages(roles.iter().enumerate().map(message).collect())
        };
        let writes = |roles: &[&str]| {
            render(roles).is_some_and(|text| (0..roles.len()).all(|index| text.contains(&needle(index))))
        };
        // A template may refuse the trial for another reason.
        if !writes(&["user"]) {
            return SupportedRoles::default();
        }
        let has_turns = writes(&["user", "assistant", "user"]);
        let writes_late = |role| {
            let places: [&[&str]; 3] =
                [&["user", "assistant", role, "user"], &["user", role], &["user", role, "assistant", "user"]];
            !has_turns || places.into_iter().all(writes)
        };
        // Many templates write any role, with the name that the message has.
        let as_unknown = render(&[NEEDLE, "user"]).map(|text| text.replace(NEEDLE, "developer"));
        let developer = writes(&["developer", "user"]) && render(&["developer", "user"]) != as_unknown;
        let roles: &[&str] = if developer { &["system", "developer"] } else { &["system"] };
        let pairs = roles.iter().flat_map(|one| roles.iter().map(move |other| [*one, *other, "user"]));
        SupportedRoles {
            developer,
            system: writes(&["system", "user"]),
            several: { pairs }.all(|pair| writes(&pair)),
            late_system: writes_late("system"),
            late_developer: developer && writes_late("developer"),
            tool: shapes.tool.string || shapes.tool.parts,
            function: writes(&["user", "assistant", "function"]),
        }
    }

    /// The roles whose messages the template writes.
    pub(super) fn written_roles(&self, shapes: SupportedShapes) -> Vec<&'static str> {
        let writes = |before: &[Value], role: &str| {
            let message = shapes.convert(json!({"role": role, "content": NEEDLE}), None);
            let text = self.messages([before, &[message]].concat());
            text.is_some_and(|text| text.contains(NEEDLE))
        };
        let conversation = [user("?".into()), json!({"role": "assistant", "content": "!"})];
        let is_written = |role: &&'static str| match *role {
            "tool" => shapes.tool.string || shapes.tool.parts,
            role => [&[][..], &conversation[..1], &conversation].iter().any(|before| writes(before, role)),
        };
        KNOWN.into_iter().filter(is_written).collect()
    }

    fn messages(&self, messages: Vec<Value>) -> Option<String> {
        self.rendered(messages, None)
    }

    fn rendered(&self, messages: Vec<Value>, tools: Option<Vec<Value>>) -> Option<String> {
        (self.0)(ChatInputs { messages, tools, add_generation_prompt: Some(false), ..ChatInputs::default() })
    }

    fn after_answer(&self) -> AfterAnswer {
        let after = |next: &[Value]| {
            let answer = json!({"role": "assistant", "content": OTHER_NEEDLE});
            let text = self.messages([&[user(NEEDLE.into()), answer], next].concat())?;
            text.rsplit_once(OTHER_NEEDLE).map(|(_, rest)| rest.to_owned())
        };
        AfterAnswer {
            last: after(&[]).unwrap_or_default(),
            before_user: after(&[user("?".into())]).unwrap_or_default(),
        }
    }

    /// The place in which the template expects tools, and the text with their names that it adds to a conversation.
    fn instruction(&self) -> Option<(ToolPlace, String)> {
        let conversations = [vec![user("?".into())], vec![json!({"role": "system", "content": "?"}), user("?".into())]];
        let trials =
            ToolPlace::ALL.into_iter().flat_map(|place| conversations.clone().map(|messages| (place, messages)));
        trials.into_iter().find_map(|(place, messages)| {
            let without = self.messages(messages.clone()).unwrap_or_default();
            let mut inputs = ChatInputs { messages, add_generation_prompt: Some(false), ..ChatInputs::default() };
            inputs.tools = Some(vec![tool()]);
            place.convert(&mut inputs);
            let with_tools = (self.0)(inputs)?;
            // A template that writes the tools of every conversation would need no tools to do so.
            (with_tools.contains(FUNCTION) && !without.contains(FUNCTION)).then_some((place, with_tools))
        })
    }

    /// The format of calls, and whether their arguments must be objects.
    fn call_format(&self, frame: Frame) -> (Option<WrittenFormat>, bool) {
        // Some templates write numbers, or even texts, otherwise than the model does.
        for num_arguments in [3, 1, 0] {
            for as_object in [true, false] {
                for id in [None, Some(format!("functions.{FUNCTION}:0")), Some("call000000".to_owned())] {
                    let calls = [call(arguments(0, num_arguments, as_object), 0, id)];
                    let text = self.written_calls(&calls).unwrap_or_default();
                    let found: Vec<_> =
                        trial_calls(1, num_arguments, |calls| Format::all_of_calls(&text, calls, frame).collect());
                    let mut found = found.into_iter().map(|format| WrittenFormat { format, num_arguments, as_object });
                    let first = found.clone().next();
                    // Formats may differ only in what is between two calls.
                    if let Some(written) = found.find(|written| self.writes_two_calls(*written, frame)).or(first) {
                        return (Some(written), as_object);
                    }
                }
            }
        }
        // A template that concatenates texts writes an object as Python.
        let writes = |as_object| {
            let text = self.written_calls(&[call(arguments(0, 3, as_object), 0, None)]);
            text.is_some_and(|text| text.contains("penstock word") && !text.contains("'word':"))
        };
        (None, writes(true) || !writes(false))
    }

    fn writes_two_calls(&self, written: WrittenFormat, frame: Frame) -> bool {
        let WrittenFormat { format, num_arguments, as_object } = written;
        let calls = |id: &dyn Fn(usize) -> Option<String>| {
            [0, 1].map(|index| call(arguments(index, num_arguments, as_object), index, id(index)))
        };
        let ids: [&dyn Fn(usize) -> Option<String>; 3] =
            [&|_| None, &|index| Some(format!("functions.{FUNCTION}:{index}")), &|index| {
                Some(format!("call00000{index}"))
            }];
        ids.into_iter().any(|id| {
            let text = self.written_calls(&calls(id));
            text.is_some_and(|text| trial_calls(2, num_arguments, |calls| format.reads(&text, calls, frame)))
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

/// The first trial arguments, as an object or as JSON text.
fn arguments(index: usize, num_arguments: usize, as_object: bool) -> Value {
    let word = format!("penstock word {index}");
    let all = [("word", json!(word)), ("count", json!(12)), ("list", json!(["a", "b"]))];
    let object: Map<_, _> = all.into_iter().take(num_arguments).map(|(key, value)| (key.to_owned(), value)).collect();
    if as_object { object.into() } else { Value::Object(object).to_string().into() }
}

fn tool() -> Value {
    let function = json!({"name": FUNCTION, "description": "a function", "parameters": parameters()});
    json!({"type": "function", "function": function})
}

/// Calls `use_calls` with the first trial calls.
fn trial_calls<T>(num_calls: usize, num_arguments: usize, use_calls: impl FnOnce(&[WrittenCall<'_>]) -> T) -> T {
    let parameters = parameters();
    let arguments: Vec<_> = (0..num_calls).map(|index| arguments(index, num_arguments, true)).collect();
    let calls: Vec<_> =
        arguments.iter().map(|arguments| WrittenCall { name: FUNCTION, arguments, parameters: &parameters }).collect();
    use_calls(&calls)
}
