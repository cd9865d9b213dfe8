//! The content of messages, as clients send it.

use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::api::content::Content;
use crate::generation::ValidationError;

/// A message of the conversation.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicMessageParam)]
pub(super) struct MessageParam {
    pub(super) role: Role,
    pub(super) content: Content<Block>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = AnthropicRole)]
pub(super) enum Role {
    User,
    Assistant,
    System,
}

/// A block of a message. `cache_control` has no effect in any block: every prompt is cached.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicBlock)]
pub(super) enum Block {
    Text {
        text: String,
    },
    /// Reasoning of an earlier answer. The signature is not verified.
    Thinking {
        thinking: String,
    },
    /// Dropped: only Anthropic can read it.
    RedactedThinking,
    /// A call in an earlier answer.
    ToolUse {
        id: String,
        name: String,
        #[schema(value_type = Object)]
        input: Map<String, Value>,
    },
    /// The result of a call in the message before.
    ToolResult {
        tool_use_id: String,
        content: Option<Content<TextBlock>>,
    },
    /// Of a user's message or of a tool's result, for a model that reads images.
    Image {
        source: Option<ImageField>,
    },
    /// Refused: the model reads only text.
    Document,
    /// Refused: the model reads only text.
    SearchResult,
}

/// Where an image is.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicImageSource)]
pub(super) enum ImageField {
    Base64 {
        media_type: String,
        data: String,
    },
    /// A data URI, or, if the server fetches images, an http or https URL.
    Url {
        url: String,
    },
}

impl ImageField {
    pub(super) fn into_url(self) -> Arc<str> {
        match self {
            Self::Base64 { media_type, data } => format!("data:{media_type};base64,{data}").into(),
            Self::Url { url } => url.into(),
        }
    }
}

/// A block of a system prompt or of a tool's result.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicTextBlock)]
pub(super) enum TextBlock {
    Text {
        text: String,
    },
    /// Of a tool's result, for a model that reads images; refused in a system prompt.
    Image {
        source: Option<ImageField>,
    },
    /// Refused: the model reads only text.
    Document,
    /// Refused: the model reads only text.
    SearchResult,
}

impl From<TextBlock> for Block {
    fn from(block: TextBlock) -> Self {
        match block {
            TextBlock::Text { text } => Self::Text { text },
            TextBlock::Image { source } => Self::Image { source },
            TextBlock::Document => Self::Document,
            TextBlock::SearchResult => Self::SearchResult,
        }
    }
}

impl Block {
    /// The block's type on the wire.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Text { .. } => "text",
            Self::Thinking { .. } => "thinking",
            Self::RedactedThinking => "redacted_thinking",
            Self::ToolUse { .. } => "tool_use",
            Self::ToolResult { .. } => "tool_result",
            Self::Image { .. } => "image",
            Self::Document => "document",
            Self::SearchResult => "search_result",
        }
    }

    /// The refusal of this block. `path`: where it is in the request.
    pub(super) fn refused(&self, path: &str, why: &str) -> ValidationError {
        ValidationError::Item { path: path.to_owned(), problem: format!("`{}` blocks {why}", self.kind()) }
    }
}

/// The blocks with their paths. `path`: that of the content.
pub(super) fn blocks<B: Into<Block>>(content: Content<B>, path: &str) -> Vec<(String, Block)> {
    match content {
        Content::Text(text) => vec![(path.to_owned(), Block::Text { text })],
        Content::Parts(parts) => {
            let at = |(index, part): (usize, B)| (format!("{path}[{index}]"), part.into());
            parts.into_iter().enumerate().map(at).collect()
        }
    }
}

/// The texts of content that consists only of text.
pub(super) fn texts(content: Content<TextBlock>, path: &str) -> Result<Vec<String>, ValidationError> {
    let text = |(path, block): (String, Block)| match block {
        Block::Text { text } => Ok(text),
        block => Err(block.refused(&path, UNREADABLE)),
    };
    blocks(content, path).into_iter().map(text).collect()
}

pub(super) const UNREADABLE: &str = "are not supported: this model reads only text";
