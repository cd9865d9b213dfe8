//! Wire types: the requests, answers and errors of each dialect (TGI's, OpenAI's, Anthropic's, Vertex AI's).
//!
//! Every generating request converts itself into a [`crate::generation::GenerationRequest`]; the parameters are checked
//! there, in one place for all dialects.

pub(crate) mod adapter;
pub(crate) mod anthropic;
mod closed_schema;
mod content;
pub(crate) mod conversation;
pub(crate) mod error;
pub(crate) mod exact;
pub(crate) mod extension;
mod field;
mod gbnf;
pub(crate) mod grammar;
pub(crate) mod known_field;
pub(crate) mod openai;
pub(crate) mod pooling;
pub(crate) mod prediction;
pub(crate) mod request_body;
pub(crate) mod rerank;
pub(crate) mod responses;
mod structural_tag;
pub(crate) mod tei;
pub(crate) mod tgi;
pub(crate) mod unknown_field;
pub(crate) mod vertex;
