//! The messages of a chat, as clients send them and as templates see them.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::api::content::{Content, check_detail};
use crate::generation::{ImageSource, ValidationError};

/// A message of the conversation.
#[derive(Debug, Deserialize, ToSchema)]
pub(crate) struct Message {
    /// Any role that the model's template knows: `system`, `user`, `assistant`, `tool`, …
    role: String,
    content: Option<Content<Part>>,
    /// Further fields for the template: `name`, `tool_calls`, `tool_call_id`, …
    #[serde(flatten)]
    other: Map<String, Value>,
}

#[derive(Debug, Deserialize, ToSchema)]
struct Part {
    /// `text`, `refusal`, or, for a model that reads images, `image_url`.
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
    refusal: Option<String>,
    image_url: Option<ImageUrl>,
}

/// An image.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "a URL, or an object with a `url`")]
enum ImageUrl {
    Object {
        /// A data URI, as in `data:image/png;base64,iVBOR…`, or, if the server fetches images, an http or https URL.
        url: String,
        /// `auto`, `low`, `high` or `original`, without effect: the model's own image processor chooses the resolution.
        detail: Option<String>,
    },
    Url(String),
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

    /// images: where images go; `None`: the model reads none. index: of the message.
    pub(super) fn into_template_value(
        self,
        index: usize,
        mut images: Option<&mut Vec<ImageSource>>,
    ) -> Result<Value, ValidationError> {
        let content = match self.content {
            // What the model has refused to do is what it has said; templates do not know the field.
            None => self.other.get("refusal").and_then(Value::as_str).unwrap_or_default().into(),
            Some(Content::Text(text)) => text.into(),
            Some(Content::Parts(parts)) => {
                let to_value = |(place, part): (usize, Part)| {
                    let path = || format!("messages[{index}].content[{place}]");
                    part.into_template_value(path, images.as_deref_mut())
                };
                parts.into_iter().enumerate().map(to_value).collect::<Result<_, _>>()?
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
    fn into_template_value(
        self,
        path: impl Fn() -> String,
        images: Option<&mut Vec<ImageSource>>,
    ) -> Result<Value, ValidationError> {
        match (self.kind.as_str(), self.text, self.refusal, self.image_url, images) {
            ("text", Some(text), ..) | ("refusal", _, Some(text), ..) => Ok(json!({"type": "text", "text": text})),
            ("image_url", .., Some(image), Some(images)) => {
                let (url, detail) = match image {
                    ImageUrl::Object { url, detail } => (url, detail),
                    ImageUrl::Url(url) => (url, None),
                };
                let path = format!("{}.image_url", path());
                check_detail(detail.as_deref(), &path)?;
                images.push(ImageSource { path, url: url.into() });
                Ok(json!({"type": "image"}))
            }
            _ => Err(ValidationError::ContentPart { part: self.kind }),
        }
    }
}
