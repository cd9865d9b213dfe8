//! The events of a stream.

use serde::Serialize;
use utoipa::ToSchema;

use super::answer::{ContentPart, OutputItem, Response};
use crate::api::openai::TokenLogprob;

/// An event of a stream. Its name is its type.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = ResponseStreamEvent)]
pub(crate) struct StreamEvent {
    #[serde(flatten)]
    pub(crate) event: ResponseEvent,
    /// Counts the events of the stream from 0.
    pub(crate) sequence_number: usize,
}

/// What an event says. `output_index` is the item's position in the output; every item has at most one part.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type")]
pub(crate) enum ResponseEvent {
    #[serde(rename = "response.created")]
    Created { response: Response },
    #[serde(rename = "response.in_progress")]
    InProgress { response: Response },
    #[serde(rename = "response.output_item.added")]
    ItemAdded { output_index: usize, item: OutputItem },
    #[serde(rename = "response.content_part.added")]
    PartAdded { item_id: String, output_index: usize, content_index: usize, part: ContentPart },
    #[serde(rename = "response.output_text.delta")]
    TextDelta {
        item_id: String,
        output_index: usize,
        content_index: usize,
        delta: String,
        /// Empty unless the request includes them.
        logprobs: Vec<TokenLogprob>,
    },
    #[serde(rename = "response.output_text.done")]
    TextDone {
        item_id: String,
        output_index: usize,
        content_index: usize,
        text: String,
        /// Empty unless the request includes them.
        logprobs: Vec<TokenLogprob>,
    },
    #[serde(rename = "response.reasoning_text.delta")]
    ReasoningDelta { item_id: String, output_index: usize, content_index: usize, delta: String },
    #[serde(rename = "response.reasoning_text.done")]
    ReasoningDone { item_id: String, output_index: usize, content_index: usize, text: String },
    #[serde(rename = "response.content_part.done")]
    PartDone { item_id: String, output_index: usize, content_index: usize, part: ContentPart },
    #[serde(rename = "response.function_call_arguments.delta")]
    ArgumentsDelta { item_id: String, output_index: usize, delta: String },
    #[serde(rename = "response.function_call_arguments.done")]
    ArgumentsDone { item_id: String, output_index: usize, name: String, arguments: String },
    #[serde(rename = "response.custom_tool_call_input.delta")]
    CustomInputDelta { item_id: String, output_index: usize, delta: String },
    #[serde(rename = "response.custom_tool_call_input.done")]
    CustomInputDone { item_id: String, output_index: usize, input: String },
    #[serde(rename = "response.output_item.done")]
    ItemDone { output_index: usize, item: OutputItem },
    #[serde(rename = "response.completed")]
    Completed { response: Response },
    #[serde(rename = "response.incomplete")]
    Incomplete { response: Response },
    #[serde(rename = "response.failed")]
    Failed { response: Response },
}
