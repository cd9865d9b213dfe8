//! A response and the items of its output.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::custom;
use super::tool::{ToolChoiceParam, shown_name};
use crate::api::conversation::Conversation;
use crate::api::openai::TokenLogprob;
use crate::api::prediction::PredictionTokens;
use crate::telemetry::RequestSummary;

/// A response. In a stream's first events it is in progress, in the last event it is complete.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
pub(crate) struct Response {
    pub(crate) id: String,
    pub(crate) object: &'static str,
    /// Unix time in seconds.
    pub(crate) created_at: u64,
    /// Unix time in seconds.
    pub(crate) completed_at: Option<u64>,
    pub(crate) status: ResponseStatus,
    pub(crate) error: Option<ResponseError>,
    pub(crate) incomplete_details: Option<IncompleteDetails>,
    pub(crate) model: String,
    pub(crate) output: Vec<OutputItem>,
    /// Null until the response has ended.
    pub(crate) usage: Option<Usage>,
    #[serde(flatten)]
    pub(crate) echo: Echo,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ResponseStatus {
    #[default]
    InProgress,
    Completed,
    Incomplete,
    Failed,
}

/// What the request said, with the defaults filled in.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = ResponseEcho)]
pub(crate) struct Echo {
    pub(super) previous_response_id: Option<String>,
    pub(super) instructions: Option<String>,
    /// The functions among the tools.
    #[schema(value_type = Vec<Object>)]
    pub(super) tools: Vec<Value>,
    #[schema(value_type = ToolChoiceParam)]
    pub(super) tool_choice: Value,
    /// `disabled` or `auto`.
    pub(super) truncation: &'static str,
    pub(super) parallel_tool_calls: bool,
    #[schema(value_type = Object)]
    pub(super) text: Value,
    pub(super) temperature: f32,
    pub(super) top_p: f32,
    pub(super) presence_penalty: f32,
    pub(super) frequency_penalty: f32,
    pub(super) top_logprobs: u32,
    #[schema(value_type = Object)]
    pub(super) reasoning: Value,
    pub(super) max_output_tokens: Option<u32>,
    pub(super) max_tool_calls: Option<u32>,
    /// Whether a later request can continue this response by its id.
    pub(crate) store: bool,
    /// Always false.
    pub(super) background: bool,
    /// Always `default`.
    pub(super) service_tier: &'static str,
    #[schema(value_type = Object)]
    pub(super) metadata: Value,
    pub(super) safety_identifier: Option<String>,
    pub(super) prompt_cache_key: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
pub(crate) struct ResponseError {
    /// For programs: `server_error`, `rate_limit_exceeded`, `context_length_exceeded` or `invalid_prompt`.
    pub(crate) code: &'static str,
    /// For people.
    pub(crate) message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ResponseIncompleteDetails)]
pub(crate) struct IncompleteDetails {
    /// `max_output_tokens`, also where the context was full.
    pub(crate) reason: &'static str,
}

/// An item of the output.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = ResponseOutputItem)]
pub(crate) enum OutputItem {
    Message {
        id: String,
        status: ItemStatus,
        role: &'static str,
        content: Vec<ContentPart>,
    },
    Reasoning {
        id: String,
        status: ItemStatus,
        /// Always empty: the reasoning is not summarized.
        #[schema(value_type = Vec<Object>)]
        summary: [(); 0],
        content: Vec<ContentPart>,
    },
    FunctionCall {
        id: String,
        status: ItemStatus,
        call_id: String,
        name: String,
        /// If the function is in a namespace.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        namespace: Option<String>,
        /// JSON text.
        arguments: String,
    },
    CustomToolCall {
        id: String,
        status: ItemStatus,
        call_id: String,
        name: String,
        /// If the tool is in a namespace.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        namespace: Option<String>,
        input: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ResponseItemStatus)]
pub(crate) enum ItemStatus {
    InProgress,
    Completed,
    Incomplete,
}

/// The only part of an item's content.
#[derive(Clone, Debug, PartialEq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = ResponseContentPart)]
pub(crate) enum ContentPart {
    OutputText {
        text: String,
        /// Always empty.
        #[schema(value_type = Vec<Object>)]
        annotations: [(); 0],
        /// Empty unless the request includes them.
        logprobs: Vec<TokenLogprob>,
    },
    ReasoningText {
        text: String,
    },
}

impl ContentPart {
    pub(crate) fn text(text: String) -> Self {
        Self::OutputText { text, annotations: [], logprobs: Vec::new() }
    }
}

impl OutputItem {
    pub(crate) fn id(&self) -> &str {
        let (Self::Message { id, .. }
        | Self::Reasoning { id, .. }
        | Self::FunctionCall { id, .. }
        | Self::CustomToolCall { id, .. }) = self;
        id
    }

    /// The text of the content, the arguments or the input; empty in an item without content.
    pub(crate) fn text(&self) -> &str {
        match self {
            Self::Message { content, .. } | Self::Reasoning { content, .. } => match content.first() {
                Some(ContentPart::OutputText { text, .. } | ContentPart::ReasoningText { text }) => text,
                None => "",
            },
            Self::FunctionCall { arguments: text, .. } | Self::CustomToolCall { input: text, .. } => text,
        }
    }

    /// Appends to [`Self::text`].
    pub(crate) fn push_str(&mut self, more: &str) {
        match self {
            Self::Message { content, .. } | Self::Reasoning { content, .. } => match content.first_mut() {
                Some(ContentPart::OutputText { text, .. } | ContentPart::ReasoningText { text }) => text.push_str(more),
                None => {}
            },
            Self::FunctionCall { arguments: text, .. } | Self::CustomToolCall { input: text, .. } => {
                text.push_str(more)
            }
        }
    }

    /// Adds logprobs of a message's text.
    pub(crate) fn push_logprobs(&mut self, more: &[TokenLogprob]) {
        if let Self::Message { content, .. } = self
            && let Some(ContentPart::OutputText { logprobs, .. }) = content.first_mut()
        {
            logprobs.extend_from_slice(more);
        }
    }

    /// The part of the content; a call has none.
    pub(crate) fn part(&self) -> Option<&ContentPart> {
        match self {
            Self::Message { content, .. } | Self::Reasoning { content, .. } => content.first(),
            Self::FunctionCall { .. } | Self::CustomToolCall { .. } => None,
        }
    }

    /// Adds the part of the content; a call has none.
    pub(crate) fn push_part(&mut self, part: ContentPart) {
        if let Self::Message { content, .. } | Self::Reasoning { content, .. } = self {
            content.push(part);
        }
    }

    /// Adds the item to the conversation that it answers.
    pub(crate) fn add_to(&self, conversation: &mut Conversation) -> Result<(), String> {
        match self {
            Self::Message { .. } => conversation.text(self.text().to_owned()),
            Self::Reasoning { .. } => conversation.reasoning(self.text().to_owned()),
            Self::FunctionCall { call_id, name, namespace, arguments, .. } => {
                conversation.call(call_id.clone(), shown_name(namespace.as_deref(), name), arguments)
            }
            Self::CustomToolCall { call_id, name, namespace, input, .. } => {
                let name = shown_name(namespace.as_deref(), name);
                conversation.call(call_id.clone(), name, &custom::arguments(input))
            }
        }
    }

    pub(crate) fn set_status(&mut self, new: ItemStatus) {
        let (Self::Message { status, .. }
        | Self::Reasoning { status, .. }
        | Self::FunctionCall { status, .. }
        | Self::CustomToolCall { status, .. }) = self;
        *status = new;
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ResponseUsage)]
pub(crate) struct Usage {
    input_tokens: usize,
    input_tokens_details: InputTokensDetails,
    output_tokens: usize,
    output_tokens_details: OutputTokensDetails,
    total_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ResponseInputTokensDetails)]
struct InputTokensDetails {
    /// Prompt tokens found in the prefix cache.
    cached_tokens: usize,
    /// Always 0: caching has no price of its own.
    cache_write_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = ResponseOutputTokensDetails)]
struct OutputTokensDetails {
    reasoning_tokens: usize,
    #[serde(flatten)]
    predictions: PredictionTokens,
}

impl Usage {
    pub(crate) fn new(summary: &RequestSummary, reasoning_tokens: usize) -> Self {
        let (input_tokens, output_tokens) = (summary.num_prompt_tokens, summary.num_generated_tokens);
        Self {
            input_tokens,
            input_tokens_details: InputTokensDetails {
                cached_tokens: summary.num_cached_tokens,
                cache_write_tokens: 0,
            },
            output_tokens,
            output_tokens_details: OutputTokensDetails { reasoning_tokens, predictions: summary.drafts.into() },
            total_tokens: input_tokens + output_tokens,
        }
    }
}
