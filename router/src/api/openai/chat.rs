//! `/v1/chat/completions`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::value::{OneOrMany, SamplingFields, StreamOptions, says_something};
use super::{Envelope, FinishReason, Usage};
use crate::api::parameter::{Parameters, ValidationError};
use crate::api::tgi::or_default;
use crate::engine::LogprobSource;
use crate::text::TextToken;

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
    stop: Option<OneOrMany>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) logprobs: bool,
    top_logprobs: Option<u32>,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) stream: bool,
    #[serde(default, deserialize_with = "or_default")]
    pub(crate) stream_options: StreamOptions,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    functions: Option<Value>,
    response_format: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Message {
    role: String,
    content: Option<Content>,
    /// Whatever else the template may know: `name`, `tool_calls`, `tool_call_id`, …
    #[serde(flatten)]
    other: Map<String, Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a string or a list of parts")]
enum Content {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Debug, Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

impl ChatRequest {
    /// The messages as templates see them: a content of several texts becomes one.
    pub(crate) fn template_messages(&mut self) -> Result<Vec<Value>, ValidationError> {
        if self.messages.is_empty() {
            return Err(ValidationError::NoMessages);
        }
        std::mem::take(&mut self.messages).into_iter().map(Message::into_template_value).collect()
    }

    pub(crate) fn parameters(&mut self) -> Result<Parameters, ValidationError> {
        let top_logprobs = self.top_logprobs.unwrap_or(0);
        if top_logprobs > 0 && !self.logprobs {
            return Err(ValidationError::TopLogprobs);
        }
        let max_tokens = match (self.max_tokens, self.max_completion_tokens) {
            (Some(one), Some(other)) if one != other => return Err(ValidationError::TwoLengths),
            (one, other) => one.or(other),
        };
        let mut parameters = self.sampling.parameters()?;
        parameters.max_new_tokens = max_tokens;
        parameters.stop = self.stop.take().map(OneOrMany::into_vec).unwrap_or_default();
        Ok(parameters)
    }

    fn forces_a_tool(&self) -> bool {
        match &self.tool_choice {
            None | Some(Value::Null) => false,
            Some(Value::String(choice)) => !matches!(choice.as_str(), "auto" | "none"),
            Some(_) => true,
        }
    }

    fn constrains_the_answer(&self) -> bool {
        match &self.response_format {
            None | Some(Value::Null) => false,
            Some(format) => format["type"] != "text",
        }
    }
}

impl Message {
    fn into_template_value(self) -> Result<Value, ValidationError> {
        let content = match self.content {
            None => String::new(),
            Some(Content::Text(text)) => text,
            Some(Content::Parts(parts)) => {
                parts.into_iter().map(Part::into_text).collect::<Result<Vec<_>, _>>()?.concat()
            }
        };
        let mut message = Map::new();
        message.insert("role".to_owned(), self.role.into());
        message.insert("content".to_owned(), content.into());
        message.extend(self.other.into_iter().filter(|(_, value)| !value.is_null()));
        Ok(message.into())
    }
}

impl Part {
    fn into_text(self) -> Result<String, ValidationError> {
        match self.text {
            Some(text) if self.kind == "text" => Ok(text),
            _ => Err(ValidationError::ContentPart { part: self.kind }),
        }
    }
}

impl SamplingFields {
    /// OpenAI's rules: sampling unless the temperature is 0, and neutral values mean nothing.
    pub(super) fn parameters(&self) -> Result<Parameters, ValidationError> {
        let greedy = self.temperature == Some(0.0);
        Ok(Parameters {
            do_sample: !greedy,
            temperature: self.temperature.filter(|_| !greedy),
            top_p: self.top_p.filter(|&top_p| !(top_p == 1.0 || greedy && top_p > 0.0 && top_p < 1.0)),
            top_k: self.top_k.filter(|&top_k| !(greedy && top_k > 0)),
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
            typical_p: self.typical_p.filter(|_| !greedy),
            logprob_source: LogprobSource::Model,
            max_top_n_tokens: MAX_TOP_LOGPROBS,
            extension: self.extension.clone().into(),
            ..Parameters::default()
        })
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatCompletion {
    #[serde(flatten)]
    pub(crate) envelope: Envelope,
    pub(crate) choices: [ChatChoice; 1],
    pub(crate) usage: Usage,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatChoice {
    pub(crate) index: u32,
    pub(crate) message: OutputMessage,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: FinishReason,
}

#[derive(Debug, Serialize)]
pub(crate) struct OutputMessage {
    pub(crate) role: &'static str,
    pub(crate) content: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatChunk<'a> {
    #[serde(flatten)]
    pub(crate) envelope: &'a Envelope,
    /// Empty in the chunk that carries the usage.
    pub(crate) choices: Vec<ChatChunkChoice>,
    /// Always there, mostly null.
    pub(crate) usage: Option<Usage>,
}

#[derive(Debug, Serialize)]
pub(crate) struct ChatChunkChoice {
    pub(crate) index: u32,
    pub(crate) delta: Delta,
    pub(crate) logprobs: Option<ChatLogprobs>,
    pub(crate) finish_reason: Option<FinishReason>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Delta {
    /// Only in the first chunk: clients that add deltas up would repeat it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) role: Option<&'static str>,
    pub(crate) content: String,
}

#[derive(Debug, Default, Serialize)]
pub(crate) struct ChatLogprobs {
    pub(crate) content: Vec<TokenLogprob>,
}

#[derive(Debug, Serialize)]
pub(crate) struct TokenLogprob {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
    top_logprobs: [(); 0],
}

impl ChatLogprobs {
    pub(crate) fn of(tokens: impl IntoIterator<Item = TextToken>) -> Self {
        let entry = |token: TextToken| TokenLogprob {
            bytes: token.text.clone().into_bytes(),
            token: token.text,
            logprob: token.logprob,
            top_logprobs: [],
        };
        Self { content: tokens.into_iter().map(entry).collect() }
    }
}
