//! The parts of an answer: content, reasoning and tool calls, in the formats that models write.
//!
//! A format is data (`table.rs`, `reasoning.rs`). One grammar writer and one parser read it, so the parser understands every
//! text that the grammar allows. This folder knows no HTTP and no API dialect.
//! INVARIANT: the parser's output does not depend on how the text is cut into pieces.

mod answer_format;
mod argument;
mod call_item;
mod channel_parser;
mod detect;
mod expected;
mod format;
mod grammar;
mod marker;
mod object_scan;
mod parser;
mod part;
mod prompt;
mod reasoning;
mod run_parser;
#[cfg(test)]
mod sample;
mod table;
#[cfg(test)]
mod thought_tests;
mod tool;
mod value_kind;

pub(crate) use answer_format::AnswerFormat;
pub(super) use detect::WrittenCall;
pub(crate) use format::{CallIds, Format};
pub(crate) use grammar::Fault;
pub(crate) use parser::AnswerParser;
pub(crate) use part::Part;
pub(super) use reasoning::Frame;
pub(crate) use reasoning::{ReasoningState, ThoughtMarkers};
pub(crate) use tool::{Tool, ToolChoice, ToolError};
