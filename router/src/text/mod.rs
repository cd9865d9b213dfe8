//! Text: tokenizer, detokenizer, chat templates, tool call formats, reasoning content and stop sequences.
//!
//! Knows no HTTP and no API dialect. INVARIANT: the concatenated pieces of a generation are its text.

mod answer;
mod chat_style;
mod detokenizer;
mod input;
mod model;
mod model_file;
mod own_text;
mod prompts;
mod schema;
mod stop_matcher;
mod template;
mod token_bytes;

pub use model::{LoadError, TextModel};
pub use template::{RENDERER_ARGUMENT, run_chat_renderer};

pub(crate) use answer::{
    AnswerFormat, AnswerParser, CallIds, Fault, Part, ReasoningState, ThoughtMarkers, Tool, ToolChoice, ToolError,
};
pub(crate) use chat_style::ChatStyle;
pub(crate) use detokenizer::{Detokenizer, Piece};
pub(crate) use input::{EncodedInput, Input, Truncation};
pub(crate) use model::{EncodeError, TokenSpan};
pub(crate) use prompts::Prompts;
pub(crate) use schema::{Enforcement, make_enforceable, target as schema_target};
pub(crate) use stop_matcher::{StopMatcher, StopOutcome};
pub(crate) use template::{ChatInputs, TemplateError, reminder};
