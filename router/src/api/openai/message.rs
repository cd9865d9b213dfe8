//! The messages of a chat, as clients send them and as templates see them.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::generation::ValidationError;

/// A message of the conversation.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Message {
    /// Any role that the model's template knows: `system`, `user`, `assistant`, `tool`, …
    role: String,
    content: Option<Content>,
    /// Further fields for the template: `name`, `tool_calls`, `tool_call_id`, …
    #[serde(flatten)]
    other: Map<String, Value>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "a string or a list of parts")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize, ToSchema)]
struct Part {
    /// `text` or `refusal`; models that read only text refuse other parts.
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    refusal: Option<String>,
}

impl Message {
    /// The text of a message that the assistant wrote.
    pub(super) fn assistant_text(&self) -> Option<String> {
        let content = self.content.as_ref().filter(|_| self.role == "assistant")?;
        Some(match content {
            Content::Text(text) => text.clone(),
            Content::Parts(parts) => parts.iter().filter_map(|part| part.text.as_deref()).collect(),
        })
    }

    pub(super) fn into_template_value(self) -> Result<Value, ValidationError> {
        let content = match self.content {
            None => String::new().into(),
            Some(Content::Text(text)) => text.into(),
            Some(Content::Parts(parts)) => {
                parts.into_iter().map(Part::into_template_value).collect::<Result<_, _>>()?
            }
        };
        let mut message = Map::new();
        message.insert("role".to_owned(), self.role.into());
        message.insert("content".to_owned(), content);
        message.extend(self.other.into_iter().filter(|(_, value)| !value.is_null()));
        if let Some(reasoning) = message.get("reasoning").cloned() {
            // Templates know vLLM's older name.
            message.entry("reasoning_content").or_insert(reasoning);
        }
        Ok(message.into())
    }
}

impl Part {
    fn into_template_value(self) -> Result<Value, ValidationError> {
        match (self.kind.as_str(), self.text, self.refusal) {
            ("text", Some(text), _) | ("refusal", _, Some(text)) => Ok(json!({"type": "text", "text": text})),
            _ => Err(ValidationError::ContentPart { part: self.kind }),
        }
    }
}
