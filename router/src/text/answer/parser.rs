//! Splits a growing answer into its parts. Text that does not match the model's format is content, never an error.
//!
//! INVARIANT: the parser decides only when further text cannot change the decision, so its output does not depend on how
//! the text is cut into pieces.

use std::sync::Arc;

use super::channel_parser::ChannelParser;
use super::format::{Format, Layout};
#[cfg(test)]
use super::part::Answer;
use super::part::{Part, Rest};
use super::reasoning::{ReasoningState, Reply};
use super::run_parser::RunParser;
use super::tool::Tool;

/// The parser of one answer.
pub(crate) struct AnswerParser(Kind);

enum Kind {
    Run(Box<RunParser>),
    Channels(ChannelParser),
}

/// What a parser knows of the answer.
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

impl AnswerParser {
    /// `format`: of the model's answers, whether or not this one may contain tool calls.
    pub(super) fn new(format: Option<&'static Format>, expected: Expected) -> Self {
        Self(match format.map(|format| &format.layout) {
            Some(Layout::Channels(channels)) => Kind::Channels(ChannelParser::new(channels, expected.tools)),
            _ => Kind::Run(Box::new(RunParser::new(expected))),
        })
    }

    /// Parses the next piece.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Part> {
        match &mut self.0 {
            Kind::Run(parser) => parser.push(text),
            Kind::Channels(parser) => parser.push(text),
        }
    }

    /// Ends the answer and returns the parts that were held back.
    pub(crate) fn finish(self) -> Rest {
        match self.0 {
            Kind::Run(parser) => parser.finish(),
            Kind::Channels(parser) => parser.finish(),
        }
    }
}

/// Parses a whole answer in pieces.
#[cfg(test)]
pub(super) fn parse<'a>(
    pieces: impl IntoIterator<Item = &'a str>,
    format: Option<&'static Format>,
    expected: Expected,
) -> Answer {
    let mut parser = AnswerParser::new(format, expected);
    let mut answer = Answer::default();
    for piece in pieces {
        answer.extend(parser.push(piece));
    }
    answer.end(parser.finish());
    answer
}

#[cfg(test)]
#[path = "parser_tests.rs"]
mod tests;
