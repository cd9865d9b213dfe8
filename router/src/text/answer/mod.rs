//! The parts of an answer: content, reasoning and tool calls, in the formats that models write.
//!
//! A format is data (`tool_call_format.rs`, `reasoning.rs`). One grammar writer and one parser read it, so the parser
//! understands every text that the grammar allows. This folder knows no HTTP and no API dialect.
//! INVARIANT: the parser's output does not depend on how the text is cut into pieces.

mod answer_format;
mod call_item;
mod grammar;
mod object_scan;
mod parser;
mod part;
mod prompt;
mod reasoning;
#[cfg(test)]
mod sample;
mod tool;
mod tool_call_format;

pub(crate) use answer_format::AnswerFormat;
pub(crate) use parser::AnswerParser;
pub(crate) use part::Part;
pub(crate) use reasoning::ReasoningState;
pub(crate) use tool::{Tool, ToolChoice, ToolError};
pub(crate) use tool_call_format::ToolCallFormat;
