//! `/v1/chat/completions`: the request.

use serde::Deserialize;
use serde_json::Value;

use super::message::Message;
use super::value::{SamplingFields, StreamOptions, says_something};
use crate::api::parameter::{Parameters, ValidationError};
use crate::api::tgi::or_default;

/// OpenAI's limit.
const MAX_TOP_LOGPROBS: u32 = 20;

#[derive(Debug, Deserialize)]
pub(crate) struct ChatRequest {
    messages: Vec<Message>,
    pub(crate) model: Option<String>,
    #[serde(flatten)]
    sampling: SamplingFields,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) logprobs: bool,
    top_logprobs: Option<u32>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) stream: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) stream_options: StreamOptions,
    functions: Option<Value>,
    function_call: Option<Value>,
    modalities: Option<Vec<String>>,
    audio: Option<Value>,
}

impl ChatRequest {
    pub(crate) fn template_messages(&mut self) -> Result<Vec<Value>, ValidationError> {
        if self.messages.is_empty() {
            return Err(ValidationError::NoMessages);
        }
        std::mem::take(&mut self.messages).into_iter().map(Message::into_template_value).collect()
    }

    pub(crate) fn parameters(&mut self) -> Result<Parameters, ValidationError> {
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
