//! Splits a growing answer into its parts. Text that does not match the model's format is content, never an error.
//!
//! INVARIANT: the parser decides only when further text cannot change the decision, so its output does not depend on how
//! the text is cut into pieces.

use super::channel_parser::ChannelParser;
use super::expected::Expected;
use super::format::{Format, Layout};
#[cfg(test)]
use super::part::Answer;
use super::part::{Part, Rest};
use super::run_parser::RunParser;

/// The parser of one answer.
pub(crate) struct AnswerParser(Kind);

enum Kind {
    Run(Box<RunParser>),
    Channels(Box<ChannelParser>),
}

impl AnswerParser {
    /// `format`: of the model's answers, whether or not this one may contain tool calls.
    pub(super) fn new(format: Option<&'static Format>, expected: Expected) -> Self {
        Self(match format.map(|format| &format.layout) {
            Some(Layout::Channels(channels)) => Kind::Channels(Box::new(ChannelParser::new(channels, expected.tools))),
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

    /// Whether the next text may be content: it is neither reasoning nor part of a call.
    pub(crate) fn is_in_content(&self) -> bool {
        match &self.0 {
            Kind::Run(parser) => parser.is_in_content(),
            Kind::Channels(parser) => parser.is_in_content(),
        }
    }

    /// Whether the text so far ends within thoughts.
    pub(crate) fn is_within_thoughts(&self) -> bool {
        match &self.0 {
            Kind::Run(parser) => parser.is_within_thoughts(),
            Kind::Channels(parser) => parser.is_within_thoughts(),
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
