//! The request of `/v1/chat/completions`.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::message::Message;
use super::tool::{ToolChoiceField, ToolField};
use super::value::{IgnoredFields, SamplingFields, StreamOptions};
use super::vllm::VllmFields;
use crate::api::error::CHAT_NAMES;
use crate::api::field::{integer, is_given, or_default};
use crate::config::Config;
use crate::config::SamplingDefaults;
use crate::generation::{
    Chat, FieldNames, GenerationRequest, ImageSource, Parameters, Prompt, ReasoningBudget, ToolSet, ValidationError,
};
use crate::text::{ChatInputs, Tool, ToolChoice};

/// OpenAI's limit.
pub(crate) const MAX_TOP_LOGPROBS: u32 = 20;
const MAX_TEMPLATE_BYTES: usize = 256 << 10;

#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"model": "tgi", "messages": [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "What is deep learning?"}], "max_tokens": 20, "temperature": 0.7}))]
pub(crate) struct ChatRequest {
    #[schema(min_items = 1)]
    messages: Vec<Message>,
    /// Returned in the answer; `tgi` means the served model. Unless the server checks names, any is accepted.
    pub(crate) model: Option<String>,
    #[serde(flatten)]
    sampling: SamplingFields,
    #[serde(flatten)]
    pub(crate) vllm: VllmFields,
    #[serde(flatten)]
    _ignored: IgnoredFields,
    /// Begin the answer with the last message, if the assistant wrote it. For `continue_final_message`.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    echo: bool,
    /// Whether the answer shows the model's reasoning.
    #[schema(default = true)]
    pub(crate) include_reasoning: Option<bool>,
    /// Maximum number of generated tokens. By default limited only by the context.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    max_tokens: Option<u32>,
    /// The newer name of `max_tokens`. If both are given they must be equal.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    max_completion_tokens: Option<u32>,
    /// Include the logprobs of the generated tokens.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) logprobs: bool,
    /// Number of most probable alternatives to return with each token. Requires `logprobs`.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<u32>, maximum = 20)]
    top_logprobs: Option<u32>,
    /// Answer with a stream of events.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) stream: bool,
    pub(crate) stream_options: Option<StreamOptions>,
    tools: Option<Vec<ToolField>>,
    /// `auto`, `none`, `required`, a function or a list of allowed tools. By default `auto`.
    tool_choice: Option<ToolChoiceField>,
    /// Whether one answer may call several tools.
    #[schema(default = true)]
    parallel_tool_calls: Option<bool>,
    /// Instructions about tools for a model whose template does not show them.
    tool_prompt: Option<String>,
    /// Documents for the template.
    documents: Option<Value>,
    /// End the prompt with the beginning of an answer. By default true unless `continue_final_message` is set.
    add_generation_prompt: Option<bool>,
    /// Continue the last message instead of answering it, which is TGI's default if the assistant wrote it.
    #[schema(default = false)]
    continue_final_message: Option<bool>,
    /// Template of this request, instead of the model's own. Only on servers that run with
    /// `--trust-request-chat-template`.
    chat_template: Option<String>,
    /// Further variables for the template.
    chat_template_kwargs: Option<Map<String, Value>>,
    /// Variable for the template; `none` also sets `enable_thinking` to false.
    reasoning_effort: Option<String>,
    /// Most tokens of the model's reasoning, which is ended then; 0 ends it at once. By default `--reasoning-budget`.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<u32>)]
    thinking_token_budget: Option<u32>,
    /// Not supported unless empty: send `tools`.
    functions: Option<Value>,
    /// Not supported unless `none` or `auto`: send `tool_choice`.
    function_call: Option<Value>,
    /// Only `text` is supported.
    modalities: Option<Vec<String>>,
    /// Not supported unless empty.
    audio: Option<Value>,
    /// Not supported unless empty: this server judges no texts.
    moderation: Option<Value>,
    /// Accepted without effect: every prompt is cached.
    #[serde(rename = "prompt_cache_options")]
    #[schema(value_type = Option<Object>)]
    _prompt_cache_options: Option<IgnoredAny>,
}

impl ChatRequest {
    /// The request in the form that all dialects share. `defaults` fill in what it leaves out.
    pub(crate) fn into_generation(
        mut self,
        config: &Config,
        defaults: &SamplingDefaults,
    ) -> Result<GenerationRequest, ValidationError> {
        let mut parameters = self.parameters(defaults)?;
        let streams = self.stream;
        let stop_text = self.vllm.apply(&mut parameters, config, streams)?;
        parameters.extension.reasoning_budget =
            ReasoningBudget::given("thinking_token_budget", self.thinking_token_budget);
        let prompts = vec![Prompt::Chat(Box::new(self.into_chat(config)?))];
        Ok(GenerationRequest { prompts, parameters, stop_text, streams })
    }

    /// What the answer begins with: the text of the last message, if the assistant wrote it.
    pub(crate) fn echoed(&self) -> Option<String> {
        self.messages.last().filter(|_| self.echo).and_then(Message::assistant_text)
    }

    /// What this request calls its fields.
    pub(crate) fn names(&self) -> FieldNames {
        FieldNames { grammar: self.sampling.constraint_name().unwrap_or(CHAT_NAMES.grammar), ..CHAT_NAMES }
    }

    /// Whether the answer shows the drafts that steps verified.
    pub(crate) fn shows_drafts(&self) -> bool {
        self.sampling.extension.return_drafts
    }

    /// The conversation with its tools.
    pub(crate) fn into_chat(mut self, config: &Config) -> Result<Chat, ValidationError> {
        let tools = self.tool_set();
        let template = self.chat_template.take();
        if let Some(template) = &template {
            check_template(template, config)?;
        }
        let mut images = Vec::new();
        let inputs = self.template_inputs(config.image_input.is_some().then_some(&mut images))?;
        Ok(Chat { inputs, tools, template, images })
    }

    /// What the template renders, except the tools.
    fn template_inputs(&mut self, mut images: Option<&mut Vec<ImageSource>>) -> Result<ChatInputs, ValidationError> {
        if self.messages.is_empty() {
            return Err(ValidationError::NoMessages);
        }
        let to_value = |(index, message): (usize, Message)| message.into_template_value(index, images.as_deref_mut());
        let messages = std::mem::take(&mut self.messages).into_iter().enumerate().map(to_value);
        let mut kwargs = self.chat_template_kwargs.take().unwrap_or_default();
        if let Some(effort) = self.reasoning_effort.take() {
            // A template reads one of these variables, or none.
            if effort == "none" {
                kwargs.entry("enable_thinking").or_insert(false.into());
            }
            kwargs.entry("reasoning_effort").or_insert(effort.into());
        }
        Ok(ChatInputs {
            messages: messages.collect::<Result<_, _>>()?,
            tools: None,
            documents: self.documents.take(),
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: Some(self.continue_final_message.unwrap_or(false)),
            kwargs,
            image_text: None,
        })
    }

    /// `None` for a plain chat, in which the model is shown no tools.
    fn tool_set(&mut self) -> Option<ToolSet> {
        let (tools, values): (Vec<Tool>, Vec<Value>) =
            self.tools.take().into_iter().flatten().map(|field| (field.tool, field.value)).unzip();
        let (choice, allowed) = match self.tool_choice.take() {
            Some(ToolChoiceField { choice, allowed }) => (choice, allowed),
            None => (ToolChoice::default(), None),
        };
        let set = ToolSet::new(tools, values, choice, self.parallel_tool_calls.unwrap_or(true))?;
        Some(ToolSet { allowed, prompt: self.tool_prompt.take(), ..set })
    }

    fn parameters(&mut self, defaults: &SamplingDefaults) -> Result<Parameters, ValidationError> {
        if self.stream_options.is_some() && !self.stream {
            return Err(ValidationError::StreamOptions);
        }
        self.check_supported()?;
        self.check_constraint()?;
        let max_tokens = match (self.max_tokens, self.max_completion_tokens) {
            (Some(one), Some(other)) if one != other => return Err(ValidationError::TwoLengths),
            (one, other) => one.or(other),
        };
        if let Some(given) = self.top_logprobs.filter(|&given| given > MAX_TOP_LOGPROBS) {
            return Err(ValidationError::Logprobs { field: "top_logprobs", max: MAX_TOP_LOGPROBS, given });
        }
        Ok(Parameters {
            max_new_tokens: max_tokens,
            // COMPAT: as in TGI, without `logprobs` they are accepted and not shown.
            top_n_tokens: self.top_logprobs.filter(|_| self.logprobs),
            model_logprobs: self.logprobs,
            ..self.sampling.parameters(defaults)?
        })
    }

    /// vLLM's constraints are of the whole answer, so they leave no room for a call that is demanded.
    fn check_constraint(&self) -> Result<(), ValidationError> {
        let demands_call =
            self.tool_choice.as_ref().is_some_and(|field| !matches!(field.choice, ToolChoice::Auto | ToolChoice::None));
        match self.sampling.constraint_name() {
            Some(one) if demands_call && !matches!(one, "response_format" | "grammar") => {
                Err(ValidationError::Exclusive { one, other: "tool_choice" })
            }
            _ => Ok(()),
        }
    }

    fn check_supported(&self) -> Result<(), ValidationError> {
        let refuse = |field, why| Err(ValidationError::Unsupported { field, why });
        if is_given(self.functions.as_ref()) {
            return refuse("functions", "send `tools`");
        }
        if self.function_call.as_ref().is_some_and(|call| !(call.is_null() || call == "none" || call == "auto")) {
            return refuse("function_call", "send `tool_choice`");
        }
        if self.modalities.iter().flatten().any(|modality| modality != "text") {
            return refuse("modalities", "this model answers in text only");
        }
        if is_given(self.audio.as_ref()) {
            return refuse("audio", "this model answers in text only");
        }
        if is_given(self.moderation.as_ref()) {
            return refuse("moderation", "this server judges no texts");
        }
        Ok(())
    }
}

fn check_template(template: &str, config: &Config) -> Result<(), ValidationError> {
    let field = "chat_template";
    if !config.trusts_request_chat_templates {
        let why = "the server runs without --trust-request-chat-template";
        return Err(ValidationError::Unsupported { field, why });
    }
    if template.len() > MAX_TEMPLATE_BYTES {
        let problem = format!("it has {} bytes, at most {MAX_TEMPLATE_BYTES} are allowed", template.len());
        return Err(ValidationError::Item { path: field.to_owned(), problem });
    }
    Ok(())
}
