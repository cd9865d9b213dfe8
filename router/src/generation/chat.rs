//! A conversation as a prompt, and how the model's answer to it is constrained and parsed.

use std::sync::Arc;

use serde_json::{Value, json};

use super::error::GenerationError;
use super::image::ImageSource;
use super::parameter::Checked;
use super::validation::ValidationError;
use crate::sequence::{Grammar, ImageInput};
use crate::text::{
    AnswerFormat, AnswerParser, CallIds, ChatInputs, ChatStyle, Fault, ReasoningState, TextModel, ThoughtMarkers, Tool,
    ToolChoice, ToolError,
};

/// A conversation to answer.
#[derive(Clone, Debug)]
pub(crate) struct Chat {
    /// Without tools.
    pub(crate) inputs: ChatInputs,
    /// `None`: the model is shown no tools.
    pub(crate) tools: Option<ToolSet>,
    /// Replaces the model's own templates.
    pub(crate) template: Option<String>,
    /// Images of all messages, in their order.
    pub(crate) images: Vec<ImageSource>,
}

/// The tools that the model may call. Empty only if the choice cannot be satisfied.
#[derive(Clone, Debug)]
pub(crate) struct ToolSet {
    pub(crate) tools: Arc<[Tool]>,
    /// The tools as the template sees them.
    pub(crate) values: Vec<Value>,
    pub(crate) choice: ToolChoice,
    /// Names of the tools that the answer may call; `None`: all.
    pub(crate) allowed: Option<Vec<String>>,
    /// Whether one answer may call several tools.
    pub(crate) parallel: bool,
    /// Replaces our instructions to a model whose template does not show tools.
    pub(crate) prompt: Option<String>,
}

impl ToolSet {
    /// `None` for a plain chat, in which the model is shown no tools.
    pub(crate) fn new(tools: Vec<Tool>, values: Vec<Value>, choice: ToolChoice, parallel: bool) -> Option<Self> {
        let is_plain = match choice {
            ToolChoice::None => true,
            ToolChoice::Auto => tools.is_empty(),
            ToolChoice::Required | ToolChoice::Named(_) => false,
        };
        (!is_plain).then_some(Self { tools: tools.into(), values, allowed: None, choice, parallel, prompt: None })
    }

    /// The tools that the answer may call.
    fn callable(&self) -> Result<Vec<Tool>, ToolError> {
        let Some(allowed) = &self.allowed else { return Ok(self.tools.to_vec()) };
        let named = |name: &String| {
            let tool = self.tools.iter().find(|tool| tool.name == *name);
            tool.cloned().ok_or_else(|| ToolError::Unknown { name: name.clone() })
        };
        allowed.iter().map(named).collect()
    }
}

/// The ids of an answer's tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ToolCallIds(CallIds);

impl Default for ToolCallIds {
    fn default() -> Self {
        Self(CallIds::Prefixed)
    }
}

impl ToolCallIds {
    /// The id of a call for which the model has not written one, with the dialect's prefix where the format does not fix ids.
    pub(crate) fn new_id(self, prefix: &str) -> String {
        let id = format!("{:032x}", rand::random::<u128>());
        match self.0 {
            CallIds::Nine => id[..9].to_owned(),
            CallIds::Ten => id[..10].to_owned(),
            CallIds::Prefixed | CallIds::Written => format!("{prefix}{}", &id[..24]),
        }
    }
}

impl Chat {
    /// Renders the chat template over the conversation and its tools. `image_input`: `None` if the model reads no images.
    pub(super) async fn render(
        self,
        model: &TextModel,
        image_input: Option<&ImageInput>,
    ) -> Result<RenderedChat, GenerationError> {
        let Self { mut inputs, tools, template, images: _ } = self;
        inputs.image_text = image_input.map(|input| input.text_in_template().to_owned());
        let style = model.chat_style(template).await?;
        if let Some(tools) = &tools {
            let format = style.answer_format(true);
            if let Some(text) = format.tool_prompt(&tools.values, tools.prompt.as_deref()) {
                append_text(inputs.messages.last_mut(), text);
            }
            inputs.tools = Some(tools.values.clone());
        }
        Ok(RenderedChat { prompt: style.render(inputs).await?.into(), style, tools })
    }
}

/// A conversation as a prompt.
pub(super) struct RenderedChat {
    pub(super) prompt: Arc<str>,
    style: Arc<ChatStyle>,
    tools: Option<ToolSet>,
}

fn append_text(message: Option<&mut Value>, text: String) {
    match message.and_then(|message| message.get_mut("content")) {
        Some(Value::String(content)) => content.push_str(&text),
        Some(Value::Array(parts)) => parts.push(json!({"type": "text", "text": text})),
        _ => {}
    }
}

/// How the answer to one rendered chat is written.
pub(super) struct ChatAnswer {
    style: Arc<ChatStyle>,
    thinking: ReasoningState,
    tools: Option<ToolSet>,
}

impl ChatAnswer {
    pub(super) fn new(chat: RenderedChat) -> Self {
        let RenderedChat { prompt, style, tools } = chat;
        Self { thinking: style.answer_format(tools.is_some()).reasoning_state(&prompt), style, tools }
    }

    fn format(&self) -> &AnswerFormat {
        self.style.answer_format(self.tools.is_some())
    }

    /// Sets the token that ends the answer, if the template has another than EOS, and the grammar of the answer, applied after
    /// any reasoning: the client's own, that of the tools, or a choice of both. Returns what of the tools' schemas is not
    /// enforced.
    pub(super) fn constrain(
        &self,
        checked: &mut Checked,
        grammar_support: bool,
    ) -> Result<Vec<String>, GenerationError> {
        if !checked.ignore_eos {
            checked.sampling.stop_token_ids.extend(self.style.turn_end(self.tools.is_some()));
        }
        let mut left_out = Vec::new();
        let own = checked.grammar.take();
        if own.is_some() && !grammar_support {
            return Err(ValidationError::GrammarDisabled.into());
        }
        checked.grammar = match (own, &self.tools) {
            (Some(grammar), None) => Some(self.format().after_reasoning(self.thinking, grammar)),
            (None, None) => None,
            (own, Some(set)) => {
                let ToolSet { choice, parallel, .. } = set;
                let grammar = set.callable().and_then(|tools| {
                    self.format().tool_grammar(self.thinking, &tools, choice, *parallel, own.as_ref())
                });
                let (grammar, notes) = grammar.map_err(|error: ToolError| GenerationError::Tool(error.to_string()))?;
                left_out = notes;
                // Without grammars the model may still call tools as it was trained to, but cannot be made to.
                if !grammar_support && set.choice != ToolChoice::Auto {
                    return Err(ValidationError::GrammarDisabled.into());
                }
                grammar.filter(|_| grammar_support)
            }
        };
        if checked.ignore_eos && checked.grammar.is_some() {
            return Err(ValidationError::IgnoreEosWithGrammar.into());
        }
        Ok(left_out)
    }

    /// Whether the model's answers may begin with thoughts.
    pub(super) fn has_thoughts(&self) -> bool {
        self.format().has_thoughts()
    }

    /// How this answer's thoughts are ended early; `None`: it has none.
    pub(super) fn thought_markers(&self) -> Option<ThoughtMarkers> {
        let may_call = self.choice().is_some_and(|choice| *choice != ToolChoice::None);
        self.format().thought_markers(self.thinking, may_call)
    }

    /// An invalid grammar comes from the schema of a tool, or from the client's `response_format`.
    pub(super) fn grammar_error(&self, error: GenerationError, grammar: &Grammar) -> GenerationError {
        let GenerationError::Validation(ValidationError::Grammar(reason)) = &error else { return error };
        let tool = |index| {
            let set = self.tools.as_ref()?;
            set.callable().ok()?.into_iter().filter(|tool| set.choice.allows(tool)).nth(index)
        };
        match Fault::find(grammar, reason) {
            Some((Fault::Content, problem)) => ValidationError::Grammar(problem.to_owned()).into(),
            Some((Fault::Tool(index), problem)) if let Some(tool) = tool(index) => GenerationError::Tool(format!(
                "the parameters of the function {:?} cannot be used: {problem}",
                tool.name
            )),
            _ if self.tools.is_some() => {
                let message = "the tools' parameters, or `response_format`, are not schemas that can be used";
                GenerationError::Tool(format!("{message}: {reason}"))
            }
            _ => error,
        }
    }

    /// Special tokens that the parser must see.
    pub(super) fn shown_token_ids(&self) -> Arc<[u32]> {
        self.format().shown_token_ids(self.choice(), self.thinking)
    }

    pub(super) fn parser(&self) -> AnswerParser {
        let tools = self.tools.as_ref().map(|set| Arc::clone(&set.tools)).unwrap_or_default();
        self.format().parser(&tools, self.choice(), self.thinking)
    }

    pub(super) fn tool_call_ids(&self) -> Option<ToolCallIds> {
        let format = self.format().call_format();
        self.tools.as_ref().map(|_| ToolCallIds(format.map_or(CallIds::Prefixed, |format| format.ids)))
    }

    fn choice(&self) -> Option<&ToolChoice> {
        self.tools.as_ref().map(|set| &set.choice)
    }
}
