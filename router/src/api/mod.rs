//! Wire types: the requests, answers and errors of each dialect (TGI's, OpenAI's, Anthropic's, Vertex AI's).
//!
//! Every generating request converts itself into a [`crate::generation::GenerationRequest`]; the parameters are checked
//! there, in one place for all dialects.

pub(crate) mod anthropic;
mod closed_schema;
mod content;
pub(crate) mod conversation;
pub(crate) mod error;
pub(crate) mod extension;
mod field;
pub(crate) mod grammar;
pub(crate) mod openai;
pub(crate) mod responses;
pub(crate) mod tgi;
pub(crate) mod vertex;
