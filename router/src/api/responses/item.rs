//! The items of a conversation, as clients send them.

use std::borrow::Cow;

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use super::problem::problem;
use super::tool::shown_name;
use super::{compaction, custom};
use crate::api::content::{Content, check_detail};
use crate::api::conversation::{Conversation, PromptPart, joined};
use crate::api::field::named;
use crate::generation::{ImageSource, ValidationError};

/// An item of the conversation.
#[derive(Debug)]
pub(super) struct InputItem {
    /// As it was given.
    pub(super) value: Value,
    /// `None` for an item that is read as text.
    fields: Option<Box<ItemFields>>,
}

/// `id` and `status` have no effect.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseInputItem)]
struct ItemFields {
    /// `message` (the default), `reasoning`, `function_call`, `function_call_output`, `custom_tool_call`, `custom_tool_call_output`,
    /// `item_reference`, `compaction`, or one that tells what tools of another server did, which is read as text; others are
    /// refused.
    #[serde(rename = "type", default = "message")]
    #[schema(default = "message", required = false)]
    kind: String,
    /// Role of a message: `user`, `assistant`, `system` or `developer`.
    role: Option<Role>,
    /// Content of a message, a string or a list of parts, or of reasoning, a list of parts.
    content: Option<Content<InputPart>>,
    /// Summary of reasoning; used if there is no `content`.
    summary: Option<Vec<InputPart>>,
    /// Id of a call, which its output repeats.
    call_id: Option<String>,
    /// Name of the called function or tool.
    name: Option<String>,
    /// Namespace of the called function, if it is in one.
    namespace: Option<String>,
    /// JSON text of a function's call.
    arguments: Option<String>,
    /// Free-form text of a custom tool's call.
    input: Option<String>,
    /// Output of a call: a string or a list of parts.
    output: Option<Content<InputPart>>,
    /// Summary in a compaction, as `/v1/responses/compact` returned it.
    encrypted_content: Option<String>,
    /// Id of an item of a stored response, in a reference to it.
    id: Option<String>,
}

fn message() -> String {
    "message".to_owned()
}

/// Items that tell what tools of another server did. They are read as text of the assistant's turn.
const CALLS: [&str; 14] = [
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "computer_call",
    "local_shell_call",
    "shell_call",
    "apply_patch_call",
    "mcp_call",
    "mcp_list_tools",
    "mcp_approval_request",
    "tool_search_call",
    "tool_search_output",
    "program",
];

/// Items that tell what a client answered to such a call. They are read as text of the user's turn.
const OUTPUTS: [&str; 6] = [
    "computer_call_output",
    "local_shell_call_output",
    "shell_call_output",
    "apply_patch_call_output",
    "mcp_approval_response",
    "program_output",
];

impl<'de> Deserialize<'de> for InputItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        let kind = value.get("type").and_then(Value::as_str).unwrap_or_default();
        if CALLS.contains(&kind) || OUTPUTS.contains(&kind) {
            return Ok(Self { value, fields: None });
        }
        let fields = named(&value, |value| ItemFields::deserialize(value)).map_err(D::Error::custom)?;
        Ok(Self { value, fields: Some(Box::new(fields)) })
    }
}

impl PartialSchema for InputItem {
    fn schema() -> RefOr<Schema> {
        ItemFields::schema()
    }
}

impl ToSchema for InputItem {
    fn name() -> Cow<'static, str> {
        ItemFields::name()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        ItemFields::schemas(schemas);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ResponseRole)]
enum Role {
    User,
    Assistant,
    System,
    Developer,
}

/// A part of an item's content.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseInputPart)]
pub(super) struct InputPart {
    /// `input_text`, `output_text`, `text`, `summary_text`, `reasoning_text`, `refusal`, or, in a user's message or a call's
    /// output, for a model that reads images, `input_image`; others are refused.
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    refusal: Option<String>,
    /// Source of an image: a data URI, or, if the server fetches images, an http or https URL.
    image_url: Option<String>,
    /// Resolution of an image: `auto`, `low`, `high` or `original`, without effect: the model's own image processor chooses the resolution.
    detail: Option<String>,
}

/// The type of a part that is an image.
const IMAGE: &str = "input_image";

impl InputPart {
    fn into_part(self, path: &str) -> Result<PromptPart, ValidationError> {
        if self.kind != IMAGE {
            return self.text(path).map(PromptPart::Text);
        }
        let url = self.image_url.ok_or_else(|| problem(path, "missing field `image_url`"))?;
        check_detail(self.detail.as_deref(), path)?;
        Ok(PromptPart::Image(ImageSource { path: format!("{path}.image_url"), url: url.into() }))
    }

    fn text(self, path: &str) -> Result<String, ValidationError> {
        let is_text =
            matches!(self.kind.as_str(), "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text");
        match (self.text, self.refusal) {
            (Some(text), _) if is_text => Ok(text),
            (_, Some(text)) if self.kind == "refusal" => Ok(text),
            _ if is_text || self.kind == "refusal" => Err(problem(path, "the text is missing")),
            _ => Err(problem(path, &format!("`{}` parts are not supported here", self.kind))),
        }
    }
}

/// The items of an input, with those in place of references that `find` finds by their ids.
pub(super) fn resolved(
    input: Content<InputItem>,
    find: impl Fn(&str) -> Option<Value>,
) -> Result<Vec<InputItem>, ValidationError> {
    let items = match input {
        Content::Text(text) => return Ok(vec![InputItem::user(text)]),
        Content::Parts(items) => items,
    };
    let resolve = |(index, item): (usize, InputItem)| {
        let Some(id) = item.reference() else { return Ok(item) };
        let path = format!("input[{index}].id");
        let found = find(id).ok_or_else(|| {
            let problem = "is not the id of an item of a stored response; send the item itself";
            self::problem(&path, &format!("`{id}` {problem}"))
        })?;
        InputItem::deserialize(found).map_err(|error| problem(&path, &error.to_string()))
    };
    items.into_iter().enumerate().map(resolve).collect()
}

/// Adds the items to the conversation.
pub(super) fn add_items(conversation: &mut Conversation, items: Vec<InputItem>) -> Result<(), ValidationError> {
    items.into_iter().enumerate().try_for_each(|(index, item)| item.add(conversation, &format!("input[{index}]")))
}

impl InputItem {
    fn user(text: String) -> Self {
        let content = json!([{"type": "input_text", "text": text}]);
        let value = json!({"type": "message", "status": "completed", "role": "user", "content": content});
        let fields =
            ItemFields { role: Some(Role::User), content: Some(Content::Text(text)), ..ItemFields::of(message()) };
        Self { value, fields: Some(Box::new(fields)) }
    }

    /// The id of the item that it stands for.
    fn reference(&self) -> Option<&str> {
        let fields = self.fields.as_ref()?;
        // The type of a reference may be missing.
        let is_bare =
            self.value.get("type").is_none_or(Value::is_null) && fields.role.is_none() && fields.content.is_none();
        fields.id.as_deref().filter(|_| fields.kind == "item_reference" || is_bare)
    }

    /// The item as responses list it.
    pub(super) fn listed(&self) -> Value {
        let mut value = self.value.clone();
        if let Value::Object(fields) = &mut value {
            let kind = self.fields.as_ref().map_or("item", |fields| fields.kind.as_str());
            fields.entry("type").or_insert_with(|| kind.into());
            if !fields.get("id").is_some_and(Value::is_string) {
                let prefix = if kind == "message" { "msg" } else { "item" };
                fields.insert("id".to_owned(), format!("{prefix}_{:032x}", rand::random::<u128>()).into());
            }
            if kind == "message" {
                fields.entry("status").or_insert_with(|| "completed".into());
                let part = if fields.get("role").is_some_and(|role| role == "assistant") {
                    "output_text"
                } else {
                    "input_text"
                };
                if let Some(Value::String(text)) = fields.get("content") {
                    let mut part = json!({"type": part, "text": text});
                    if part["type"] == "output_text" {
                        part["annotations"] = json!([]);
                    }
                    fields.insert("content".to_owned(), json!([part]));
                }
            }
        }
        value
    }

    /// The text of an item that tells what tools of another server did.
    fn told(&self) -> Option<(String, bool)> {
        let kind = self.value.get("type").and_then(Value::as_str)?;
        let fields = self.value.as_object()?.iter();
        let is_left_out = |key: &str| {
            matches!(key, "type" | "id" | "status" | "call_id") || (kind == "image_generation_call" && key == "result")
        };
        let kept: Map<_, _> =
            fields.filter(|(key, _)| !is_left_out(key)).map(|(key, value)| (key.clone(), value.clone())).collect();
        Some((format!("<{kind}>{}</{kind}>", readable(Value::Object(kept))), CALLS.contains(&kind)))
    }

    /// Whether it is a message of the user.
    pub(super) fn is_user(&self) -> bool {
        self.fields.as_ref().is_some_and(|fields| fields.role == Some(Role::User))
    }

    fn add(self, conversation: &mut Conversation, path: &str) -> Result<(), ValidationError> {
        match self.fields {
            Some(fields) => fields.add(conversation, path),
            None => {
                let Some((text, is_call)) = self.told() else { return Ok(()) };
                let added = if is_call { conversation.text(text) } else { conversation.user(PromptPart::Text(text)) };
                added.map_err(|reason| problem(path, &reason))
            }
        }
    }
}

impl ItemFields {
    fn of(kind: String) -> Self {
        Self {
            kind,
            role: None,
            content: None,
            summary: None,
            call_id: None,
            name: None,
            namespace: None,
            arguments: None,
            input: None,
            output: None,
            encrypted_content: None,
            id: None,
        }
    }

    fn add(self, conversation: &mut Conversation, path: &str) -> Result<(), ValidationError> {
        let missing = |field: &str| problem(path, &format!("missing field `{field}`"));
        let (path, added) = match self.kind.as_str() {
            "message" => {
                let role = self.role.ok_or_else(|| missing("role"))?;
                let (content, at) = (self.content.ok_or_else(|| missing("content"))?, format!("{path}.content"));
                let added = match role {
                    Role::User => return add_user(conversation, content, &at),
                    Role::Assistant => conversation.text(text(content, &at)?),
                    Role::System | Role::Developer => conversation.system(text(content, &at)?),
                };
                (path.to_owned(), added)
            }
            "reasoning" => {
                let parts = self.content.or_else(|| self.summary.map(Content::Parts));
                let reasoning = parts.map(|parts| text(parts, &format!("{path}.content"))).transpose()?;
                match reasoning.filter(|text| !text.is_empty()) {
                    Some(reasoning) => (path.to_owned(), conversation.reasoning(reasoning)),
                    None => return Ok(()),
                }
            }
            kind @ ("function_call" | "custom_tool_call") => {
                let id = self.call_id.ok_or_else(|| missing("call_id"))?;
                let name = self.name.ok_or_else(|| missing("name"))?;
                let arguments = if kind == "function_call" {
                    self.arguments.ok_or_else(|| missing("arguments"))?
                } else {
                    custom::arguments(&self.input.ok_or_else(|| missing("input"))?)
                };
                let name = shown_name(self.namespace.as_deref(), &name);
                (format!("{path}.call_id"), conversation.call(id, name, &arguments))
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = self.call_id.ok_or_else(|| missing("call_id"))?;
                let output = parts(self.output.ok_or_else(|| missing("output"))?, &format!("{path}.output"))?;
                (format!("{path}.call_id"), conversation.result(&id, output))
            }
            "compaction" => {
                let content = self.encrypted_content.ok_or_else(|| missing("encrypted_content"))?;
                let path = format!("{path}.encrypted_content");
                let summary = compaction::summary_of(&content).ok_or_else(|| {
                    problem(&path, "only its author can read it; compact the conversation with this server")
                })?;
                (path, conversation.user(PromptPart::Text(compaction::told(&summary))))
            }
            kind => {
                let known = "`message`, `reasoning`, `function_call`, `function_call_output`, `custom_tool_call`, \
                             `custom_tool_call_output`, `item_reference` and `compaction` are";
                return Err(problem(&format!("{path}.type"), &format!("`{kind}` is not supported, {known}")));
            }
        };
        added.map_err(|reason| problem(&path, &reason))
    }
}

/// The value without what only its author can read, and without files: an image is no text.
fn readable(value: Value) -> Value {
    let is_file = |value: &Value| value.as_str().is_some_and(|text| text.starts_with("data:"));
    match value {
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(key, value)| !(key.starts_with("encrypted") || is_file(value)));
            kept.map(|(key, value)| (key, readable(value))).collect()
        }
        Value::Array(values) => values.into_iter().filter(|value| !is_file(value)).map(readable).collect(),
        value => value,
    }
}

/// Adds a user's message.
fn add_user(conversation: &mut Conversation, content: Content<InputPart>, path: &str) -> Result<(), ValidationError> {
    let mut parts = parts(content, path)?;
    if parts.is_empty() {
        parts.push(PromptPart::Text(String::new()));
    }
    parts.into_iter().try_for_each(|part| conversation.user(part)).map_err(|reason| problem(path, &reason))
}

/// Content that can have images.
fn parts(content: Content<InputPart>, path: &str) -> Result<Vec<PromptPart>, ValidationError> {
    match content {
        Content::Text(text) => Ok(vec![PromptPart::Text(text)]),
        Content::Parts(parts) => {
            let parts = parts.into_iter().enumerate();
            parts.map(|(index, part)| part.into_part(&format!("{path}[{index}]"))).collect()
        }
    }
}

fn text(content: Content<InputPart>, path: &str) -> Result<String, ValidationError> {
    match content {
        Content::Text(text) => Ok(text),
        Content::Parts(parts) => {
            let texts = parts.into_iter().enumerate().map(|(index, part)| part.text(&format!("{path}[{index}]")));
            Ok(joined(texts.collect::<Result<_, _>>()?))
        }
    }
}
