//! Grammars of answers in llguidance's Lark dialect: reasoning, then text, tool calls or the client's own grammar.

use std::collections::HashSet;
use std::fmt::Write;

use super::call_item::{Item, is_plain};
use super::reasoning::{ReasoningFormat, ReasoningState};
use super::tool::{Tool, ToolChoice, ToolError};
use super::tool_call_format::{Shape, ToolCallFormat, markers};
use crate::sequence::Grammar;

/// `WS` separates any two items of a call. It is bounded, because a model may write whitespace without end.
const TERMINALS: &str = "TEXT: /(?s:.*)/\nWS: /[ \\n]{0,2}/\nSPACE: /[ \\n]{1,2}/\n";

/// Writes the grammars of one model's answers.
pub(crate) struct AnswerGrammar<'a> {
    pub(crate) format: ToolCallFormat,
    pub(crate) reasoning_state: ReasoningState,
    /// Returns the id of the added token with this text. Other markers are matched as text.
    pub(crate) token_id: &'a dyn Fn(&str) -> Option<u32>,
}

impl AnswerGrammar<'_> {
    /// The grammar of an answer with these tools; `None` if any answer is allowed.
    pub(crate) fn tools(
        &self,
        tools: &[Tool],
        choice: &ToolChoice,
        parallel: bool,
        content: Option<&Grammar>,
    ) -> Result<Option<Grammar>, ToolError> {
        let named: Vec<_>;
        let (tools, parallel) = match choice {
            ToolChoice::None => return Ok(None),
            ToolChoice::Auto if tools.is_empty() => return Ok(None),
            ToolChoice::Required if tools.is_empty() => return Err(ToolError::NoTools),
            ToolChoice::Auto | ToolChoice::Required => (tools, parallel),
            ToolChoice::Named(name) => {
                named = tools.iter().filter(|tool| tool.name == *name).cloned().collect();
                (named.as_slice(), false)
            }
        };
        if let (ToolChoice::Named(name), []) = (choice, tools) {
            return Err(ToolError::Unknown { name: name.clone() });
        }
        if tools.iter().any(|tool| tool.name.is_empty()) {
            return Err(ToolError::NoName);
        }
        let mut names = HashSet::new();
        if let Some(tool) = tools.iter().find(|tool| !names.insert(&tool.name)) {
            return Err(ToolError::Duplicate { name: tool.name.clone() });
        }

        let mut lark = Lark { rules: String::new(), token_id: self.token_id };
        lark.run(self.format.shape(), tools, parallel)?;
        match content {
            _ if *choice != ToolChoice::Auto => lark.rule("answer", "run"),
            Some(content) => {
                lark.rule("content", &nested(content));
                lark.rule("answer", "content | run");
            }
            None => self.text_or_run(&mut lark),
        }
        Ok(Some(self.with_reasoning(lark)))
    }

    /// The client's grammar, preceded by the reasoning that the model may write or has started.
    pub(crate) fn after_reasoning(&self, grammar: Grammar) -> Grammar {
        if self.reasoning_state == ReasoningState::Off {
            return grammar;
        }
        let mut lark = Lark { rules: String::new(), token_id: self.token_id };
        lark.rule("answer", &nested(&grammar));
        self.with_reasoning(lark)
    }

    fn with_reasoning(&self, mut lark: Lark<'_>) -> Grammar {
        let start = match self.reasoning_state {
            ReasoningState::Off => "answer",
            ReasoningState::Possible(_) => "(reasoning SPACE?)? answer",
            ReasoningState::Started(_) => "reasoning SPACE? answer",
        };
        if let Some(format) = self.reasoning_state.format() {
            let end = match (self.token_id)(format.close) {
                Some(id) => format!("TEXT? <[{id}]>"),
                None => {
                    lark.rule("reasoning_end[lazy]", &format!("TEXT {}", literal(format.close)));
                    "reasoning_end".to_owned()
                }
            };
            let is_started = matches!(self.reasoning_state, ReasoningState::Started(_));
            let reasoning = if is_started { end } else { format!("{} {end}", lark.marker(format.open)) };
            lark.rule("reasoning", &reasoning);
        }
        Grammar::Lark(format!("start: {start}\n{TERMINALS}{}", lark.rules))
    }

    /// Adds the rule `answer`: text up to the trigger of a run of calls, then the run.
    fn text_or_run(&self, lark: &mut Lark<'_>) {
        let shape = self.format.shape();
        let reasoning = match self.reasoning_state {
            ReasoningState::Possible(format) if (self.token_id)(format.open).is_none() => not_reasoning(format),
            _ => String::new(),
        };
        if shape.is_bare() {
            lark.rule("PLAIN", &format!("/[ \\t\\r\\n]*[^{{ \\t\\r\\n](?s:.*)/{reasoning}"));
            return lark.rule("answer", "PLAIN? | run");
        }
        lark.rule("PLAIN", &format!("/(?s:.*)/{reasoning}"));
        match shape.trigger().map(|trigger| ((self.token_id)(trigger), trigger)) {
            Some((None, trigger)) => {
                // Lazy, so that the text ends as soon as the trigger is complete.
                lark.rule("trigger[lazy]", &format!("PLAIN {}", literal(trigger)));
                lark.rule("answer", "PLAIN? | trigger run_rest");
            }
            _ => lark.rule("answer", "PLAIN? run?"),
        }
    }
}

struct Lark<'a> {
    rules: String,
    token_id: &'a dyn Fn(&str) -> Option<u32>,
}

impl Lark<'_> {
    fn rule(&mut self, name: &str, body: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    /// Adds the rules `run`, one or more calls, and `run_rest`, a run without its first marker.
    fn run(&mut self, shape: &Shape, tools: &[Tool], parallel: bool) -> Result<(), ToolError> {
        let items = shape.call_items();
        let first = match items.first() {
            Some(Item::Marker(marker)) => self.marker(marker),
            _ => String::new(),
        };
        for (index, tool) in tools.iter().enumerate() {
            let body = self.call_rest(&items[1..], index, tool)?;
            self.rule(&format!("call_{index}"), &body);
        }
        let calls: Vec<_> = (0..tools.len()).map(|index| format!("call_{index}")).collect();
        self.rule("call_rest", &calls.join(" | "));
        self.rule("call", &format!("{first} call_rest"));

        let separator: Vec<_> = markers(shape.separator).collect();
        let between = if separator.is_empty() { "SPACE?".to_owned() } else { self.spaced(&separator, "separator") };
        let more = if parallel { format!(" ({between} call)*") } else { String::new() };
        let close = self.spaced_before(&markers(shape.close).collect::<Vec<_>>(), "close");
        match shape.open.split_first() {
            None => {
                self.rule("run_rest", &format!("call_rest{more}{close}"));
                let hint = shape.hint.and_then(|hint| (self.token_id)(hint));
                let hint = hint.map(|id| format!("(<[{id}]> SPACE?)? ")).unwrap_or_default();
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
    fn call_rest(&mut self, items: &[Item], index: usize, tool: &Tool) -> Result<String, ToolError> {
        if items.contains(&Item::BareName) && !(tool.name.starts_with(is_plain) && tool.name.chars().all(is_plain)) {
            return Err(ToolError::Name { name: tool.name.clone() });
        }
        let mut phrase = Phrase::new(format!("T_{index}"));
        for item in items {
            match *item {
                Item::Marker(marker) | Item::Hint(marker) => phrase.push_marker(self, marker),
                Item::QuotedName => phrase.push_text(&literal(&literal(&tool.name))),
                Item::BareName => phrase.push_text(&literal(&tool.name)),
                Item::Arguments => phrase.push_rule(self, &format!("arguments_{index}")),
            }
        }
        self.rule(&format!("arguments_{index}"), &format!("%json {}", tool.arguments_schema()?));
        Ok(phrase.finish(self))
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

    fn marker(&self, marker: &str) -> String {
        (self.token_id)(marker).map_or_else(|| literal(marker), |id| format!("<[{id}]>"))
    }
}

/// A sequence of items with whitespace before each. Adjacent texts become one terminal, which keeps the grammar small.
struct Phrase {
    name: String,
    num_terminals: usize,
    text: Vec<String>,
    sequence: Vec<String>,
}

impl Phrase {
    fn new(name: String) -> Self {
        Self { name, num_terminals: 0, text: Vec::new(), sequence: Vec::new() }
    }

    fn push_marker(&mut self, lark: &mut Lark<'_>, marker: &str) {
        match (lark.token_id)(marker) {
            Some(id) => self.push_rule(lark, &format!("<[{id}]>")),
            None => self.push_text(&literal(marker)),
        }
    }

    fn push_text(&mut self, literal: &str) {
        if self.sequence.is_empty() && self.text.is_empty() {
            // A separate lexeme, because another phrase that is allowed here may start with the same text.
            self.sequence.push("SPACE?".to_owned());
            self.text.push(literal.to_owned());
        } else {
            self.text.push(format!("WS {literal}"));
        }
    }

    fn push_rule(&mut self, lark: &mut Lark<'_>, rule: &str) {
        if self.text.is_empty() {
            self.sequence.push("SPACE?".to_owned());
        } else {
            self.text.push("WS".to_owned());
            self.flush(lark);
        }
        self.sequence.push(rule.to_owned());
    }

    fn flush(&mut self, lark: &mut Lark<'_>) {
        if !self.text.is_empty() {
            let terminal = format!("{}_{}", self.name, self.num_terminals);
            self.num_terminals += 1;
            lark.rule(&terminal, &std::mem::take(&mut self.text).join(" "));
            self.sequence.push(terminal);
        }
    }

    fn finish(mut self, lark: &mut Lark<'_>) -> String {
        self.flush(lark);
        self.sequence.join(" ")
    }
}

/// A grammar as the body of a rule.
fn nested(grammar: &Grammar) -> String {
    match grammar {
        Grammar::JsonSchema(schema) => format!("%json {schema}"),
        Grammar::Regex(pattern) => format!("/{}/", regex_literal(pattern)),
        Grammar::Lark(text) => format!("%lark {{\n{text}\n}}"),
    }
}

/// A Lark string literal, which has JSON's syntax.
fn literal(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// Excludes texts that start with reasoning.
fn not_reasoning(format: ReasoningFormat) -> String {
    format!(" & ~/(?s:[ \\t\\r\\n]*{}.*)/", regex::escape(format.open))
}

/// The pattern, escaped for a Lark literal between slashes.
fn regex_literal(pattern: &str) -> String {
    let mut literal = String::new();
    let mut escaped = false;
    for c in pattern.chars() {
        match c {
            '/' if !escaped => literal.push_str("\\/"),
            '\n' if escaped => literal.push('n'),
            '\n' => literal.push_str("\\n"),
            c => literal.push(c),
        }
        escaped = c == '\\' && !escaped;
    }
    literal
}

#[cfg(test)]
#[path = "grammar_tests.rs"]
mod tests;
