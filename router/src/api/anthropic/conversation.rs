//! Turns Anthropic's messages into the messages that templates render.
//!
//! Consecutive messages of one role are one turn. The results of a turn come before its text, each as a message of the
//! role `tool`. Separate blocks of text are joined by an empty line.

use serde_json::{Map, Value, json};

use super::block::{Block, MessageParam, Role, TextBlock, UNREADABLE, blocks, joined, texts};
use crate::api::content::Content;
use crate::generation::ValidationError;

/// COMPAT: Claude Code begins its system prompt with a line of this name, whose value differs in every request. In the
/// prompt it would prevent every hit in the prefix cache.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";

/// The messages for the template. `system`: the system prompt.
pub(super) fn template_messages(
    system: Option<Content<TextBlock>>,
    messages: Vec<MessageParam>,
) -> Result<Vec<Value>, ValidationError> {
    if messages.is_empty() {
        return Err(ValidationError::NoMessages);
    }
    let mut rendered = Rendered::default();
    let system = system.map(|system| texts(system, "system")).transpose()?.unwrap_or_default();
    let system: Vec<_> = system.into_iter().map(without_billing_header).filter(|text| !text.is_empty()).collect();
    if !system.is_empty() {
        rendered.messages.push(json!({"role": "system", "content": joined(system)}));
    }
    for turn in turns(messages)? {
        rendered.push(turn)?;
    }
    rendered.all_answered("messages")?;
    Ok(rendered.messages)
}

/// The text without its first line, if that is Claude Code's billing header.
fn without_billing_header(text: String) -> String {
    if !text.starts_with(BILLING_HEADER) {
        return text;
    }
    text.split_once('\n').map(|(_, rest)| rest.to_owned()).unwrap_or_default()
}

/// Consecutive messages of one role.
struct Turn {
    role: Role,
    /// Of its first message.
    path: String,
    /// With their paths.
    blocks: Vec<(String, Block)>,
}

/// System messages within the conversation, which few templates accept, become reminders in the user's turn, in the form
/// that Claude Code itself uses.
fn turns(messages: Vec<MessageParam>) -> Result<Vec<Turn>, ValidationError> {
    let mut turns: Vec<Turn> = Vec::new();
    for (index, MessageParam { role, content }) in messages.into_iter().enumerate() {
        let path = format!("messages[{index}]");
        let mut more = blocks(content, &format!("{path}.content"));
        let role = if role == Role::System {
            for (path, block) in &mut more {
                let Block::Text { text } = block else {
                    return Err(block.refused(path, "do not belong into a message of the system"));
                };
                *text = format!("<system-reminder>\n{text}\n</system-reminder>");
            }
            Role::User
        } else {
            role
        };
        match turns.last_mut().filter(|turn| turn.role == role) {
            Some(turn) => turn.blocks.extend(more),
            None => turns.push(Turn { role, path, blocks: more }),
        }
    }
    Ok(turns)
}

/// The messages so far.
#[derive(Default)]
struct Rendered {
    messages: Vec<Value>,
    /// Id and name of the calls in the last turn of the assistant that have no result yet.
    unanswered: Vec<(String, String)>,
}

impl Rendered {
    fn push(&mut self, turn: Turn) -> Result<(), ValidationError> {
        match turn.role {
            Role::Assistant => self.push_assistant(turn.blocks),
            Role::User | Role::System => self.push_user(turn),
        }
    }

    fn push_assistant(&mut self, blocks: Vec<(String, Block)>) -> Result<(), ValidationError> {
        let (mut content, mut reasoning, mut calls) = (Vec::new(), Vec::new(), Vec::new());
        for (path, block) in blocks {
            match block {
                Block::Text { text } => content.push(text),
                Block::Thinking { thinking } => reasoning.push(thinking),
                Block::RedactedThinking => {}
                Block::ToolUse { id, name, input } => {
                    if self.unanswered.iter().any(|(known, _)| *known == id) {
                        return Err(ValidationError::Item { path: path + ".id", problem: format!("`{id}` occurs twice") });
                    }
                    let function = json!({"name": name, "arguments": Value::Object(input).to_string()});
                    calls.push(json!({"id": id, "type": "function", "function": function}));
                    self.unanswered.push((id, name));
                }
                Block::ToolResult { .. } => return Err(block.refused(&path, "belong into a message of the user")),
                Block::Image | Block::Document | Block::SearchResult => return Err(block.refused(&path, UNREADABLE)),
            }
        }
        let mut message = Map::from_iter([("role".to_owned(), "assistant".into())]);
        message.insert("content".to_owned(), joined(content).into());
        if !reasoning.is_empty() {
            message.insert("reasoning_content".to_owned(), joined(reasoning).into());
        }
        if !calls.is_empty() {
            message.insert("tool_calls".to_owned(), calls.into());
        }
        self.messages.push(message.into());
        Ok(())
    }

    fn push_user(&mut self, turn: Turn) -> Result<(), ValidationError> {
        let mut content = Vec::new();
        for (path, block) in turn.blocks {
            match block {
                Block::Text { text } => content.push(text),
                Block::ToolResult { tool_use_id, content } => self.push_result(&path, tool_use_id, content)?,
                Block::Thinking { .. } | Block::RedactedThinking | Block::ToolUse { .. } => {
                    return Err(block.refused(&path, "belong into a message of the assistant"));
                }
                Block::Image | Block::Document | Block::SearchResult => return Err(block.refused(&path, UNREADABLE)),
            }
        }
        self.all_answered(&turn.path)?;
        if !content.is_empty() {
            self.messages.push(json!({"role": "user", "content": joined(content)}));
        }
        Ok(())
    }

    fn push_result(
        &mut self,
        path: &str,
        id: String,
        content: Option<Content<TextBlock>>,
    ) -> Result<(), ValidationError> {
        let Some(position) = self.unanswered.iter().position(|(known, _)| *known == id) else {
            let problem = format!("`{id}` is not the id of a `tool_use` block in the message before that has no result yet");
            return Err(ValidationError::Item { path: format!("{path}.tool_use_id"), problem });
        };
        let (id, name) = self.unanswered.remove(position);
        let content = content.map(|content| texts(content, &format!("{path}.content"))).transpose()?.unwrap_or_default();
        let content = joined(content);
        self.messages.push(json!({"role": "tool", "tool_call_id": id, "name": name, "content": content}));
        Ok(())
    }

    /// Every call needs a result in the turn after it.
    fn all_answered(&self, path: &str) -> Result<(), ValidationError> {
        match self.unanswered.first() {
            None => Ok(()),
            Some((id, _)) => Err(ValidationError::Item {
                path: path.to_owned(),
                problem: format!("the `tool_use` block `{id}` needs a `tool_result` block in the message after it"),
            }),
        }
    }
}
