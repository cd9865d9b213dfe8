//! Patterns of JSON Schema, which are those of ECMA-262, in the dialect of the grammar engine, which is that of Rust.
//!
//! The dialects have the same operators, except for what each of them takes for a literal character.

use std::iter::Peekable;
use std::str::Chars;

/// What ECMA-262's `.` matches.
const ANY: &str = r"[^\n\r\u{2028}\u{2029}]";

/// The same pattern for the engine. What neither dialect has, such as `\Z`, is unchanged, and so are look-arounds.
pub(super) fn translated(pattern: &str) -> String {
    let mut translation = Translation {
        rest: pattern.chars().peekable(),
        text: String::with_capacity(pattern.len()),
        has_flags: pattern.contains("(?s") || pattern.contains("(?i") || pattern.contains("(?m"),
    };
    while let Some(character) = translation.rest.next() {
        match character {
            '\\' => translation.escape(false),
            '[' => translation.class(),
            '{' if !is_quantifier(translation.rest.clone()) => translation.text.push_str(r"\{"),
            '.' if !translation.has_flags => translation.text.push_str(ANY),
            character => translation.text.push(character),
        }
    }
    translation.text
}

/// The patterns of leading positive look-aheads, and the pattern that follows them: a text matches `^(?=a)b` if it matches
/// both `^(?:a)` and `^b`.
pub(super) fn split_look_aheads(pattern: &str) -> Option<(Vec<String>, String)> {
    let mut rest = pattern.strip_prefix('^')?;
    let mut patterns = Vec::new();
    while let Some(inner) = rest.strip_prefix("(?=") {
        let end = closing(inner)?;
        patterns.push(format!("^(?:{})", &inner[..end]));
        rest = &inner[end + 1..];
    }
    // `^a|b` anchors `a` only.
    (!patterns.is_empty() && !has_alternatives(rest)).then(|| (patterns, format!("^{rest}")))
}

struct Translation<'a> {
    rest: Peekable<Chars<'a>>,
    text: String,
    /// Whether flags may change what `.` means.
    has_flags: bool,
}

impl Translation<'_> {
    fn class(&mut self) {
        self.text.push('[');
        if self.rest.next_if_eq(&'^').is_some() {
            self.text.push('^');
        }
        if self.rest.next_if_eq(&']').is_some() {
            // The dialects differ, and clients mean either.
            self.text.push(']');
        }
        while let Some(character) = self.rest.next() {
            match character {
                ']' => {
                    self.text.push(']');
                    return;
                }
                '\\' => {
                    let is_set = self.rest.peek().is_some_and(|next| "dDwWsSpP".contains(*next));
                    self.escape(true);
                    if is_set && self.rest.next_if_eq(&'-').is_some() {
                        self.text.push_str(r"\-");
                    }
                }
                // Rust's operators of sets.
                '[' | '&' | '~' => self.text.extend(['\\', character]),
                '-' if self.text.ends_with('-') && !self.text.ends_with(r"\-") => self.text.push_str(r"\-"),
                character => self.text.push(character),
            }
        }
    }

    /// What follows a backslash.
    fn escape(&mut self, in_class: bool) {
        let Some(character) = self.rest.next() else { return self.text.push('\\') };
        match (character, self.rest.peek().copied()) {
            ('c', Some(letter)) if letter.is_ascii_alphabetic() => {
                self.rest.next();
                self.text.push_str(&format!(r"\x{:02x}", u32::from(letter) & 31));
            }
            ('0', next) if !next.is_some_and(|next| next.is_ascii_digit()) => self.text.push_str(r"\x00"),
            ('b', _) if in_class => self.text.push_str(r"\x08"),
            ('<' | '>', _) => self.text.push(character),
            ('u', Some(_)) => self.unicode(),
            ('p' | 'P' | 'x' | 'k', Some('{')) => {
                self.text.extend(['\\', character]);
                self.braces();
            }
            _ => self.text.extend(['\\', character]),
        }
    }

    /// `\u`, of which two may be one character in UTF-16.
    fn unicode(&mut self) {
        let digits = |text: &str| u16::from_str_radix(text.get(..4)?, 16).ok();
        let ahead: String = self.rest.clone().take(10).collect();
        let units = digits(&ahead).zip(ahead.get(4..6).filter(|next| *next == r"\u").and_then(|_| digits(&ahead[6..])));
        match units.and_then(|(high, low)| char::decode_utf16([high, low]).next()?.ok()) {
            Some(character) if u32::from(character) > 0xFFFF => {
                self.rest.by_ref().take(10).for_each(drop);
                self.text.push_str(&format!(r"\u{{{:x}}}", u32::from(character)));
            }
            _ => {
                self.text.push_str(r"\u");
                if self.rest.peek() == Some(&'{') {
                    self.braces();
                }
            }
        }
    }

    /// Copies text in braces.
    fn braces(&mut self) {
        for character in self.rest.by_ref() {
            self.text.push(character);
            if character == '}' {
                return;
            }
        }
    }
}

/// Whether `{` begins a quantifier. Clients mean different things by `{,3}`, which is left to the engine.
fn is_quantifier(rest: Peekable<Chars<'_>>) -> bool {
    let inner: String = rest.take_while(|character| character.is_ascii_digit() || *character == ',').collect();
    !inner.is_empty()
}

/// The position of the parenthesis that ends a group.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0;
    outer_positions(text).find_map(|(position, character)| {
        match character {
            '(' => depth += 1,
            ')' if depth == 0 => return Some(position),
            ')' => depth -= 1,
            _ => {}
        }
        None
    })
}

fn has_alternatives(text: &str) -> bool {
    let mut depth = 0;
    outer_positions(text).any(|(_, character)| {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        depth == 0 && character == '|'
    })
}

/// The characters that are neither escaped nor in a class.
fn outer_positions(text: &str) -> impl Iterator<Item = (usize, char)> + '_ {
    let (mut is_escaped, mut in_class) = (false, false);
    text.char_indices().filter(move |&(_, character)| {
        if is_escaped {
            is_escaped = false;
            return false;
        }
        match character {
            '\\' => is_escaped = true,
            '[' => in_class = true,
            ']' => in_class = false,
            _ => {}
        }
        !in_class && character != '\\' && character != ']'
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literal_characters_of_ecma_262_are_literal() {
        for (given, expected) in [
            (r"^[\w-.]+@[\w-]+\.[a-z]{2,4}$", r"^[\w\-.]+@[\w\-]+\.[a-z]{2,4}$"),
            (r"[a&&b][[a][a~~b][+--]", r"[a\&\&b][\[a][a\~\~b][+-\-]"),
            (r"^{a}$", r"^\{a}$"),
            (r"a{3}b{2,}c{1,5}", r"a{3}b{2,}c{1,5}"),
            (r"\cA\0[\b]\<a\>", r"\x01\x00[\x08]<a>"),
            (r"\ud83d\ude00[\ud83d\ude00]\u00e9\u{41}", r"\u{1f600}[\u{1f600}]\u00e9\u{41}"),
            (r"\p{L}\x{41}\k{a}\.\{", r"\p{L}\x{41}\k{a}\.\{"),
            ("a.b[.]", r"a[^\n\r\u{2028}\u{2029}]b[.]"),
            ("(?s:.)", "(?s:.)"),
            (r"a\Z(?!b)", r"a\Z(?!b)"),
        ] {
            assert_eq!(translated(given), expected, "{given}");
        }
    }

    #[test]
    fn leading_look_aheads_are_patterns_of_their_own() {
        let split = |pattern| split_look_aheads(pattern);
        let parts =
            |patterns: &[&str], rest: &str| Some((patterns.iter().map(|&of| of.to_owned()).collect(), rest.to_owned()));
        assert_eq!(split(r"^(?=.*[A-Z)])(?=(a|\)))b{8,}$"), parts(&["^(?:.*[A-Z)])", r"^(?:(a|\)))"], "^b{8,}$"));
        for other in ["^a(?=b)", "(?=a)b", "^(?!a)b", "^(?=a)b|c", "^(?=a"] {
            assert_eq!(split(other), None, "{other}");
        }
    }
}
