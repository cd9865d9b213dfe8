//! What a parser knows of an answer before it reads it.

use std::sync::Arc;

use super::format::Format;
use super::reasoning::{ReasoningState, Reply};
use super::tool::Tool;

/// Known of one answer.
#[derive(Clone)]
pub(super) struct Expected {
    /// `None` if the answer may not contain tool calls.
    pub(super) calls: Option<&'static Format>,
    /// The tools that may be called.
    pub(super) tools: Arc<[Tool]>,
    pub(super) reasoning_state: ReasoningState,
    pub(super) reply: Option<Reply>,
    /// Whether the grammar allows nothing but calls after the reasoning: an unfinished call is then never content.
    pub(super) only_calls: bool,
}
