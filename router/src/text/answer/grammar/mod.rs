//! Grammars of answers in llguidance's Lark dialect: reasoning, then text, tool calls or the client's own grammar.

mod argument;
mod channel;
mod element;
mod lark;

pub(crate) use lark::Fault;
use lark::{Lark, Phrase, literal, nested, regex_literal};

use super::call_item::{Item, is_plain};
use super::format::{Channels, Encoding, Format, Layout, Run, markers};
use super::marker::{MarkerTokens, Piece};
use super::reasoning::{ReasoningFormat, ReasoningState, Reply};
use super::tool::{Tool, ToolChoice, ToolError};
use crate::sequence::Grammar;

/// Writes the grammars of one model's answers.
pub(super) struct AnswerGrammar<'a> {
    /// If the answer consists of messages with headers.
    pub(super) channels: Option<&'static Channels>,
    pub(super) reasoning_state: ReasoningState,
    pub(super) reply: Option<Reply>,
    pub(super) tokens: &'a MarkerTokens,
}

impl AnswerGrammar<'_> {
    /// The grammar of an answer with these tools, whose schemas must be enforceable; `None` if any answer is allowed.
    pub(super) fn tools(
        &self,
        format: &'static Format,
        tools: &[Tool],
        choice: &ToolChoice,
        parallel: bool,
        content: Option<&Grammar>,
    ) -> Result<Option<Grammar>, ToolError> {
        if *choice == ToolChoice::None || (*choice == ToolChoice::Auto && tools.is_empty()) {
            return Ok(None);
        }
        choice.check(tools)?;
        let parallel = parallel && !matches!(choice, ToolChoice::Named(_));
        let tools: Vec<_> = tools.iter().filter(|tool| choice.allows(tool)).cloned().collect();
        let mut lark = Lark::new(self.tokens);
        let run = match &format.layout {
            Layout::Run(run) => run,
            Layout::Channels(channels) => {
                return channel::tools(lark, channels, &tools, choice.is_forced(), parallel, content).map(Some);
            }
        };
        lark.run(run, &tools, parallel)?;
        match content {
            _ if choice.is_forced() => lark.rule("answer", "run"),
            Some(content) => {
                lark.rule("content", &nested(content));
                let content = self.in_reply(&lark, "content");
                lark.rule("answer", &format!("{content} | run"));
            }
            None => self.text_or_run(run, &mut lark),
        }
        Ok(Some(self.with_reasoning(lark)))
    }

    /// The client's grammar, preceded by the reasoning that the model may write or has started.
    pub(super) fn after_reasoning(&self, grammar: Grammar) -> Grammar {
        let mut lark = Lark::new(self.tokens);
        if let Some(channels) = self.channels {
            return channel::content(lark, channels, &grammar);
        }
        let reply = self.in_reply(&lark, "content");
        if self.reasoning_state == ReasoningState::Off && reply == "content" {
            return grammar;
        }
        lark.rule("content", &nested(&grammar));
        lark.rule("answer", &reply);
        self.with_reasoning(lark)
    }

    fn with_reasoning(&self, mut lark: Lark<'_>) -> Grammar {
        let start = match self.reasoning_state {
            ReasoningState::Off => "answer",
            ReasoningState::Possible(_) => "(reasoning SPACE?)? answer",
            ReasoningState::Started(_) => "reasoning SPACE? answer",
        };
        if let Some(format) = self.reasoning_state.format() {
            let next = format.next_message;
            let next = if next.is_empty() { String::new() } else { format!(" SPACE? {}", lark.marker(next)) };
            let end = lark.until("reasoning_end", format.close) + &next;
            let is_started = matches!(self.reasoning_state, ReasoningState::Started(_));
            let (open, close) = (lark.marker(format.open), lark.marker(format.close) + &next);
            let reasoning = if is_started { end } else { format!("{open} {end} | {close}") };
            lark.rule("reasoning", &reasoning);
        }
        lark.finish(start)
    }

    /// Adds the rule `answer`: text up to the trigger of a run of calls, then the run.
    fn text_or_run(&self, run: &'static Run, lark: &mut Lark<'_>) {
        let reasoning = match self.reasoning_state {
            ReasoningState::Possible(format) if !lark.starts_with_token(format.open) => not_reasoning(format),
            _ => String::new(),
        };
        let plain = if run.is_bare() {
            let bracket = regex::escape(run.first_bracket());
            format!("/[ \\t\\r\\n]*[^{bracket} \\t\\r\\n](?s:.*)/{reasoning}")
        } else {
            format!("/(?s:.*)/{reasoning}")
        };
        lark.rule("PLAIN", &plain);
        let plain = self.in_reply(lark, "PLAIN?");
        match run.trigger().filter(|_| !run.is_bare()) {
            Some(trigger) if !lark.starts_with_token(trigger) => {
                let trigger = lark.text_until("trigger", "PLAIN", &format!("/(?s:.*)/{reasoning}"), trigger);
                lark.rule("answer", &format!("{plain} | {trigger} run_rest"));
            }
            Some(_) if plain == "PLAIN?" => lark.rule("answer", "PLAIN? run?"),
            Some(_) => lark.rule("answer", &format!("{plain} SPACE? run? | PLAIN? run")),
            None if plain == "PLAIN?" => lark.rule("answer", "PLAIN? | run"),
            None => {
                let run = self.in_reply(lark, "run");
                lark.rule("answer", &format!("{plain} | {plain} SPACE? {run}"));
            }
        }
    }

    /// `body` between the markers of a reply that are tokens, all of which may be missing.
    fn in_reply(&self, lark: &Lark<'_>, body: &str) -> String {
        let optional = |marker| {
            let is_token = lark.starts_with_token(marker);
            if is_token { format!("({} SPACE?)?", lark.marker(marker)) } else { String::new() }
        };
        let Some(reply) = self.reply else { return body.to_owned() };
        let closes: Vec<_> = reply.close.iter().map(|close| optional(close)).collect();
        format!("{} {body} {}", optional(reply.open), closes.join(" ")).trim().to_owned()
    }
}

impl Lark<'_> {
    /// Adds the rules `run`, one or more calls, and `run_rest`, a run without its first marker.
    fn run(&mut self, run: &'static Run, tools: &[Tool], parallel: bool) -> Result<(), ToolError> {
        let (head, tail) = run.call_items();
        let first = match head.first() {
            Some(Item::Marker(marker)) => Some(*marker),
            _ => None,
        };
        for (index, tool) in tools.iter().enumerate() {
            let rest = if first.is_some() { &head[1..] } else { &head[..] };
            let body = self.call_rest(run.encoding(), rest, &tail, index, tool)?;
            self.rule(&format!("call_{index}"), &body);
        }
        let calls: Vec<_> = (0..tools.len()).map(|index| format!("call_{index}")).collect();
        self.rule("call_rest", &calls.join(" | "));
        let first = first.map(|marker| self.marker(marker)).unwrap_or_default();
        self.rule("call", &format!("{first} call_rest"));

        let separator: Vec<_> = markers(run.separator).collect();
        let between = if separator.is_empty() { "SPACE?".to_owned() } else { self.spaced(&separator, "separator") };
        let more = if parallel { format!(" ({between} call)*") } else { String::new() };
        let close = self.spaced_before(&markers(run.close).collect::<Vec<_>>(), "close");
        match run.open.split_first() {
            None => {
                self.rule("run_rest", &format!("call_rest{more}{close}"));
                let hint = run.hint.filter(|hint| self.starts_with_token(hint)).map(|hint| self.marker(hint));
                let hint = hint.map(|hint| format!("({hint} SPACE?)? ")).unwrap_or_default();
                self.rule("run", &format!("{hint}{first} run_rest"));
            }
            Some((open, others)) => {
                let others: Vec<_> = others.iter().map(|marker| Item::Marker(marker)).collect();
                let others = self.spaced(&others, "open");
                self.rule("run_rest", &format!("{others} call{more}{close}"));
                let open = self.marker(open);
                self.rule("run", &format!("{open} run_rest"));
            }
        }
        Ok(())
    }

    /// The body of a rule for a call without its first marker.
    pub(super) fn call_rest(
        &mut self,
        encoding: Encoding,
        head: &[Item],
        tail: &[Item],
        index: usize,
        tool: &Tool,
    ) -> Result<String, ToolError> {
        let mut phrase = Phrase::new(format!("T_{index}"));
        for item in head {
            self.push_item(&mut phrase, *item, tool)?;
        }
        let arguments = format!("arguments_{index}");
        match encoding {
            Encoding::Json => self.rule(&arguments, &format!("%json {}", tool.arguments_schema()?)),
            Encoding::Literals(literals) => self.literal_arguments(literals, &arguments, tool)?,
            Encoding::Tags(_) | Encoding::Elements(_) => {
                let has_arguments = match encoding {
                    Encoding::Elements(elements) => self.element_arguments(elements, &arguments, tool)?,
                    Encoding::Tags(tags) => self.tagged_arguments(tags, &arguments, tool)?,
                    Encoding::Json | Encoding::Literals(_) => false,
                };
                if has_arguments {
                    phrase.push_rule(self, &arguments);
                }
                // Whitespace may precede another argument, too, so it is not a part of the next terminal.
                let mut rest = Phrase::new(format!("T_{index}_END"));
                for item in tail {
                    self.push_item(&mut rest, *item, tool)?;
                }
                return Ok(format!("{} {}", phrase.finish(self), rest.finish(self)));
            }
        }
        phrase.push_rule(self, &arguments);
        for item in tail {
            self.push_item(&mut phrase, *item, tool)?;
        }
        Ok(phrase.finish(self))
    }

    fn push_item(&mut self, phrase: &mut Phrase, item: Item, tool: &Tool) -> Result<(), ToolError> {
        let name = &tool.name;
        let is_plain = name.chars().all(is_plain);
        match item {
            Item::BareName | Item::NameInId if !is_plain => return Err(ToolError::Name { name: name.clone() }),
            Item::Marker(marker) | Item::Hint(marker) => phrase.push_marker(self, marker),
            Item::QuotedName => phrase.push_text(&literal(&literal(name))),
            Item::BareName => phrase.push_text(&literal(name)),
            Item::NameInId => phrase.push_text(&format!("{} /[0-9]+/", literal(&format!("functions.{name}:")))),
            Item::Id(length) => phrase.push_text(&format!("/[A-Za-z0-9]{{{length}}}/")),
            Item::Index => phrase.push_text("/[0-9]+/"),
            Item::QuotedIndex => phrase.push_text("/\"[0-9]+\"/"),
            Item::Fields(_) | Item::MoreFields | Item::Object => {}
        }
        Ok(())
    }

    /// Markers with whitespace around each.
    fn spaced(&mut self, items: &[Item], name: &str) -> String {
        let before = self.spaced_before(items, name);
        format!("{before} SPACE?")
    }

    fn spaced_before(&mut self, items: &[Item], name: &str) -> String {
        let mut phrase = Phrase::new(name.to_uppercase());
        for item in items {
            if let Item::Marker(marker) = item {
                phrase.push_marker(self, marker);
            }
        }
        let text = phrase.finish(self);
        if text.is_empty() { text } else { format!(" {text}") }
    }
}

/// Excludes texts that start with reasoning, or with its end.
fn not_reasoning(format: ReasoningFormat) -> String {
    let markers = [format.open, format.close].map(|marker| regex_literal(&regex::escape(marker)));
    format!(" & ~/(?s:[ \\t\\r\\n]*({}).*)/", markers.join("|"))
}

#[cfg(test)]
#[path = "../grammar_tests.rs"]
mod tests;
