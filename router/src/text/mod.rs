//! Everything about characters: tokenizing, chat templates, detokenizing and stop strings.
//!
//! Knows no HTTP and no dialect. INVARIANT: the pieces of a generation, put together, are its text.

mod answer;
mod detokenize;
mod model;
mod model_file;
mod python_json;
mod spelling;
mod stop;
mod template;

pub use model::{LoadError, TextModel};
pub use template::{RENDERER_ARGUMENT, run_chat_renderer};

pub(crate) use answer::{AnswerParser, AnswerStyle, Part, Thinking, Tool, ToolChoice, ToolError, ToolFormat};
pub(crate) use detokenize::{Detokenizer, Piece};
pub(crate) use model::{EncodeError, TokenSpan};
pub(crate) use stop::{Outcome as StopOutcome, StopMatcher};
pub(crate) use template::{ChatInputs, TemplateError};
