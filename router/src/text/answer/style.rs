//! How one model writes its answers: what its chat template and its vocabulary tell.

use std::sync::Arc;

use super::format::ToolFormat;
use super::grammar::AnswerGrammar;
use super::parser::AnswerParser;
use super::prompt::tool_prompt;
use super::reasoning::{ReasoningFormat, Thinking};
use super::tool::{Tool, ToolChoice, ToolError};
use crate::sequence::Grammar;

#[derive(Debug)]
pub(crate) struct AnswerStyle {
    /// The chat template's source.
    template: String,
    tool_format: ToolFormat,
    reasoning: Option<ReasoningFormat>,
    /// The marks that are tokens of their own.
    mark_tokens: Vec<(&'static str, u32)>,
}

impl AnswerStyle {
    /// `token_id`: of an added token with this text.
    pub(crate) fn new(template: String, token_id: impl Fn(&str) -> Option<u32>) -> Self {
        let tool_format = ToolFormat::detect(&template, |text| token_id(text).is_some());
        let reasoning = ReasoningFormat::detect(&template);
        let of_thoughts = reasoning.into_iter().flat_map(|format| [format.open, format.close]);
        let marks = tool_format.shape().marks().chain(of_thoughts);
        let mark_tokens = marks.filter_map(|mark| token_id(mark).map(|id| (mark, id))).collect();
        Self { template, tool_format, reasoning, mark_tokens }
    }

    pub(crate) fn tool_format(&self) -> ToolFormat {
        self.tool_format
    }

    /// Where an answer to this prompt stands with its thoughts.
    pub(crate) fn thinking(&self, prompt: &str) -> Thinking {
        Thinking::after(self.reasoning, prompt)
    }

    /// Tokens that the parser must see, special or not.
    pub(crate) fn shown_token_ids(&self, with_tools: bool, thinking: Thinking) -> Arc<[u32]> {
        let of_thoughts = thinking.format();
        let is_thoughts = |mark: &str| of_thoughts.is_some_and(|format| mark == format.open || mark == format.close);
        let is_tools = |mark: &str| with_tools && self.tool_format.shape().marks().any(|of_tools| of_tools == mark);
        let shown = self.mark_tokens.iter().filter(|(mark, _)| is_thoughts(mark) || is_tools(mark));
        shown.map(|(_, id)| *id).collect()
    }

    pub(crate) fn parser(&self, with_tools: bool, thinking: Thinking) -> AnswerParser {
        AnswerParser::new(with_tools.then_some(self.tool_format), thinking)
    }

    /// What is to be added to the last message, for the model to know the tools and how to call them.
    pub(crate) fn tool_prompt(&self, tools: &[serde_json::Value], instruction: Option<&str>) -> Option<String> {
        tool_prompt(self.tool_format, &self.template, tools, instruction)
    }

    /// `None`: everything is allowed.
    pub(crate) fn tool_grammar(
        &self,
        thinking: Thinking,
        tools: &[Tool],
        choice: &ToolChoice,
        parallel: bool,
    ) -> Result<Option<Grammar>, ToolError> {
        self.with_grammar(thinking, |grammar| grammar.tools(tools, choice, parallel))
    }

    /// A client's own grammar is about the answer, not about the thoughts before it.
    pub(crate) fn wrapped(&self, thinking: Thinking, grammar: Grammar) -> Grammar {
        self.with_grammar(thinking, |writer| writer.wrapped(grammar))
    }

    fn with_grammar<T>(&self, thinking: Thinking, write: impl FnOnce(&AnswerGrammar<'_>) -> T) -> T {
        let token_id = |mark: &str| self.mark_tokens.iter().find(|(known, _)| *known == mark).map(|(_, id)| *id);
        write(&AnswerGrammar { format: self.tool_format, thinking, token_id: &token_id })
    }
}
