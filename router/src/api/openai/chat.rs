//! `/v1/chat/completions`: the request.

use serde::Deserialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::message::Message;
use super::tool::{ToolChoiceField, ToolField};
use super::value::{SamplingFields, StreamOptions, logprob_source, says_something};
use crate::api::field::or_default;
use crate::generation::{Chat, GenerationRequest, Parameters, Prompt, StopText, ToolSet, ValidationError};
use crate::text::{ChatInputs, ToolChoice};

/// OpenAI's limit.
const MAX_TOP_LOGPROBS: u32 = 20;

#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"model": "tgi", "messages": [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "What is deep learning?"}], "max_tokens": 20, "temperature": 0.7}))]
pub(crate) struct ChatRequest {
    #[schema(min_items = 1)]
    messages: Vec<Message>,
    /// Any name is accepted, and comes back; `tgi` means the model that is served.
    pub(crate) model: Option<String>,
    #[serde(flatten)]
    sampling: SamplingFields,
    /// By default as many as fit.
    #[schema(minimum = 1)]
    max_tokens: Option<u32>,
    /// The newer name of `max_tokens`; where both are given they must be equal.
    #[schema(minimum = 1)]
    max_completion_tokens: Option<u32>,
    /// Answer with the tokens' logprobs.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) logprobs: bool,
    /// With each token, so many of the most probable ones in its place; shown with `logprobs` only.
    #[schema(maximum = 20)]
    top_logprobs: Option<u32>,
    /// Answer in events as tokens come.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) stream: bool,
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<StreamOptions>)]
    pub(crate) stream_options: StreamOptions,
    tools: Option<Vec<ToolField>>,
    /// `auto`, `none`, `required`, or a function. By default `auto`.
    tool_choice: Option<ToolChoiceField>,
    /// Whether an answer may call more than one tool.
    #[schema(default = true)]
    parallel_tool_calls: Option<bool>,
    /// What the model is told about tools, where its template does not tell it.
    tool_prompt: Option<String>,
    /// For the template.
    documents: Option<Value>,
    /// End the prompt where an answer begins. By default true unless `continue_final_message`.
    add_generation_prompt: Option<bool>,
    /// Go on with the last message instead of answering it.
    continue_final_message: Option<bool>,
    /// More variables for the template.
    chat_template_kwargs: Option<Map<String, Value>>,
    /// For the template; `none` also sets its `enable_thinking` to false.
    reasoning_effort: Option<String>,
    /// Refused unless empty: send `tools`.
    functions: Option<Value>,
    /// Refused unless `none` or `auto`: send `tool_choice`.
    function_call: Option<Value>,
    /// `text` is the only one.
    modalities: Option<Vec<String>>,
    /// Refused unless empty.
    audio: Option<Value>,
}

impl ChatRequest {
    /// The request in the form that all dialects share.
    pub(crate) fn into_generation(mut self) -> Result<GenerationRequest, ValidationError> {
        let parameters = self.parameters()?;
        let streams = self.stream;
        let prompts = vec![Prompt::Chat(Box::new(self.into_chat()?))];
        Ok(GenerationRequest { prompts, parameters, stop_text: StopText::Cut, streams })
    }

    /// The conversation with its tools.
    pub(crate) fn into_chat(mut self) -> Result<Chat, ValidationError> {
        let tools = self.tool_set();
        Ok(Chat { inputs: self.template_inputs()?, tools })
    }

    /// What the template renders, except the tools.
    fn template_inputs(&mut self) -> Result<ChatInputs, ValidationError> {
        if self.messages.is_empty() {
            return Err(ValidationError::NoMessages);
        }
        let messages = std::mem::take(&mut self.messages).into_iter().map(Message::into_template_value);
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
            continue_final_message: self.continue_final_message,
            kwargs,
        })
    }

    /// `None` for a plain chat, in which the model is shown no tools.
    fn tool_set(&mut self) -> Option<ToolSet> {
        let (tools, values): (Vec<_>, Vec<_>) =
            self.tools.take().into_iter().flatten().map(|field| (field.tool, field.value)).unzip();
        let choice = self.tool_choice.take().map(|field| field.0).unwrap_or_default();
        let is_plain = match choice {
            ToolChoice::None => true,
            ToolChoice::Auto => tools.is_empty(),
            ToolChoice::Required | ToolChoice::Named(_) => false,
        };
        let parallel = self.parallel_tool_calls.unwrap_or(true);
        let prompt = self.tool_prompt.take();
        (!is_plain).then_some(ToolSet { tools, values, choice, parallel, prompt })
    }

    fn parameters(&mut self) -> Result<Parameters, ValidationError> {
        self.refuse_what_is_not_served()?;
        let max_tokens = match (self.max_tokens, self.max_completion_tokens) {
            (Some(one), Some(other)) if one != other => return Err(ValidationError::TwoLengths),
            (one, other) => one.or(other),
        };
        if let Some(given) = self.top_logprobs.filter(|&given| given > MAX_TOP_LOGPROBS) {
            return Err(ValidationError::Logprobs { field: "top_logprobs", max: MAX_TOP_LOGPROBS, given });
        }
        Ok(Parameters {
            max_new_tokens: max_tokens,
            // COMPAT: as in TGI they may be asked for without `logprobs`, and are not shown then.
            top_n_tokens: self.top_logprobs.filter(|_| self.logprobs),
            logprob_source: logprob_source(self.logprobs),
            ..self.sampling.parameters()?
        })
    }

    fn refuse_what_is_not_served(&self) -> Result<(), ValidationError> {
        let refuse = |field, why| Err(ValidationError::Unsupported { field, why });
        if says_something(self.functions.as_ref()) {
            return refuse("functions", "send `tools`");
        }
        if self.function_call.as_ref().is_some_and(|call| !(call.is_null() || call == "none" || call == "auto")) {
            return refuse("function_call", "send `tool_choice`");
        }
        if self.modalities.iter().flatten().any(|modality| modality != "text") {
            return refuse("modalities", "this model answers in text only");
        }
        if says_something(self.audio.as_ref()) {
            return refuse("audio", "this model answers in text only");
        }
        Ok(())
    }
}
