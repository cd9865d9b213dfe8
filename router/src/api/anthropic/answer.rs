//! The answer, and the events of its stream. Adding up the events gives the answer.
//!
//! COMPAT: a field without a value is left out, as Anthropic does: strict clients refuse a null there. Only the fields that
//! say how the answer stopped are null.

use serde::{Serialize, Serializer};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::api::prediction::PredictionTokens;

/// The answer; in a stream what is known of it at the beginning.
#[derive(Clone, Debug, Default, Serialize, ToSchema)]
#[schema(as = AnthropicMessage)]
pub(crate) struct Message {
    pub(crate) id: String,
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    pub(crate) role: &'static str,
    pub(crate) model: String,
    pub(crate) content: Vec<ContentBlock>,
    /// Null at the beginning of a stream.
    pub(crate) stop_reason: Option<StopReason>,
    /// The stop sequence that ended the answer.
    pub(crate) stop_sequence: Option<String>,
    /// Always null.
    #[schema(value_type = Option<Object>)]
    pub(crate) stop_details: (),
    pub(crate) usage: Usage,
}

/// Part of the answer; at its beginning in a stream it is empty.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicContentBlock)]
pub(crate) enum ContentBlock {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
        signature: String,
    },
    ToolUse {
        id: String,
        name: String,
        caller: Caller,
        /// The arguments. Empty if the answer ended within them.
        #[serde(serialize_with = "object")]
        #[schema(value_type = Object)]
        input: String,
    },
}

/// The caller of a tool: always the model itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicCaller)]
pub(crate) enum Caller {
    Direct,
}

/// JSON text as the object that it is, or as an empty one if it is incomplete.
fn object<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    serde_json::from_str::<Map<String, Value>>(text).unwrap_or_default().serialize(serializer)
}

/// Why the answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = AnthropicStopReason)]
pub(crate) enum StopReason {
    EndTurn,
    MaxTokens,
    StopSequence,
    ToolUse,
    /// The context was full before `max_tokens` were generated.
    ModelContextWindowExceeded,
}

/// The prompt's tokens are the sum of the three counts of input.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = AnthropicUsage)]
pub(crate) struct Usage {
    /// Prompt tokens that were computed.
    pub(crate) input_tokens: usize,
    /// Always 0: caching has no price of its own.
    pub(crate) cache_creation_input_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub(crate) cache_read_input_tokens: usize,
    pub(crate) output_tokens: usize,
    pub(crate) output_tokens_details: OutputTokensDetails,
    pub(crate) cache_creation: CacheCreation,
    /// Always `standard`.
    pub(crate) service_tier: &'static str,
}

/// Prompt tokens that were cached at a price, by the time that they are kept: always 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = AnthropicCacheCreation)]
pub(crate) struct CacheCreation {
    ephemeral_5m_input_tokens: usize,
    ephemeral_1h_input_tokens: usize,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, ToSchema)]
#[schema(as = AnthropicOutputTokensDetails)]
pub(crate) struct OutputTokensDetails {
    pub(crate) thinking_tokens: usize,
    #[serde(flatten)]
    pub(crate) predictions: PredictionTokens,
}

/// The answer of `/v1/messages/count_tokens`.
#[derive(Clone, Copy, Debug, Serialize, ToSchema)]
#[schema(as = AnthropicTokenCount)]
pub(crate) struct TokenCount {
    pub(crate) input_tokens: usize,
}

/// An event of a stream. Its name is its type.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicEvent)]
pub(crate) enum MessageEvent {
    MessageStart {
        message: Message,
    },
    ContentBlockStart {
        index: usize,
        content_block: ContentBlock,
    },
    ContentBlockDelta {
        index: usize,
        delta: ContentDelta,
    },
    ContentBlockStop {
        index: usize,
    },
    MessageDelta {
        delta: MessageDelta,
        usage: Usage,
    },
    MessageStop,
    /// Keeps the connection alive; may come at any time.
    Ping,
}

/// The addition of one event to a block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(tag = "type")]
#[schema(as = AnthropicContentDelta)]
pub(crate) enum ContentDelta {
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "signature_delta")]
    Signature { signature: String },
    #[serde(rename = "input_json_delta")]
    InputJson { partial_json: String },
}

/// How the answer ended.
#[derive(Clone, Debug, Serialize, ToSchema)]
#[schema(as = AnthropicMessageDelta)]
pub(crate) struct MessageDelta {
    pub(crate) stop_reason: StopReason,
    pub(crate) stop_sequence: Option<String>,
}

impl Message {
    /// Adds an event, as clients do.
    pub(crate) fn add(&mut self, event: MessageEvent) {
        match event {
            MessageEvent::MessageStart { message } => *self = message,
            MessageEvent::ContentBlockStart { content_block, .. } => self.content.push(content_block),
            MessageEvent::ContentBlockDelta { delta, .. } => {
                if let Some(block) = self.content.last_mut() {
                    block.add(&delta);
                }
            }
            MessageEvent::MessageDelta { delta: MessageDelta { stop_reason, stop_sequence }, usage } => {
                (self.stop_reason, self.stop_sequence, self.usage) = (Some(stop_reason), stop_sequence, usage);
            }
            MessageEvent::ContentBlockStop { .. } | MessageEvent::MessageStop | MessageEvent::Ping => {}
        }
    }
}

impl ContentBlock {
    fn add(&mut self, delta: &ContentDelta) {
        match (self, delta) {
            (Self::Text { text, .. }, ContentDelta::Text { text: more })
            | (Self::Thinking { thinking: text, .. }, ContentDelta::Thinking { thinking: more })
            | (Self::Thinking { signature: text, .. }, ContentDelta::Signature { signature: more })
            | (Self::ToolUse { input: text, .. }, ContentDelta::InputJson { partial_json: more }) => {
                text.push_str(more);
            }
            _ => {}
        }
    }
}
