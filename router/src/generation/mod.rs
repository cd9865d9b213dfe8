//! From a request of any dialect to running sequences, and from their tokens back to text:
//! admit → check → render → encode → place images → reserve queue space → compile the grammar → submit → collect.
//!
//! `api` turns a dialect's request into a [`GenerationRequest`], [`GenerationService::start`] opens it, `http` renders
//! the resulting [`GenerationDelta`]s. CONVENTION: this room imports neither axum nor hyper nor the
//! `http` and `api` rooms; errors have no status here, and types have no wire format.

mod adapter;
mod adapter_download;
mod adapter_place;
mod admission;
mod chat;
mod content_stop;
mod context;
mod deadline;
mod delta;
mod described;
mod error;
mod image;
mod parameter;
mod pooling;
mod preparation;
mod prompt_image;
mod request;
mod running;
mod service;
mod service_rate;
mod stop_buffer;
mod submission;
mod summary;
mod text_stream;
mod tokenization;
mod validation;

pub use adapter::Adapters;
pub(crate) use adapter::{AdapterReport, AdapterUpdateError};
pub use adapter_download::{AdapterDownload, AdapterPlace, is_hub_id};
pub(crate) use chat::{Chat, ToolCallIds, ToolSet};
pub(crate) use delta::{Draft, FinishReason, PromptToken, TextToken, TopToken};
pub(crate) use error::{Bound, GenerationError, MIN_RETRY_AFTER_S, Refusal};
pub(crate) use image::{ImageSource, take_from_text};
pub(crate) use parameter::{Constraint, Extension, MAX_LOGIT_BIAS, MAX_LOGIT_BIASES, Parameters, ReasoningBudget};
pub(crate) use pooling::{Pooled, PoolingInput, PoolingRequest};
pub(crate) use request::{GenerationRequest, Prompt};
pub(crate) use running::{Finished, GenerationDelta, Generations, StartedPrompt};
pub(crate) use service::GenerationService;
pub(crate) use text_stream::StopText;
pub(crate) use tokenization::TokenizedChat;
pub(crate) use validation::{FieldNames, ValidationError};
