//! The content of messages, as clients send it.

use std::sync::Arc;

use serde::Deserialize;
use serde::de::IgnoredAny;
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
    /// An image in a user's message or a tool's result, for a model that reads images.
    Image {
        source: Option<ImageField>,
    },
    /// A document in a user's message or a tool's result.
    Document(DocumentBlock),
    /// A search result in a user's message or a tool's result.
    SearchResult(SearchResultBlock),
    /// The name of a tool that a search of tools has found; the model is shown all tools anyway.
    ToolReference {
        tool_name: String,
    },
    /// A call that another server has executed within an earlier answer, read as text.
    ServerToolUse(HostedCall),
    /// A call of an MCP server's tool, read like `server_tool_use`.
    McpToolUse(HostedCall),
    /// The result of such a call, read as text, as are the following ones. What is encrypted is left out.
    WebSearchToolResult(HostedResult),
    WebFetchToolResult(HostedResult),
    CodeExecutionToolResult(HostedResult),
    BashCodeExecutionToolResult(HostedResult),
    TextEditorCodeExecutionToolResult(HostedResult),
    ToolSearchToolResult(HostedResult),
    AdvisorToolResult(HostedResult),
    McpToolResult(HostedResult),
    /// The summary of the conversation before it.
    Compaction {
        content: Option<String>,
    },
    /// Dropped: it says only that another model has answered.
    Fallback,
    /// Refused: this server keeps no files.
    ContainerUpload,
}

/// A document's text. Its `citations` have no effect.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicDocument)]
pub(super) struct DocumentBlock {
    pub(super) source: Option<DocumentSource>,
    pub(super) title: Option<String>,
    /// What the client says of the document.
    pub(super) context: Option<String>,
}

/// The place of a document's text.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicDocumentSource)]
pub(super) enum DocumentSource {
    Text {
        data: String,
    },
    /// A string, or a list of `text` and `image` blocks.
    Content {
        #[schema(no_recursion)]
        content: Content<TextBlock>,
    },
    /// Refused: PDF documents are not read.
    Base64 {
        media_type: Option<String>,
    },
    /// Refused: documents are not fetched.
    Url,
    /// Refused: this server keeps no files.
    File,
}

/// A result of a search that the client has done. Its `citations` have no effect.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicSearchResult)]
pub(super) struct SearchResultBlock {
    pub(super) source: String,
    pub(super) title: String,
    pub(super) content: Vec<FoundText>,
}

/// A text of a search result.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicFoundText)]
pub(super) struct FoundText {
    /// Always `text`.
    #[serde(rename = "type")]
    #[schema(value_type = Option<String>)]
    _kind: Option<IgnoredAny>,
    pub(super) text: String,
}

/// A call that this server did not execute.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicHostedCall)]
pub(super) struct HostedCall {
    pub(super) name: String,
    #[schema(value_type = Option<Object>)]
    pub(super) input: Option<Value>,
}

/// What such a call has returned.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicHostedResult)]
pub(super) struct HostedResult {
    pub(super) content: Option<Value>,
}

/// The location of an image.
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
    /// An image in a tool's result, for a model that reads images; refused in a system prompt.
    Image {
        source: Option<ImageField>,
    },
    /// A document in a tool's result; refused in a system prompt.
    Document(DocumentBlock),
    /// A search result in a tool's result; refused in a system prompt.
    SearchResult(SearchResultBlock),
    /// A reference to a tool in a tool's result; refused in a system prompt.
    ToolReference {
        tool_name: String,
    },
}

impl From<TextBlock> for Block {
    fn from(block: TextBlock) -> Self {
        match block {
            TextBlock::Text { text } => Self::Text { text },
            TextBlock::Image { source } => Self::Image { source },
            TextBlock::Document(document) => Self::Document(document),
            TextBlock::SearchResult(result) => Self::SearchResult(result),
            TextBlock::ToolReference { tool_name } => Self::ToolReference { tool_name },
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
            Self::Document(_) => "document",
            Self::SearchResult(_) => "search_result",
            Self::ToolReference { .. } => "tool_reference",
            Self::ServerToolUse(_) => "server_tool_use",
            Self::McpToolUse(_) => "mcp_tool_use",
            Self::WebSearchToolResult(_) => "web_search_tool_result",
            Self::WebFetchToolResult(_) => "web_fetch_tool_result",
            Self::CodeExecutionToolResult(_) => "code_execution_tool_result",
            Self::BashCodeExecutionToolResult(_) => "bash_code_execution_tool_result",
            Self::TextEditorCodeExecutionToolResult(_) => "text_editor_code_execution_tool_result",
            Self::ToolSearchToolResult(_) => "tool_search_tool_result",
            Self::AdvisorToolResult(_) => "advisor_tool_result",
            Self::McpToolResult(_) => "mcp_tool_result",
            Self::Compaction { .. } => "compaction",
            Self::Fallback => "fallback",
            Self::ContainerUpload => "container_upload",
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
        block => Err(block.refused(&path, "are not supported in a system prompt, only `text` blocks are")),
    };
    blocks(content, path).into_iter().map(text).collect()
}
