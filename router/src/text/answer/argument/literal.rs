//! Arguments as literals of Python or of Gemma's notation, rewritten as JSON.

use super::super::call_item::is_space;
use super::super::format::Literals;
use super::{Read, escaped, len_before};

/// Longest word that the reader holds back, such as a number or `False`.
const MAX_WORD_BYTES: usize = 1024;

pub(in crate::text::answer) struct LiteralReader {
    literals: &'static Literals,
    /// The brackets that are open, as the characters that close them.
    open: Vec<char>,
    text: Option<Quote>,
    /// Whether the next value follows a comma that is not written yet.
    after_comma: bool,
    /// Whether a key comes next.
    at_key: bool,
}

/// The end of a text.
#[derive(Clone, Copy)]
enum Quote {
    Marker(&'static str),
    Python(char),
}

impl LiteralReader {
    pub(super) fn new(literals: &'static Literals) -> Self {
        Self { literals, open: Vec::new(), text: None, after_comma: false, at_key: true }
    }

    pub(super) fn push(&mut self, text: &str) -> Read {
        let mut read = Read { bytes: 0, json: String::new(), ends: false };
        if self.open.is_empty() {
            self.open.push(self.literals.close);
            read.json.push('{');
        }
        while !read.ends {
            let rest = &text[read.bytes..];
            let step = match self.text {
                Some(quote) => self.inside_text(quote, rest, &mut read.json),
                None => self.next(rest, &mut read),
            };
            match step {
                Some(bytes) => read.bytes += bytes,
                None => break,
            }
        }
        read
    }

    /// The number of bytes read; `None` if the next step takes more text.
    fn next(&mut self, text: &str, read: &mut Read) -> Option<usize> {
        let rest = text.trim_start_matches(is_space);
        let space = text.len() - rest.len();
        let first = rest.chars().next()?;
        let json = &mut read.json;
        let bytes = match first {
            ',' => {
                self.after_comma = true;
                self.at_key = self.is_object();
                1
            }
            ')' | ']' | '}' => {
                self.after_comma = false;
                self.open.pop();
                json.push(if self.open.is_empty() || first == '}' { '}' } else { ']' });
                read.ends = self.open.is_empty();
                self.at_key = false;
                1
            }
            ':' | '=' => {
                json.push_str(": ");
                self.at_key = false;
                1
            }
            '[' | '(' | '{' => {
                self.separate(json);
                self.at_key = first == '{';
                self.open.push(if self.at_key { '}' } else { ']' });
                json.push(if self.at_key { '{' } else { '[' });
                1
            }
            _ => {
                let (quote, bytes) = self.quote(rest)?;
                match quote {
                    Some(quote) => {
                        self.separate(json);
                        json.push('"');
                        self.text = Some(quote);
                        bytes
                    }
                    None => self.word(rest, json)?,
                }
            }
        };
        Some(space + bytes)
    }

    fn is_object(&self) -> bool {
        self.open.len() == 1 || self.open.last() == Some(&'}')
    }

    fn separate(&mut self, json: &mut String) {
        if std::mem::take(&mut self.after_comma) {
            json.push_str(", ");
        }
    }

    /// The quote at the start of the text and its length. The outer `None`: that takes more text.
    fn quote(&self, text: &str) -> Option<(Option<Quote>, usize)> {
        match self.literals.quote {
            Some(marker) if text.starts_with(marker) => Some((Some(Quote::Marker(marker)), marker.len())),
            Some(marker) if marker.starts_with(text) => None,
            _ => {
                let quote = text.chars().next().filter(|c| matches!(c, '"' | '\'')).map(Quote::Python);
                Some((quote, 1))
            }
        }
    }

    /// A key without quotes, a number, or the name of a constant. Another word is text.
    fn word(&mut self, text: &str, json: &mut String) -> Option<usize> {
        let after_key = if self.open.len() == 1 { self.literals.after_key } else { ':' };
        let ends = |c: char| {
            if self.at_key { c == after_key } else { is_space(c) || ",]})".contains(c) }
        };
        let end = match text.char_indices().skip(1).find(|&(_, c)| ends(c)) {
            Some((end, _)) => end,
            None if text.len() > MAX_WORD_BYTES => text.len(),
            None => return None,
        };
        let word = text[..end].trim_end();
        self.separate(json);
        match word {
            "True" | "true" if !self.at_key => json.push_str("true"),
            "False" | "false" if !self.at_key => json.push_str("false"),
            "None" | "null" if !self.at_key => json.push_str("null"),
            _ if !self.at_key && serde_json::from_str::<serde_json::Number>(word).is_ok() => json.push_str(word),
            _ => json.push_str(&serde_json::Value::from(word).to_string()),
        }
        Some(end)
    }

    fn inside_text(&mut self, quote: Quote, text: &str, json: &mut String) -> Option<usize> {
        let bytes = match quote {
            Quote::Marker(marker) => match text.find(marker) {
                Some(end) => {
                    json.push_str(&escaped(&text[..end]));
                    self.text = None;
                    json.push('"');
                    end + marker.len()
                }
                None => {
                    let len = len_before(text, marker);
                    json.push_str(&escaped(&text[..len]));
                    len
                }
            },
            Quote::Python(quote) => match text.find(['\\', quote]) {
                None => {
                    json.push_str(&escaped(text));
                    text.len()
                }
                Some(0) if text.starts_with(quote) => {
                    self.text = None;
                    json.push('"');
                    1
                }
                Some(0) => {
                    let (c, bytes) = escape(text)?;
                    match c {
                        Some(c) => json.push_str(&escaped(c.encode_utf8(&mut [0; 4]))),
                        None => json.push_str(&escaped(&text[..bytes])),
                    }
                    bytes
                }
                Some(end) => {
                    json.push_str(&escaped(&text[..end]));
                    end
                }
            },
        };
        (bytes > 0).then_some(bytes)
    }
}

/// The character of Python's (or JSON's) escape at the start of the text, `None` if it stands for itself, and its length.
/// The outer `None`: that takes more text.
fn escape(text: &str) -> Option<(Option<char>, usize)> {
    let kind = text[1..].chars().next()?;
    let num_digits = match kind {
        'x' => 2,
        'u' => 4,
        'U' => 8,
        _ => {
            let c = match kind {
                'n' => Some('\n'),
                't' => Some('\t'),
                'r' => Some('\r'),
                'b' => Some('\u{8}'),
                'f' => Some('\u{c}'),
                '\\' | '\'' | '"' | '/' => Some(kind),
                _ => None,
            };
            return Some((c, 1 + kind.len_utf8()));
        }
    };
    let unit = |text: &str, num_digits: usize| u32::from_str_radix(text.get(2..2 + num_digits)?, 16).ok();
    let end = 2 + num_digits;
    if text.len() < end && text[2..].chars().all(|c| c.is_ascii_hexdigit()) {
        return None;
    }
    let code = unit(text, num_digits);
    // JSON writes characters beyond the first 65,536 as two escapes.
    if let Some(high @ 0xD800..0xDC00) = code {
        let rest = &text[end..];
        if rest.len() < 6 && ("\\u".starts_with(rest) || rest.starts_with("\\u")) {
            return None;
        }
        if let Some(low @ 0xDC00..0xE000) = rest.strip_prefix("\\u").and_then(|_| unit(rest, 4)) {
            return Some((char::from_u32(0x1_0000 + ((high - 0xD800) << 10) + (low - 0xDC00)), end + 6));
        }
    }
    match code.map(char::from_u32) {
        Some(c) => Some((Some(c.unwrap_or('\u{FFFD}')), end)),
        None => Some((None, 2)),
    }
}
