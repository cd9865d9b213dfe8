//! What an answer is made of: text, thoughts and tool calls, in the formats in which models write them.
//!
//! A format is data (`format.rs`, `reasoning.rs`); one grammar writer and one parser read it, so what the grammar lets a
//! model write is what the parser takes apart. Knows no HTTP, no wire dialect and no tokens but the ids it is given.
//! INVARIANT: however a text is cut into pieces, the parts of the pieces add up to the parts of the whole.

mod format;
mod grammar;
mod item;
mod json_scan;
mod parser;
mod part;
mod prompt;
mod reasoning;
#[cfg(test)]
mod sample;
mod style;
mod tool;

pub(crate) use format::ToolFormat;
pub(crate) use parser::AnswerParser;
pub(crate) use part::Part;
pub(crate) use reasoning::Thinking;
pub(crate) use style::AnswerStyle;
pub(crate) use tool::{Tool, ToolChoice, ToolError};
