//! Turns Anthropic's messages into the messages that templates render.

use serde_json::Value;

use super::block::{Block, MessageParam, Role, TextBlock, blocks, texts};
use super::part::{hosted, parts};
use crate::api::content::Content;
use crate::api::conversation::{Conversation, PromptPart, joined};
use crate::generation::{ImageSource, ValidationError};

/// COMPAT: Claude Code begins its system prompt with a line of this name, whose value differs in every request. In the
/// prompt it would prevent every hit in the prefix cache.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

/// The messages for the template, and their images. `system`: the system prompt.
pub(super) fn template_messages(
    system: Option<Content<TextBlock>>,
    messages: Vec<MessageParam>,
) -> Result<(Vec<Value>, Vec<ImageSource>), ValidationError> {
    if messages.is_empty() {
        return Err(ValidationError::NoMessages);
    }
    let system = system.map(|system| texts(system, "system")).transpose()?.unwrap_or_default();
    let system = system.into_iter().map(without_billing_header).filter(|text| !text.is_empty()).collect();
    let mut conversation = Conversation::default();
    for (index, MessageParam { role, content }) in messages.into_iter().enumerate() {
        for (path, block) in blocks(content, &format!("messages[{index}].content")) {
            add(&mut conversation, role, block, &path)?;
        }
    }
    let problem = |problem| ValidationError::Item { path: "messages".to_owned(), problem };
    let (messages, images) = conversation.into_messages(Some(joined(system))).map_err(problem)?;
    if messages.iter().all(|message| message["role"] == "system") {
        return Err(problem("they have no content that could be answered".to_owned()));
    }
    Ok((messages, images))
}

/// The text without its first line, if that is Claude Code's billing header.
fn without_billing_header(text: String) -> String {
    if !text.starts_with(BILLING_HEADER) {
        return text;
    }
    text.split_once('\n').map(|(_, rest)| rest.to_owned()).unwrap_or_default()
}

/// Adds a block of a message of this role.
fn add(conversation: &mut Conversation, role: Role, block: Block, path: &str) -> Result<(), ValidationError> {
    let (field, added) = match (role, block) {
        (Role::System, Block::Text { text }) => ("", conversation.system(text)),
        (Role::System, block) => return Err(block.refused(path, "do not belong into a message of this role")),
        (Role::Assistant, Block::Text { text }) => ("", conversation.text(text)),
        (Role::Assistant, Block::Thinking { thinking }) => ("", conversation.reasoning(thinking)),
        (Role::Assistant, Block::ToolUse { id, name, input }) => {
            (".id", conversation.call(id, name, &Value::Object(input).to_string()))
        }
        (Role::User, Block::ToolResult { tool_use_id, content }) => {
            let blocks = content.map(|content| blocks(content, &format!("{path}.content"))).unwrap_or_default();
            let parts = blocks.into_iter().map(|(path, block)| parts(block, &path));
            let parts = parts.collect::<Result<Vec<_>, _>>()?.concat();
            (".tool_use_id", conversation.result(&tool_use_id, parts))
        }
        (Role::Assistant, Block::RedactedThinking | Block::Fallback) => return Ok(()),
        (Role::Assistant, Block::Compaction { content }) => match content {
            Some(text) => ("", conversation.text(text)),
            None => return Ok(()),
        },
        (Role::User, Block::Compaction { content }) => match content {
            Some(text) => ("", conversation.user(PromptPart::Text(text))),
            None => return Ok(()),
        },
        (Role::Assistant, block) => ("", conversation.text(hosted(block, path)?)),
        (Role::User, block) => {
            let mut parts = parts(block, path)?.into_iter();
            ("", parts.try_for_each(|part| conversation.user(part)))
        }
    };
    added.map_err(|problem| ValidationError::Item { path: format!("{path}{field}"), problem })
}
