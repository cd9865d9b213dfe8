//! The requests of `/v1/messages` and `/v1/messages/count_tokens`.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::block::{MessageParam, TextBlock};
use super::conversation::template_messages;
use super::tool::{ToolChoiceParam, ToolParam, tool_set};
use crate::api::content::Content;
use crate::api::field::{integer, is_given, named, or_default, required_integer};
use crate::api::grammar;
use crate::api::openai::SamplingFields;
use crate::config::SamplingDefaults;
use crate::generation::{
    Chat, Constraint, Extension, GenerationRequest, Parameters, Prompt, ReasoningBudget, StopText, ValidationError,
};
use crate::telemetry::Warnings;
use crate::text::{ChatInputs, Enforcement};

#[derive(Debug, Deserialize, ToSchema)]
#[schema(
    as = AnthropicMessagesRequest,
    example = json!({"model": "tgi", "max_tokens": 20, "system": "You are a helpful assistant.", "messages": [{"role": "user", "content": "What is deep learning?"}]})
)]
pub(crate) struct MessagesRequest {
    #[serde(flatten)]
    pub(crate) conversation: Conversation,
    /// Maximum number of generated tokens. More than the context has room for is allowed.
    #[serde(deserialize_with = "required_integer")]
    #[schema(value_type = u32, minimum = 1)]
    pub(crate) max_tokens: u32,
    /// Divides the logits before sampling. 0 means greedy.
    #[schema(minimum = 0, default = 1)]
    temperature: Option<f32>,
    /// Sample from the smallest set of most probable tokens whose probabilities add up to `top_p`. 1 means all tokens.
    #[schema(minimum = 0, maximum = 1, default = 1)]
    top_p: Option<f32>,
    /// Sample from the `top_k` most probable tokens. 0 means all tokens, 1 means greedy.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<i32>, minimum = 0, default = 0)]
    top_k: Option<i32>,
    /// Strings that end the answer, which does not include them. `/info` reports the maximum number.
    pub(crate) stop_sequences: Option<Vec<String>>,
    /// Answer with a stream of events.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) stream: bool,
}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicCountTokensRequest, example = json!({"model": "tgi", "messages": [{"role": "user", "content": "What is deep learning?"}]}))]
pub(crate) struct CountTokensRequest {
    #[serde(flatten)]
    pub(crate) conversation: Conversation,
}

/// The prompt of both requests, and how its answer is written.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(remote = "Self")]
#[schema(as = AnthropicConversation)]
pub(crate) struct Conversation {
    /// Any name is accepted and returned; `tgi` means the served model.
    pub(crate) model: String,
    /// A last message of the assistant is continued.
    #[schema(min_items = 1)]
    messages: Vec<MessageParam>,
    /// The system prompt. A line that begins with `x-anthropic-billing-header:` is removed from the beginning of a block.
    system: Option<Content<TextBlock>>,
    tools: Option<Vec<ToolParam>>,
    tool_choice: Option<ToolChoiceParam>,
    thinking: Option<Thinking>,
    output_config: Option<OutputConfig>,
    /// Not supported unless empty: send `output_config.format`.
    output_format: Option<Value>,
    /// Not supported unless empty: this server runs no code.
    container: Option<Value>,
    /// Not supported unless empty: this server executes no tools.
    mcp_servers: Option<Value>,
    /// Not supported unless empty: this server summarizes nothing.
    compaction: Option<Value>,
    /// `create` has no effect: no conversation is kept. `continue` is refused in the way that makes Anthropic's package send
    /// the whole conversation.
    thread: Option<Thread>,
    /// Accepted without effect.
    #[serde(rename = "billing_policy")]
    #[schema(value_type = Option<Object>)]
    _billing_policy: Option<IgnoredAny>,
    /// Accepted without effect: this model declines nothing for another one.
    #[serde(rename = "fallbacks")]
    #[schema(value_type = Option<Object>)]
    _fallbacks: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "fallback_credit_token")]
    #[schema(value_type = Option<Object>)]
    _fallback_credit_token: Option<IgnoredAny>,
    /// Accepted without effect: every prompt is cached.
    #[serde(rename = "cache_control")]
    #[schema(value_type = Option<Object>)]
    _cache_control: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "context_management")]
    #[schema(value_type = Option<Object>)]
    _context_management: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "diagnostics")]
    #[schema(value_type = Option<Object>)]
    _diagnostics: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "inference_geo")]
    #[schema(value_type = Option<String>)]
    _inference_geo: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "metadata")]
    #[schema(value_type = Option<Object>)]
    _metadata: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "service_tier")]
    #[schema(value_type = Option<String>)]
    _service_tier: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "speed")]
    #[schema(value_type = Option<String>)]
    _speed: Option<IgnoredAny>,
}

/// Whether the model thinks before it answers: the template's `enable_thinking`. Without it the template decides.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicThinking)]
enum Thinking {
    Enabled {
        display: Option<ThinkingDisplay>,
        /// Most tokens of the thoughts, which are ended then; 0 ends them at once.
        #[serde(default, deserialize_with = "integer")]
        #[schema(value_type = Option<u32>)]
        budget_tokens: Option<u32>,
    },
    Adaptive {
        display: Option<ThinkingDisplay>,
    },
    BetweenTools,
    Disabled,
}

/// Whether the server keeps the conversation.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicThread)]
pub(super) enum Thread {
    Create,
    Continue { previous_message_id: String },
}

/// Whether the answer shows the reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = AnthropicThinkingDisplay)]
enum ThinkingDisplay {
    /// In full.
    Summarized,
    /// The blocks of reasoning are empty.
    Omitted,
}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicOutputConfig)]
struct OutputConfig {
    /// The template's `reasoning_effort`.
    effort: Option<String>,
    format: Option<OutputFormat>,
}

/// The format of the answer's text.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicOutputFormat)]
enum OutputFormat {
    JsonSchema {
        #[schema(value_type = Object)]
        schema: Value,
    },
}

impl<'de> Deserialize<'de> for Conversation {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Calls the derived function, which `remote` makes an inherent one.
        named(deserializer, |deserializer| Self::deserialize(deserializer))
    }
}

impl MessagesRequest {
    /// The request in the form that all dialects share. `defaults` fill in what it leaves out.
    pub(crate) fn into_generation(mut self, defaults: &SamplingDefaults) -> Result<GenerationRequest, ValidationError> {
        if self.max_tokens == 0 {
            return Err(ValidationError::NoNewTokens);
        }
        let stop = self.stop_sequences.take().unwrap_or_default();
        let sampling = SamplingFields::of(self.temperature, self.top_p, self.top_k).parameters(defaults)?;
        let mut parameters = Parameters {
            // As in Anthropic's API, the answer ends where the context does.
            default_new_tokens: Some(self.max_tokens),
            stop,
            grammar: self.conversation.grammar()?,
            extension: Extension { reasoning_budget: self.conversation.reasoning_budget(), ..sampling.extension },
            ..sampling
        };
        let prompts = vec![Prompt::Chat(Box::new(self.conversation.into_chat(&mut parameters.warnings)?))];
        Ok(GenerationRequest { prompts, parameters, stop_text: StopText::Cut, streams: self.stream })
    }
}

impl CountTokensRequest {
    /// The conversation, and warnings about it.
    pub(crate) fn into_chat(self) -> Result<(Chat, Warnings), ValidationError> {
        let mut warnings = Warnings::default();
        let chat = self.conversation.into_chat(&mut warnings)?;
        Ok((chat, warnings))
    }
}

impl Conversation {
    /// The message that the conversation continues without repeating what is before it: no server of ours has it.
    pub(crate) fn continued(&self) -> Option<&str> {
        match &self.thread {
            Some(Thread::Continue { previous_message_id }) => Some(previous_message_id),
            Some(Thread::Create) | None => None,
        }
    }

    /// Whether the answer shows the model's reasoning.
    pub(crate) fn shows_thinking(&self) -> bool {
        let display = match self.thinking {
            Some(Thinking::Enabled { display, .. } | Thinking::Adaptive { display }) => display,
            _ => None,
        };
        display != Some(ThinkingDisplay::Omitted)
    }

    fn reasoning_budget(&self) -> Option<ReasoningBudget> {
        match self.thinking {
            Some(Thinking::Enabled { budget_tokens, .. }) => {
                ReasoningBudget::given("thinking.budget_tokens", budget_tokens)
            }
            _ => None,
        }
    }

    /// The conversation with its tools.
    fn into_chat(self, warnings: &mut Warnings) -> Result<Chat, ValidationError> {
        self.check_supported()?;
        let mut kwargs = Map::new();
        if let Some(thinking) = &self.thinking {
            kwargs.insert("enable_thinking".to_owned(), (!matches!(thinking, Thinking::Disabled)).into());
        }
        if let Some(effort) = self.output_config.and_then(|config| config.effort) {
            kwargs.insert("reasoning_effort".to_owned(), effort.into());
        }
        let (messages, images) = template_messages(self.system, self.messages)?;
        let inputs = ChatInputs {
            continue_final_message: Some(messages.last().is_some_and(|message| message["role"] == "assistant")),
            messages,
            kwargs,
            ..ChatInputs::default()
        };
        Ok(Chat { inputs, tools: tool_set(self.tools, self.tool_choice, warnings)?, template: None, images })
    }

    fn check_supported(&self) -> Result<(), ValidationError> {
        let refused = [
            ("output_format", &self.output_format, "send `output_config.format`"),
            ("container", &self.container, "this server runs no code"),
            ("mcp_servers", &self.mcp_servers, "this server executes no tools"),
            ("compaction", &self.compaction, "this server summarizes nothing; send a shorter conversation"),
        ];
        match refused.into_iter().find(|(_, value, _)| is_given(value.as_ref())) {
            Some((field, _, why)) => Err(ValidationError::Unsupported { field, why }),
            None => Ok(()),
        }
    }

    /// The grammar of the answer's text.
    fn grammar(&mut self) -> Result<Option<Constraint>, ValidationError> {
        let format = self.output_config.as_mut().and_then(|config| config.format.take());
        let schema = format.map(|OutputFormat::JsonSchema { schema }| grammar::schema(schema, Enforcement::Strict));
        schema.transpose().map_err(|problem| ValidationError::Item { path: "output_config.format".to_owned(), problem })
    }
}
