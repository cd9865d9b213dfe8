//! The request of `/v1/responses`.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::answer::Echo;
use super::compaction;
use super::item::{InputItem, add_items, resolved};
use super::problem::{problem, refuse_given};
use super::tool::{CalledTools, Function, ToolChoiceParam, ToolParam, functions, tool_set};
use crate::api::content::Content;
use crate::api::conversation::{Conversation, PromptPart};
use crate::api::field::{integer, or_default};
use crate::api::grammar;
use crate::api::openai::{MAX_TOP_LOGPROBS, SamplingFields};
use crate::config::SamplingDefaults;
use crate::generation::{
    Chat, Constraint, Extension, GenerationRequest, Parameters, Prompt, ReasoningBudget, StopText, ToolSet,
    ValidationError,
};
use crate::telemetry::Warnings;
use crate::text::{ChatInputs, Enforcement};

/// Values of `include` that ask for what an answer does not have; accepted, because agents always send some.
const WITHOUT_EFFECT: [&str; 7] = [
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
];
const LOGPROBS: &str = "message.output_text.logprobs";

#[derive(Debug, Deserialize, ToSchema)]
#[schema(example = json!({"model": "tgi", "instructions": "You are a helpful assistant.", "input": "What is deep learning?", "max_output_tokens": 20}))]
pub(crate) struct ResponsesRequest {
    /// Any name is accepted and returned; `tgi` means the served model.
    pub(crate) model: String,
    /// A string, or the items of the conversation. May be left out if `previous_response_id` names one.
    input: Option<Content<InputItem>>,
    /// Instructions before the conversation.
    instructions: Option<String>,
    /// Continue the conversation of this response, on servers that run with `--max-stored-responses`.
    pub(crate) previous_response_id: Option<String>,
    tools: Option<Vec<ToolParam>>,
    /// `auto`, `none`, `required`, a function, or some of the tools. By default `auto`.
    #[schema(value_type = Option<ToolChoiceParam>)]
    tool_choice: Option<Value>,
    /// Whether one answer may call several tools.
    #[schema(default = true)]
    parallel_tool_calls: Option<bool>,
    text: Option<TextConfig>,
    reasoning: Option<Reasoning>,
    /// Maximum number of generated tokens. By default limited only by the context.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    max_output_tokens: Option<u32>,
    /// Divides the logits before sampling. 0 means greedy.
    #[schema(minimum = 0, default = 1)]
    temperature: Option<f32>,
    /// Sample from the smallest set of most probable tokens whose probabilities add up to `top_p`. 1 means all tokens.
    #[schema(minimum = 0, maximum = 1, default = 1)]
    top_p: Option<f32>,
    /// Subtracted once from the logit of every token that was already generated.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    presence_penalty: Option<f32>,
    /// Subtracted from a token's logit once for each time that the token was generated.
    #[schema(minimum = -2, maximum = 2, default = 0)]
    frequency_penalty: Option<f32>,
    /// Answer with a stream of events.
    #[serde(default, deserialize_with = "or_default")]
    #[schema(value_type = Option<bool>, default = false)]
    pub(crate) stream: bool,
    /// Keep the response for `previous_response_id`, on servers that run with `--max-stored-responses`.
    #[schema(default = true)]
    store: Option<bool>,
    /// `message.output_text.logprobs`. What OpenAI knows besides has no effect: reasoning is not encrypted, and this server
    /// executes no tools.
    include: Option<Vec<String>>,
    /// `disabled`: a conversation that is too long is refused. `auto`: its oldest turns are dropped.
    #[schema(default = "disabled")]
    truncation: Option<String>,
    /// Returned with the response.
    #[schema(value_type = Option<Object>)]
    metadata: Option<BTreeMap<String, String>>,
    /// Returned with the response; only tools that OpenAI executes are counted.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<u32>)]
    max_tool_calls: Option<u32>,
    /// Returned with the response.
    prompt_cache_key: Option<String>,
    /// Returned with the response.
    safety_identifier: Option<String>,
    /// Not supported unless false or 0.
    background: Option<Value>,
    /// Not supported unless empty: send the conversation as `input`.
    conversation: Option<Value>,
    /// Not supported unless empty: send `instructions` and `input`.
    prompt: Option<Value>,
    /// Number of most probable alternatives to return with each token of the text. Shown only where `include` has
    /// `message.output_text.logprobs`.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<u32>, minimum = 0, maximum = 20, default = 0)]
    top_logprobs: Option<u32>,
    /// Not supported unless empty: send a shorter `input`.
    context_management: Option<Value>,
    /// Not supported unless empty: this server judges no texts.
    moderation: Option<Value>,
    /// Accepted without effect.
    #[serde(rename = "access_programs")]
    #[schema(value_type = Option<Object>)]
    _access_programs: Option<IgnoredAny>,
    /// Accepted without effect: images are refused.
    #[serde(rename = "image")]
    #[schema(value_type = Option<Object>)]
    _image: Option<IgnoredAny>,
    /// Accepted without effect: every prompt is cached.
    #[serde(rename = "prompt_cache_options")]
    #[schema(value_type = Option<Object>)]
    _prompt_cache_options: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "prompt_cache_retention")]
    #[schema(value_type = Option<String>)]
    _prompt_cache_retention: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "client_metadata")]
    #[schema(value_type = Option<Object>)]
    _client_metadata: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "service_tier")]
    #[schema(value_type = Option<String>)]
    _service_tier: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "stream_options")]
    #[schema(value_type = Option<Object>)]
    _stream_options: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "user")]
    #[schema(value_type = Option<String>)]
    _user: Option<IgnoredAny>,
}

/// The form of the answer's text.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseTextConfig)]
struct TextConfig {
    format: Option<TextFormat>,
    /// Accepted without effect.
    #[serde(rename = "verbosity")]
    #[schema(value_type = Option<String>)]
    _verbosity: Option<IgnoredAny>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = ResponseTextFormat)]
enum TextFormat {
    Text,
    JsonObject,
    JsonSchema {
        name: Option<String>,
        description: Option<String>,
        #[schema(value_type = Object)]
        schema: Value,
        /// Whether keywords that cannot be enforced are refused. Otherwise they are left out, and named in a header.
        strict: Option<bool>,
    },
}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseReasoning)]
struct Reasoning {
    /// Variable for the template; `none` also sets `enable_thinking` to false.
    effort: Option<String>,
    /// Returned with the response; the reasoning is not summarized.
    summary: Option<String>,
    /// Not in OpenAI: most tokens of the reasoning, which is ended then; 0 ends it at once. By default `--reasoning-budget`.
    #[serde(default, deserialize_with = "integer")]
    #[schema(value_type = Option<u32>)]
    max_tokens: Option<u32>,
    /// Accepted without effect: the reasoning is not summarized.
    #[serde(rename = "generate_summary")]
    #[schema(value_type = Option<String>)]
    _generate_summary: Option<IgnoredAny>,
    /// Accepted without effect.
    #[serde(rename = "context")]
    #[schema(value_type = Option<String>)]
    _context: Option<IgnoredAny>,
}

/// A request that was read: what to generate, and what the response repeats.
pub(crate) struct ReadRequest {
    pub(crate) generation: GenerationRequest,
    pub(crate) echo: Echo,
    /// What a later request continues, without the answer; `None` if the client wants nothing stored.
    pub(crate) conversation: Option<Conversation>,
    pub(crate) called: CalledTools,
    /// The input as it is listed; empty if nothing is stored.
    pub(crate) input: Vec<Value>,
    pub(crate) shows_logprobs: bool,
    /// Whether the oldest turns of a conversation that is too long are dropped.
    pub(crate) truncates: bool,
}

impl ResponsesRequest {
    /// `earlier`: the conversation of the response that this one continues. `stores`: whether responses are stored.
    /// `defaults` fill in what the request leaves out. `find`: a stored item by its id.
    pub(crate) fn read(
        mut self,
        earlier: Option<Conversation>,
        stores: bool,
        defaults: &SamplingDefaults,
        find: impl Fn(&str) -> Option<Value>,
    ) -> Result<ReadRequest, ValidationError> {
        self.check_supported()?;
        // The response repeats them.
        self.temperature = self.temperature.or(defaults.temperature);
        self.top_p = self.top_p.or(defaults.top_p);
        let mut warnings = Warnings::default();
        let functions = functions(self.tools.take().unwrap_or_default(), &mut warnings)?;
        let called = CalledTools::of(&functions);
        let (shows_logprobs, truncates) = (self.shows_logprobs(), self.truncates());
        let choice = self.tool_choice.take().filter(|choice| !choice.is_null());
        let echo = self.echo(&functions, choice.as_ref(), stores);
        let parameters = Parameters { warnings, ..self.parameters(defaults)? };
        let tools = self.tool_set(&functions, choice)?;
        let mut conversation = earlier.unwrap_or_default();
        let items = self.input.map_or(Ok(Vec::new()), |input| resolved(input, find))?;
        let input = if echo.store { items.iter().map(InputItem::listed).collect() } else { Vec::new() };
        add_items(&mut conversation, items)?;
        let stored = echo.store.then(|| conversation.clone());
        let (messages, images) =
            conversation.into_messages(self.instructions).map_err(|reason| problem("input", &reason))?;
        if messages.is_empty() {
            return Err(problem("input", "it has no message"));
        }
        let mut kwargs = Map::new();
        if let Some(effort) = self.reasoning.and_then(|reasoning| reasoning.effort) {
            // A template reads one of these variables, or none.
            if effort == "none" {
                kwargs.insert("enable_thinking".to_owned(), false.into());
            }
            kwargs.insert("reasoning_effort".to_owned(), effort.into());
        }
        let inputs = ChatInputs { messages, continue_final_message: Some(false), kwargs, ..ChatInputs::default() };
        let prompts = vec![Prompt::Chat(Box::new(Chat { inputs, tools, template: None, images }))];
        let generation = GenerationRequest { prompts, parameters, stop_text: StopText::Cut, streams: self.stream };
        Ok(ReadRequest { generation, echo, conversation: stored, called, input, shows_logprobs, truncates })
    }

    /// The request for a summary of the conversation, and the user's messages, which stay.
    pub(crate) fn read_for_summary(
        mut self,
        earlier: Option<Conversation>,
        find: impl Fn(&str) -> Option<Value>,
    ) -> Result<(GenerationRequest, Vec<Value>), ValidationError> {
        let mut conversation = earlier.unwrap_or_default();
        let items = self.input.map_or(Ok(Vec::new()), |input| resolved(input, find))?;
        let kept = items.iter().filter(|item| item.is_user()).map(InputItem::listed).collect();
        add_items(&mut conversation, items)?;
        let told = conversation.user(PromptPart::Text(compaction::TASK.to_owned()));
        told.map_err(|reason| problem("input", &reason))?;
        let (messages, images) =
            conversation.into_messages(self.instructions.take()).map_err(|reason| problem("input", &reason))?;
        let kwargs = Map::from_iter([("enable_thinking".to_owned(), false.into())]);
        let inputs = ChatInputs { messages, continue_final_message: Some(false), kwargs, ..ChatInputs::default() };
        let prompts = vec![Prompt::Chat(Box::new(Chat { inputs, tools: None, template: None, images }))];
        let parameters = Parameters { default_new_tokens: Some(compaction::MAX_TOKENS), ..Parameters::default() };
        Ok((GenerationRequest { prompts, parameters, stop_text: StopText::Cut, streams: false }, kept))
    }

    fn shows_logprobs(&self) -> bool {
        self.include.iter().flatten().any(|include| include == LOGPROBS)
    }

    fn truncates(&self) -> bool {
        self.truncation.as_deref() == Some("auto")
    }

    fn tool_set(&self, functions: &[Function], choice: Option<Value>) -> Result<Option<ToolSet>, ValidationError> {
        let choice = choice.map(|choice| {
            ToolChoiceParam::deserialize(choice).map_err(|error| problem("tool_choice", &error.to_string()))
        });
        tool_set(functions, choice.transpose()?, self.parallel_tool_calls.unwrap_or(true))
    }

    fn parameters(&mut self, defaults: &SamplingDefaults) -> Result<Parameters, ValidationError> {
        let parameters = SamplingFields::of(self.temperature, self.top_p, None).parameters(defaults)?;
        if let Some(given) = self.top_logprobs.filter(|&given| given > MAX_TOP_LOGPROBS) {
            return Err(ValidationError::Logprobs { field: "top_logprobs", max: MAX_TOP_LOGPROBS, given });
        }
        let shows_logprobs = self.shows_logprobs();
        Ok(Parameters {
            top_n_tokens: self.top_logprobs.filter(|_| shows_logprobs),
            model_logprobs: shows_logprobs,
            max_new_tokens: self.max_output_tokens,
            frequency_penalty: self.frequency_penalty,
            grammar: self.grammar()?,
            extension: Extension {
                presence_penalty: self.presence_penalty,
                reasoning_budget: ReasoningBudget::given(
                    "reasoning.max_tokens",
                    self.reasoning.as_ref().and_then(|reasoning| reasoning.max_tokens),
                ),
                ..parameters.extension
            },
            ..parameters
        })
    }

    fn grammar(&self) -> Result<Option<Constraint>, ValidationError> {
        let (schema, strict) = match self.text.as_ref().and_then(|text| text.format.as_ref()) {
            None | Some(TextFormat::Text) => return Ok(None),
            Some(TextFormat::JsonObject) => (json!({"type": "object"}), None),
            Some(TextFormat::JsonSchema { schema, strict, .. }) => (schema.clone(), *strict),
        };
        let enforcement = if strict == Some(true) { Enforcement::Strict } else { Enforcement::Lenient };
        grammar::schema(schema, enforcement).map(Some).map_err(|reason| problem("text.format", &reason))
    }

    fn check_supported(&self) -> Result<(), ValidationError> {
        refuse_given(&[
            ("context_management", &self.context_management, "this server summarizes nothing; send a shorter `input`"),
            ("moderation", &self.moderation, "this server judges no texts"),
            ("background", &self.background, "every response is answered at once"),
            ("conversation", &self.conversation, "send the conversation as `input`"),
            ("prompt", &self.prompt, "send `instructions` and `input`"),
        ])?;
        let is_known = |include: &&String| *include == LOGPROBS || WITHOUT_EFFECT.contains(&include.as_str());
        if let Some(other) = self.include.iter().flatten().find(|include| !is_known(include)) {
            return Err(problem("include", &format!("`{other}` is not supported, only `{LOGPROBS}` is")));
        }
        match self.truncation.as_deref() {
            None | Some("disabled" | "auto") => Ok(()),
            Some(_) => Err(ValidationError::Unsupported { field: "truncation", why: "only `disabled` and `auto` are" }),
        }
    }

    fn echo(&self, functions: &[Function], choice: Option<&Value>, stores: bool) -> Echo {
        let (effort, summary) = match &self.reasoning {
            Some(Reasoning { effort, summary, .. }) => (effort.as_deref(), summary.as_deref()),
            None => (None, None),
        };
        let format = match self.text.as_ref().and_then(|text| text.format.as_ref()) {
            None | Some(TextFormat::Text) => json!({"type": "text"}),
            Some(TextFormat::JsonObject) => json!({"type": "json_object"}),
            Some(TextFormat::JsonSchema { name, description, schema, strict }) => json!({
                "type": "json_schema", "name": name, "description": description, "schema": schema,
                "strict": strict.unwrap_or(false),
            }),
        };
        Echo {
            previous_response_id: self.previous_response_id.clone(),
            instructions: self.instructions.clone(),
            tools: functions.iter().map(Function::echo).collect(),
            tool_choice: choice.cloned().unwrap_or_else(|| "auto".into()),
            truncation: if self.truncates() { "auto" } else { "disabled" },
            parallel_tool_calls: self.parallel_tool_calls.unwrap_or(true),
            text: json!({"format": format}),
            temperature: self.temperature.unwrap_or(1.0),
            top_p: self.top_p.unwrap_or(1.0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            top_logprobs: self.top_logprobs.unwrap_or(0),
            reasoning: json!({"effort": effort, "summary": summary}),
            max_output_tokens: self.max_output_tokens,
            max_tool_calls: self.max_tool_calls,
            store: stores && self.store.unwrap_or(true),
            background: false,
            service_tier: "default",
            metadata: json!(self.metadata.clone().unwrap_or_default()),
            safety_identifier: self.safety_identifier.clone(),
            prompt_cache_key: self.prompt_cache_key.clone(),
        }
    }
}
