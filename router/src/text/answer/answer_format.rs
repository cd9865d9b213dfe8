//! How one model formats its answers, detected from its chat template and its vocabulary.

use std::sync::Arc;

use super::grammar::AnswerGrammar;
use super::parser::AnswerParser;
use super::prompt::tool_prompt;
use super::reasoning::{ReasoningFormat, ReasoningState};
use super::tool::{Tool, ToolChoice, ToolError};
use super::tool_call_format::ToolCallFormat;
use crate::sequence::Grammar;

/// The tool call format and the reasoning format of one model.
#[derive(Debug)]
pub(crate) struct AnswerFormat {
    /// The chat template's source.
    template: String,
    tool_format: ToolCallFormat,
    reasoning: Option<ReasoningFormat>,
    /// Markers that are single tokens, with their ids.
    marker_tokens: Vec<(&'static str, u32)>,
}

impl AnswerFormat {
    /// `template`: the source of the chat template. `token_id`: returns the id of the added token with this text.
    pub(crate) fn new(template: String, token_id: impl Fn(&str) -> Option<u32>) -> Self {
        let tool_format = ToolCallFormat::detect(&template, |text| token_id(text).is_some());
        let reasoning = ReasoningFormat::detect(&template);
        let reasoning_markers = reasoning.into_iter().flat_map(|format| [format.open, format.close]);
        let markers = tool_format.shape().markers().chain(reasoning_markers);
        let marker_tokens = markers.filter_map(|marker| token_id(marker).map(|id| (marker, id))).collect();
        Self { template, tool_format, reasoning, marker_tokens }
    }

    /// The format of the model's tool calls.
    pub(crate) fn tool_format(&self) -> ToolCallFormat {
        self.tool_format
    }

    /// Whether an answer to this rendered prompt contains reasoning.
    pub(crate) fn reasoning_state(&self, prompt: &str) -> ReasoningState {
        ReasoningState::after(self.reasoning, prompt)
    }

    /// Ids of the tokens whose text the parser needs, even where they are special tokens.
    pub(crate) fn shown_token_ids(&self, with_tools: bool, reasoning_state: ReasoningState) -> Arc<[u32]> {
        let reasoning_format = reasoning_state.format();
        let is_reasoning_marker =
            |marker: &str| reasoning_format.is_some_and(|format| marker == format.open || marker == format.close);
        let is_tools =
            |marker: &str| with_tools && self.tool_format.shape().markers().any(|of_tools| of_tools == marker);
        let shown = self.marker_tokens.iter().filter(|(marker, _)| is_reasoning_marker(marker) || is_tools(marker));
        shown.map(|(_, id)| *id).collect()
    }

    /// A parser for one answer.
    /// `choice`: `None` without tools.
    pub(crate) fn parser(&self, choice: Option<&ToolChoice>, reasoning_state: ReasoningState) -> AnswerParser {
        let only_calls = matches!(choice, Some(ToolChoice::Required | ToolChoice::Named(_)));
        AnswerParser::new(choice.map(|_| self.tool_format), reasoning_state, only_calls)
    }

    /// Text to append to the last message so that the model knows the tools and how to call them, unless the template
    /// says both. `instruction`: the client's own.
    pub(crate) fn tool_prompt(&self, tools: &[serde_json::Value], instruction: Option<&str>) -> Option<String> {
        tool_prompt(self.tool_format, &self.template, tools, instruction)
    }

    /// The grammar of an answer with these tools; `None` where any answer is allowed. An answer without a call must match
    /// `content`, if given.
    pub(crate) fn tool_grammar(
        &self,
        reasoning_state: ReasoningState,
        tools: &[Tool],
        choice: &ToolChoice,
        parallel: bool,
        content: Option<&Grammar>,
    ) -> Result<Option<Grammar>, ToolError> {
        self.with_grammar(reasoning_state, |grammar| grammar.tools(tools, choice, parallel, content))
    }

    /// The client's grammar, applied to the answer after its reasoning.
    pub(crate) fn after_reasoning(&self, reasoning_state: ReasoningState, grammar: Grammar) -> Grammar {
        self.with_grammar(reasoning_state, |writer| writer.after_reasoning(grammar))
    }

    fn with_grammar<T>(&self, reasoning_state: ReasoningState, write: impl FnOnce(&AnswerGrammar<'_>) -> T) -> T {
        let token_id = |marker: &str| self.marker_tokens.iter().find(|(known, _)| *known == marker).map(|(_, id)| *id);
        write(&AnswerGrammar { format: self.tool_format, reasoning_state, token_id: &token_id })
    }
}
