//! Chat templates, rendered as `transformers.apply_chat_template` renders them. Only this folder uses minijinja.
//!
//! INVARIANT: a rendering ends within a bounded time and in bounded memory, for any template and any conversation.

mod after_answer;
mod chat_template;
mod compiled;
mod continuation;
mod error;
mod filter;
mod input;
mod limit;
mod method;
mod operator;
mod probe;
mod process;
mod python_format;
mod python_json;
mod python_str;
mod python_text;
mod python_value;
mod renderer;
mod role;
mod sequence_filter;
mod shape;
mod source;
mod syntax;
mod text_filter;

pub(super) use chat_template::{ChatTemplate, TemplateSources};
pub(crate) use error::TemplateError;
pub(crate) use input::ChatInputs;
pub(super) use probe::TemplateTraits;
pub use process::RENDERER_ARGUMENT;
pub use renderer::run_chat_renderer;
pub(crate) use role::reminder;

#[cfg(test)]
pub(super) use compiled::Compiled;

#[cfg(test)]
#[path = "template/tests.rs"]
mod tests;

#[cfg(test)]
#[path = "template/differential_tests.rs"]
mod differential_tests;
