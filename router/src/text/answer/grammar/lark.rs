//! Rules of a Lark grammar.

use std::fmt::Write;

use super::{MarkerTokens, Piece};
use crate::sequence::Grammar;

/// `WS` separates any two items of a call. It is bounded, because a model may write whitespace without end.
const TERMINALS: &str = "TEXT: /(?s:.*)/\nWS: /[ \\n]{0,2}/\nSPACE: /[ \\n]{1,2}/\n";

pub(super) struct Lark<'a> {
    rules: String,
    tokens: &'a MarkerTokens,
}

impl<'a> Lark<'a> {
    pub(super) fn new(tokens: &'a MarkerTokens) -> Self {
        Self { rules: String::new(), tokens }
    }

    pub(super) fn rule(&mut self, name: &str, body: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    pub(super) fn has_rule(&self, name: &str) -> bool {
        self.rules.lines().any(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(':')))
    }

    pub(super) fn finish(self, start: &str) -> Grammar {
        Grammar::Lark(format!("start: {start}\n{TERMINALS}{}", self.rules))
    }

    pub(super) fn pieces(&self, marker: &'static str) -> Vec<Piece> {
        self.tokens.pieces(marker)
    }

    pub(super) fn starts_with_token(&self, marker: &'static str) -> bool {
        matches!(self.pieces(marker).first(), Some(Piece::Token(_)))
    }

    /// The marker, without whitespace inside.
    pub(super) fn marker(&self, marker: &'static str) -> String {
        sequence(&self.pieces(marker))
    }

    /// Any text up to and with the marker's first occurrence. May add a rule of this name.
    pub(super) fn until(&mut self, name: &str, marker: &'static str) -> String {
        self.text_until(name, "TEXT", "/(?s:.*)/", marker)
    }

    /// Like [`Self::until`], for a text of this terminal, whose definition is `pattern`.
    pub(super) fn text_until(&mut self, name: &str, terminal: &str, pattern: &str, marker: &'static str) -> String {
        let pieces = self.pieces(marker);
        match &pieces[..] {
            [Piece::Text(text)] => {
                // Lazy, so that the text ends as soon as the marker is complete.
                self.rule(&format!("{name}[lazy]"), &format!("{terminal} {}", literal(text)));
                name.to_owned()
            }
            [Piece::Text(text), rest @ ..] => {
                // A token ends the text; it cannot be a part of it.
                let name = name.to_uppercase();
                let ending = regex_literal(&regex::escape(text));
                let pattern = pattern.replacen("(?s:.*)/", &format!("(?s:.*){ending}/"), 1);
                self.rule(&name, &pattern);
                format!("{name} {}", sequence(rest))
            }
            pieces => format!("{terminal}? {}", sequence(pieces)),
        }
    }
}

/// The pieces as the body of a rule.
pub(super) fn sequence(pieces: &[Piece]) -> String {
    let texts: Vec<_> = pieces
        .iter()
        .map(|piece| match piece {
            Piece::Text(text) => literal(text),
            Piece::Token(id) => format!("<[{id}]>"),
        })
        .collect();
    texts.join(" ")
}

/// What an error of the grammar engine points at.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The arguments of the tool with this index among those of the grammar.
    Tool(usize),
    /// The client's own grammar.
    Content,
}

impl Fault {
    /// The rule that an error of the grammar engine points at, and the error without the place, which the client cannot see.
    pub(crate) fn find<'a>(grammar: &Grammar, error: &'a str) -> Option<(Self, &'a str)> {
        let text = match grammar {
            Grammar::Lark(text) => text,
            Grammar::Thoughts(limited) => {
                return limited.grammar.as_ref().and_then(|grammar| Self::find(grammar, error));
            }
            Grammar::JsonSchema(_) | Grammar::Regex(_) => return None,
        };
        let (place, problem) = error.split_once("at ")?.1.split_once("): ")?;
        let line: usize = place.split_once('(')?.0.parse().ok()?;
        let rule = text.lines().nth(line.checked_sub(1)?)?.split_once(':')?.0;
        let mut parts = rule.split('_');
        let fault = match parts.next()? {
            "content" => Self::Content,
            "arguments" => Self::Tool(parts.next()?.parse().ok()?),
            _ => return None,
        };
        Some((fault, problem.trim_start_matches("failed to compile JSON schema: ")))
    }
}

/// A sequence of items with whitespace before each. Adjacent texts become one terminal, which keeps the grammar small.
pub(super) struct Phrase {
    name: String,
    num_terminals: usize,
    text: Vec<String>,
    sequence: Vec<String>,
}

impl Phrase {
    pub(super) fn new(name: String) -> Self {
        Self { name, num_terminals: 0, text: Vec::new(), sequence: Vec::new() }
    }

    pub(super) fn push_marker(&mut self, lark: &mut Lark<'_>, marker: &'static str) {
        for (index, piece) in lark.pieces(marker).into_iter().enumerate() {
            match piece {
                Piece::Token(id) if index == 0 => self.push_rule(lark, &format!("<[{id}]>")),
                Piece::Text(text) if index == 0 => self.push_text(&literal(text)),
                Piece::Token(id) => {
                    self.flush(lark);
                    self.sequence.push(format!("<[{id}]>"));
                }
                Piece::Text(text) => self.text.push(literal(text)),
            }
        }
    }

    pub(super) fn push_text(&mut self, literal: &str) {
        if self.sequence.is_empty() && self.text.is_empty() {
            // A separate lexeme, because another phrase that is allowed here may start with the same text.
            self.sequence.push("SPACE?".to_owned());
            self.text.push(literal.to_owned());
        } else {
            self.text.push(format!("WS {literal}"));
        }
    }

    pub(super) fn push_rule(&mut self, lark: &mut Lark<'_>, rule: &str) {
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

    pub(super) fn finish(mut self, lark: &mut Lark<'_>) -> String {
        self.flush(lark);
        self.sequence.join(" ")
    }
}

/// A grammar as the body of a rule.
pub(super) fn nested(grammar: &Grammar) -> String {
    match grammar {
        Grammar::JsonSchema(schema) => format!("%json {schema}"),
        Grammar::Regex(pattern) => format!("/{}/", regex_literal(pattern)),
        Grammar::Lark(text) => format!("%lark {{\n{text}\n}}"),
        // The limit is of the whole answer.
        Grammar::Thoughts(limited) => limited.grammar.as_ref().map_or_else(|| "TEXT".to_owned(), nested),
    }
}

/// A Lark string literal, which has JSON's syntax.
pub(super) fn literal(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The pattern, escaped for a Lark literal between slashes.
pub(super) fn regex_literal(pattern: &str) -> String {
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
