//! Wire types: the requests, answers and errors of each dialect (TGI's, OpenAI's, Vertex AI's).
//!
//! Every generating request converts itself into a [`crate::generation::GenerationRequest`]; the parameters are checked
//! there, in one place for all dialects.

mod closed_schema;
pub(crate) mod error;
pub(crate) mod extension;
mod field;
pub(crate) mod grammar;
pub(crate) mod openai;
pub(crate) mod tgi;
pub(crate) mod vertex;
