//! The items of a conversation, as clients send them.

use serde::Deserialize;
use utoipa::ToSchema;

use super::problem::problem;
use super::tool::shown_name;
use crate::api::content::{Content, check_detail};
use crate::api::conversation::{Conversation, Part, joined};
use crate::generation::{ImageSource, ValidationError};

/// An item of the conversation. `id` and `status` have no effect.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseInputItem)]
pub(super) struct InputItem {
    /// `message` (the default), `reasoning`, `function_call` or `function_call_output`; others are refused.
    #[serde(rename = "type", default = "message")]
    #[schema(default = "message", required = false)]
    kind: String,
    /// Of a message: `user`, `assistant`, `system` or `developer`.
    role: Option<Role>,
    /// Of a message: a string or a list of parts. Of reasoning: a list of parts.
    content: Option<Content<InputPart>>,
    /// Of reasoning: used if there is no `content`.
    summary: Option<Vec<InputPart>>,
    /// Of a call and of its output.
    call_id: Option<String>,
    /// Of a call.
    name: Option<String>,
    /// Of a call, if the function is in a namespace.
    namespace: Option<String>,
    /// Of a call: JSON text.
    arguments: Option<String>,
    /// Of a call's output: a string or a list of parts.
    output: Option<Content<InputPart>>,
}

fn message() -> String {
    "message".to_owned()
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
    /// Of an image: a data URI, or, if the server fetches images, an http or https URL.
    image_url: Option<String>,
    /// Of an image: `auto`, `low`, `high` or `original`, without effect: the model's own image processor chooses the resolution.
    detail: Option<String>,
}

/// The type of a part that is an image.
const IMAGE: &str = "input_image";

impl InputPart {
    fn into_part(self, path: &str) -> Result<Part, ValidationError> {
        if self.kind != IMAGE {
            return self.text(path).map(Part::Text);
        }
        let url = self.image_url.ok_or_else(|| problem(path, "missing field `image_url`"))?;
        check_detail(self.detail.as_deref(), path)?;
        Ok(Part::Image(ImageSource { path: format!("{path}.image_url"), url: url.into() }))
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

/// Adds the items to the conversation.
pub(super) fn add_items(conversation: &mut Conversation, input: Content<InputItem>) -> Result<(), ValidationError> {
    match input {
        Content::Text(text) => conversation.user(Part::Text(text)).map_err(|reason| problem("input", &reason)),
        Content::Parts(items) => {
            for (index, item) in items.into_iter().enumerate() {
                item.add(conversation, &format!("input[{index}]"))?;
            }
            Ok(())
        }
    }
}

impl InputItem {
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
            "function_call" => {
                let id = self.call_id.ok_or_else(|| missing("call_id"))?;
                let name = self.name.ok_or_else(|| missing("name"))?;
                let arguments = self.arguments.ok_or_else(|| missing("arguments"))?;
                let name = shown_name(self.namespace.as_deref(), &name);
                (format!("{path}.call_id"), conversation.call(id, name, &arguments))
            }
            "function_call_output" => {
                let id = self.call_id.ok_or_else(|| missing("call_id"))?;
                let output = parts(self.output.ok_or_else(|| missing("output"))?, &format!("{path}.output"))?;
                (format!("{path}.call_id"), conversation.result(&id, output))
            }
            kind => {
                let known = "`message`, `reasoning`, `function_call` and `function_call_output` are";
                return Err(problem(&format!("{path}.type"), &format!("`{kind}` is not supported, {known}")));
            }
        };
        added.map_err(|reason| problem(&path, &reason))
    }
}

/// Adds a user's message.
fn add_user(conversation: &mut Conversation, content: Content<InputPart>, path: &str) -> Result<(), ValidationError> {
    let mut parts = parts(content, path)?;
    if parts.is_empty() {
        parts.push(Part::Text(String::new()));
    }
    parts.into_iter().try_for_each(|part| conversation.user(part)).map_err(|reason| problem(path, &reason))
}

/// Content that can have images.
fn parts(content: Content<InputPart>, path: &str) -> Result<Vec<Part>, ValidationError> {
    match content {
        Content::Text(text) => Ok(vec![Part::Text(text)]),
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
