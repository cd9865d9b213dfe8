//! How one model formats its answers, detected from what its chat template writes and from its vocabulary.

use std::sync::Arc;

use super::expected::Expected;
use super::format::{Addressee, Channels, Format};
use super::grammar::AnswerGrammar;
use super::marker::MarkerTokens;
use super::parser::AnswerParser;
use super::prompt::tool_prompt;
use super::reasoning::{Frame, ReasoningFormat, ReasoningState, Reply, ThoughtMarkers};
use super::table::GENERIC;
use super::tool::{Tool, ToolChoice, ToolError};
use crate::sequence::Grammar;
use crate::text::template::TemplateTraits;

/// The tool-call format and the reasoning format of one model.
#[derive(Debug)]
pub(crate) struct AnswerFormat {
    traits: TemplateTraits,
    /// `None` if the template shows tools in a format that is not known: then only a forced call is one.
    calls: Option<&'static Format>,
    frame: Frame,
    marker_tokens: MarkerTokens,
}

impl AnswerFormat {
    /// `template`: the source of the chat template. `token_id`: returns the id of the added token with this text.
    pub(crate) fn new(template: &str, traits: TemplateTraits, token_id: impl Fn(&str) -> Option<u32>) -> Self {
        let is_token = |text: &str| token_id(text).is_some();
        let by_template = traits.format.as_deref().and_then(Format::named);
        let calls = match by_template {
            Some(format) => Some(format),
            None if traits.shows_tools => Format::of_vocabulary(is_token),
            None => Format::named(GENERIC),
        };
        let texts = [template, &traits.written];
        let frame = Frame::detect(&texts);
        let markers = calls.into_iter().flat_map(Format::markers).chain(frame.markers()).collect();
        let marker_tokens = MarkerTokens::new(markers, token_id);
        Self { traits, calls, frame, marker_tokens }
    }

    /// The format of the model's tool calls, if it is known.
    pub(crate) fn call_format(&self) -> Option<&'static Format> {
        self.calls
    }

    /// Whether an answer to this rendered prompt contains reasoning.
    pub(crate) fn reasoning_state(&self, prompt: &str) -> ReasoningState {
        ReasoningState::after(self.frame.reasoning, prompt)
    }

    /// Whether the model's answers may begin with thoughts.
    pub(crate) fn has_thoughts(&self) -> bool {
        self.frame.reasoning.is_some() || self.thought_header().is_some()
    }

    /// How the thoughts of an answer are ended early; `None`: it has none. `may_call`: whether it may contain calls.
    pub(crate) fn thought_markers(&self, reasoning_state: ReasoningState, may_call: bool) -> Option<ThoughtMarkers> {
        let Some((channels, header)) = self.thought_header() else { return reasoning_state.thought_markers() };
        let Channels { start, role, end_of_header, end_of_aside, content, .. } = *channels;
        // The model itself writes the header of a call.
        let next = if may_call { String::new() } else { format!("{content}{end_of_header}") };
        Some(ThoughtMarkers {
            open: format!("{header}{end_of_header}"),
            close: end_of_aside,
            end: format!("{end_of_aside}{start}{role}{next}"),
            reopens: true,
        })
    }

    /// The header of thoughts, if the answer consists of messages with headers.
    fn thought_header(&self) -> Option<(&'static Channels, &'static str)> {
        let channels = self.calls.and_then(Format::channels)?;
        let header = channels.asides.iter().find(|header| (channels.addressee)(header) == Addressee::Model)?;
        Some((channels, header))
    }

    /// The format of calls, where the answer may contain some. A call that is forced has our own format if the model's
    /// is not known.
    fn format_for(&self, choice: Option<&ToolChoice>) -> Option<&'static Format> {
        match choice {
            None | Some(ToolChoice::None) => None,
            Some(choice) if choice.is_forced() => self.calls.or_else(|| Format::named(GENERIC)),
            Some(_) => self.calls,
        }
    }

    /// Ids of the tokens whose text the parser needs, even where they are special tokens.
    pub(crate) fn shown_token_ids(&self, choice: Option<&ToolChoice>, reasoning_state: ReasoningState) -> Arc<[u32]> {
        let has_headers = self.calls.filter(|format| format.channels().is_some());
        let calls = self.format_for(choice).or(has_headers).into_iter().flat_map(Format::markers);
        let reasoning = reasoning_state.format().into_iter().flat_map(ReasoningFormat::markers);
        let reply = self.frame.reply.into_iter().flat_map(Reply::markers);
        self.marker_tokens.ids(calls.chain(reasoning).chain(reply))
    }

    /// A parser for one answer. `choice`: `None` without tools.
    pub(crate) fn parser(
        &self,
        tools: &Arc<[Tool]>,
        choice: Option<&ToolChoice>,
        reasoning_state: ReasoningState,
    ) -> AnswerParser {
        let expected = Expected {
            calls: self.format_for(choice),
            tools: Arc::clone(tools),
            reasoning_state,
            reply: self.frame.reply,
            only_calls: choice.is_some_and(ToolChoice::is_forced),
        };
        AnswerParser::new(self.calls, expected)
    }

    /// Text to append to the last message so that the model knows the tools, unless the template shows them.
    /// `instruction`: the client's own.
    pub(crate) fn tool_prompt(&self, tools: &[serde_json::Value], instruction: Option<&str>) -> Option<String> {
        tool_prompt(self.traits.shows_tools, tools, instruction)
    }

    /// The grammar of an answer with these tools, and what of their schemas it does not enforce; `None` where any answer is
    /// allowed. An answer without a call must match `content`, if given.
    pub(crate) fn tool_grammar(
        &self,
        reasoning_state: ReasoningState,
        tools: &[Tool],
        choice: &ToolChoice,
        parallel: bool,
        content: Option<&Grammar>,
    ) -> Result<(Option<Grammar>, Vec<String>), ToolError> {
        choice.check(tools)?;
        let parallel = parallel && self.traits.parallel_calls;
        let Some(format) = self.format_for(Some(choice)) else {
            return Ok((content.map(|grammar| self.after_reasoning(reasoning_state, grammar.clone())), Vec::new()));
        };
        let (mut enforceable, mut left_out) = (Vec::with_capacity(tools.len()), Vec::new());
        for tool in tools.iter().filter(|tool| choice.allows(tool)) {
            let (tool, notes) = tool.enforceable()?;
            enforceable.push(tool);
            left_out.extend(notes);
        }
        let grammar =
            self.grammar(Some(format), reasoning_state).tools(format, &enforceable, choice, parallel, content);
        Ok((grammar?, left_out))
    }

    /// The client's grammar, applied to the answer after its reasoning.
    pub(crate) fn after_reasoning(&self, reasoning_state: ReasoningState, grammar: Grammar) -> Grammar {
        self.grammar(self.calls, reasoning_state).after_reasoning(grammar)
    }

    fn grammar(&self, format: Option<&'static Format>, reasoning_state: ReasoningState) -> AnswerGrammar<'_> {
        let channels = format.and_then(Format::channels);
        AnswerGrammar { channels, reasoning_state, reply: self.frame.reply, tokens: &self.marker_tokens }
    }
}
