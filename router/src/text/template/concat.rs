//! Rewrites `a ~ b` as a call: minijinja writes lists, numbers, truth values and none in its own way there, and has no hook
//! for the operator.

use std::ops::Range;

/// The function that replaces the operator.
pub(super) const CONCAT: &str = "penstock_concat";

/// Words that end an operand, because they bind less than `~`.
const WORDS: [&str; 10] = ["and", "or", "not", "in", "if", "elif", "else", "set", "for", "recursive"];

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    /// A name, a number, a text, or an operator that binds more than `~`.
    Operand,
    /// `is`, after which `not` belongs to the operand.
    Is,
    Boundary,
    Concat,
    /// Brackets with everything inside.
    Brackets,
}

/// The source with every `~` rewritten. A source that cannot be read stays as it is: compiling it will fail.
pub(super) fn rewritten(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%").into_iter().chain(rest.find("{{")).chain(rest.find("{#")).min() {
        let (text, block) = rest.split_at(start);
        out.push_str(text);
        let length = match &block[..2] {
            "{#" => block.find("#}").map(|end| end + 2),
            _ => code_len(block),
        };
        let Some(length) = length else {
            out.push_str(block);
            return out;
        };
        let (block, after) = block.split_at(length);
        rest = after;
        if block.starts_with("{#") {
            out.push_str(block);
        } else {
            out.push_str(&in_code(block));
            let tag = block.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['}', '%', '-', '+']).trim();
            if block.starts_with("{%") && tag == "raw" {
                let end = rest.find("endraw").unwrap_or(rest.len());
                out.push_str(&rest[..end]);
                rest = &rest[end..];
            }
        }
    }
    out.push_str(rest);
    out
}

/// Length of the block at the start of the text, whose end may also occur in texts inside it.
fn code_len(block: &str) -> Option<usize> {
    let end = if block.starts_with("{{") { "}}" } else { "%}" };
    let mut at = 2;
    let mut depth = 0_usize;
    while at < block.len() {
        let rest = &block[at..];
        let c = rest.chars().next()?;
        match c {
            // In an expression, `}}` may close two maps.
            _ if depth == 0 && rest.starts_with(end) => return Some(at + 2),
            '"' | '\'' => at += text_len(rest)?,
            _ => {
                depth = match c {
                    '(' | '[' | '{' => depth + 1,
                    ')' | ']' | '}' => depth.saturating_sub(1),
                    _ => depth,
                };
                at += c.len_utf8();
            }
        }
    }
    None
}

/// Length of the quoted text at the start of the text.
fn text_len(text: &str) -> Option<usize> {
    let quote = text.chars().next()?;
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

fn in_code(block: &str) -> String {
    if !block.contains('~') {
        return block.to_owned();
    }
    // The signs next to the braces trim whitespace.
    let head = if block[2..].starts_with(['-', '+']) { 3 } else { 2 };
    let tail = block.len() - if block[..block.len() - 2].ends_with(['-', '+']) { 3 } else { 2 };
    if head > tail {
        return block.to_owned();
    }
    format!("{}{}{}", &block[..head], in_expression(&block[head..tail]), &block[tail..])
}

fn in_expression(code: &str) -> String {
    let tokens = tokens(code);
    let mut out = String::new();
    let mut at = 0;
    while at < tokens.len() {
        let (token, range) = &tokens[at];
        if *token == Token::Boundary {
            out.push_str(&code[range.clone()]);
            at += 1;
            continue;
        }
        let end = tokens[at..].iter().position(|(token, _)| *token == Token::Boundary).map_or(tokens.len(), |n| at + n);
        out.push_str(&in_operands(code, &tokens[at..end]));
        at = end;
    }
    out
}

/// Rewrites a part of an expression between two boundaries.
fn in_operands(code: &str, tokens: &[(Token, Range<usize>)]) -> String {
    let operand = |tokens: &[(Token, Range<usize>)]| -> String {
        let text = |(token, range): &(Token, Range<usize>)| {
            let text = &code[range.clone()];
            match token {
                Token::Brackets if text.len() > 1 => in_brackets(text),
                _ => text.to_owned(),
            }
        };
        tokens.iter().map(text).collect()
    };
    let operands: Vec<_> = tokens.split(|(token, _)| *token == Token::Concat).map(operand).collect();
    match &operands[..] {
        [only] => only.clone(),
        [first, .., last] => {
            let (before, after) = (first.len() - first.trim_start().len(), last.trim_end().len());
            let space = (&first[..before], &last[after..]);
            let joined: Vec<_> = operands.iter().map(|operand| operand.trim()).collect();
            format!("{}{CONCAT}({}){}", space.0, joined.join(", "), space.1)
        }
        [] => String::new(),
    }
}

fn in_brackets(text: &str) -> String {
    let inside = &text[1..text.len() - 1];
    format!("{}{}{}", &text[..1], in_expression(inside), &text[text.len() - 1..])
}

/// Tokens of an expression; brackets with everything inside are one.
fn tokens(code: &str) -> Vec<(Token, Range<usize>)> {
    let mut tokens: Vec<(Token, Range<usize>)> = Vec::new();
    let mut at = 0;
    while at < code.len() {
        let rest = &code[at..];
        let Some(c) = rest.chars().next() else { break };
        let (token, length) = match c {
            '"' | '\'' => (Token::Operand, text_len(rest).unwrap_or(rest.len())),
            '(' | '[' | '{' => (Token::Brackets, bracket_len(rest)),
            '~' => (Token::Concat, 1),
            ',' | ':' | '=' | '!' | '<' | '>' => (Token::Boundary, 1),
            c if c.is_alphabetic() || c == '_' => {
                let length = rest.find(|c: char| !(c.is_alphanumeric() || c == '_')).unwrap_or(rest.len());
                let word = &rest[..length];
                let last = tokens.iter().rev().find(|(_, range)| !code[range.clone()].trim().is_empty());
                let is_attribute = last.is_some_and(|(_, range)| code[range.clone()].ends_with(['.', '|']));
                let after_is = last.is_some_and(|(token, _)| *token == Token::Is);
                match word {
                    _ if is_attribute => (Token::Operand, length),
                    "is" => (Token::Is, length),
                    "not" if after_is => (Token::Is, length),
                    "in" if after_is => (Token::Operand, length),
                    _ if WORDS.contains(&word) => (Token::Boundary, length),
                    _ => (Token::Operand, length),
                }
            }
            c => (Token::Operand, c.len_utf8()),
        };
        tokens.push((token, at..at + length));
        at += length;
    }
    tokens
}

/// Length of the brackets at the start of the text; of the first bracket only, if they are not closed.
fn bracket_len(text: &str) -> usize {
    let mut depth = 0_usize;
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        match c {
            '"' | '\'' => {
                let Some(length) = text_len(&text[at..]) else { return 1 };
                at += length;
                continue;
            }
            '(' | '[' | '{' => depth += 1,
            ')' | ']' | '}' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return at + 1;
                }
            }
            _ => {}
        }
        at += c.len_utf8();
    }
    1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operands_end_at_what_binds_less() {
        let cases = [
            ("{{ a ~ b }}", "{{ penstock_concat(a, b) }}"),
            ("{{- a ~ b.c | trim ~ 'x ~ y' -}}", "{{- penstock_concat(a, b.c | trim, 'x ~ y') -}}"),
            ("{% set x = a + 1 ~ f(b ~ c, d) %}", "{% set x = penstock_concat(a + 1, f(penstock_concat(b, c), d)) %}"),
            (
                "{{ a ~ b if c is not none else d ~ e }}",
                "{{ penstock_concat(a, b) if c is not none else penstock_concat(d, e) }}",
            ),
            ("{% if a ~ b == c and d %}~{% endif %}", "{% if penstock_concat(a, b) == c and d %}~{% endif %}"),
            (
                "{% raw %}{{ a ~ b }}{% endraw %}{{ a ~ {'b': c ~ d}['b'] }}",
                "{% raw %}{{ a ~ b }}{% endraw %}{{ penstock_concat(a, {'b': penstock_concat(c, d)}['b']) }}",
            ),
            ("{# a ~ b #}{{ '}} ~ ' ~ x }}", "{# a ~ b #}{{ penstock_concat('}} ~ ', x) }}"),
            ("{{ unclosed ~ (", "{{ unclosed ~ ("),
        ];
        for (source, expected) in cases {
            assert_eq!(rewritten(source), expected);
        }
    }
}
