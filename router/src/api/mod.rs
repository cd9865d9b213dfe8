//! What goes over the wire, in two dialects (TGI's and OpenAI's), and what a request must be to be served.
//!
//! Both dialects become the same [`parameter::Parameters`], which are checked in one place.

mod closed_schema;
pub(crate) mod error;
pub(crate) mod extension;
mod field_path;
pub(crate) mod grammar;
pub(crate) mod openai;
pub(crate) mod parameter;
pub(crate) mod tgi;
mod validation;
pub(crate) mod vertex;
