//! Blocks that are neither plain text nor an image, as the texts and images that a template renders.

use serde_json::Value;

use super::block::{Block, DocumentBlock, DocumentSource, HostedResult, SearchResultBlock, blocks};
use crate::api::conversation::PromptPart;
use crate::generation::{ImageSource, ValidationError};

/// The parts of a block that a user's message and a tool's result can have. `path`: that of the block.
pub(super) fn parts(block: Block, path: &str) -> Result<Vec<PromptPart>, ValidationError> {
    let part = match block {
        Block::Image { source: Some(source) } => {
            PromptPart::Image(ImageSource { path: format!("{path}.source"), url: source.into_url() })
        }
        block @ Block::Image { source: None } => return Err(block.refused(path, "need a `source`")),
        Block::Document(document) => return self::document(document, path),
        Block::SearchResult(result) => PromptPart::Text(search_result(result)),
        Block::Text { text } => PromptPart::Text(text),
        block => PromptPart::Text(hosted(block, path)?),
    };
    Ok(vec![part])
}

fn document(document: DocumentBlock, path: &str) -> Result<Vec<PromptPart>, ValidationError> {
    let DocumentBlock { source, title, context } = document;
    let refused = |problem: String| Err(ValidationError::Item { path: format!("{path}.source"), problem });
    let instead = "send the document's text as a source of the type `text`";
    let content = match source {
        Some(DocumentSource::Text { data }) => vec![PromptPart::Text(data)],
        Some(DocumentSource::Content { content }) => {
            let mut parts = Vec::new();
            for (path, block) in blocks(content, &format!("{path}.source.content")) {
                match block {
                    Block::Text { .. } | Block::Image { .. } => parts.extend(self::parts(block, &path)?),
                    block => return Err(block.refused(&path, "are not supported within a document")),
                }
            }
            parts
        }
        Some(DocumentSource::Base64 { media_type }) => {
            let media_type = media_type.unwrap_or_else(|| "application/pdf".to_owned());
            return refused(format!("documents of the type {media_type} are not supported; {instead}"));
        }
        Some(DocumentSource::Url) => return refused(format!("documents are not fetched from URLs; {instead}")),
        Some(DocumentSource::File) => return refused(format!("this server keeps no files; {instead}")),
        None => return refused(format!("a document needs a `source`; {instead}")),
    };
    let named = |name: &str, value: Option<String>| {
        value.filter(|value| !value.is_empty()).map(|value| format!("\n{name}: {value}")).unwrap_or_default()
    };
    let opening = format!("<document>{}{}", named("title", title), named("context", context));
    Ok([vec![PromptPart::Text(opening)], content, vec![PromptPart::Text("</document>".to_owned())]].concat())
}

fn search_result(result: SearchResultBlock) -> String {
    let SearchResultBlock { source, title, content } = result;
    let texts: Vec<_> = content.into_iter().map(|found| found.text).collect();
    format!("<search_result>\ntitle: {title}\nsource: {source}\n\n{}\n</search_result>", texts.join("\n\n"))
}

/// The text of a block that tells what tools of another server did, or which tools there are.
pub(super) fn hosted(block: Block, path: &str) -> Result<String, ValidationError> {
    let kind = block.kind();
    match block {
        Block::ToolReference { tool_name } => Ok(format!("<tool_reference>{tool_name}</tool_reference>")),
        Block::ServerToolUse(call) | Block::McpToolUse(call) => {
            let input = call.input.unwrap_or_default();
            Ok(format!("<{kind} name=\"{}\">{input}</{kind}>", call.name))
        }
        Block::WebSearchToolResult(result)
        | Block::WebFetchToolResult(result)
        | Block::CodeExecutionToolResult(result)
        | Block::BashCodeExecutionToolResult(result)
        | Block::TextEditorCodeExecutionToolResult(result)
        | Block::ToolSearchToolResult(result)
        | Block::AdvisorToolResult(result)
        | Block::McpToolResult(result) => {
            let HostedResult { content } = result;
            Ok(format!("<{kind}>{}</{kind}>", readable(content.unwrap_or_default())))
        }
        Block::ContainerUpload => Err(block.refused(path, "are not supported: this server keeps no files")),
        block => Err(block.refused(path, "do not belong into a message of this role")),
    }
}

/// The value without what only its author can read, and without files.
fn readable(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let is_file = fields.get("type").is_some_and(|kind| kind == "base64");
            let is_kept = |key: &str| !(key.starts_with("encrypted") || is_file && key == "data");
            let kept = fields.into_iter().filter(|(key, _)| is_kept(key.as_str()));
            kept.map(|(key, value)| (key, readable(value))).collect()
        }
        Value::Array(values) => values.into_iter().map(readable).collect(),
        value => value,
    }
}
