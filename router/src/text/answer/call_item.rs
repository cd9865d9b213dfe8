//! The items of a tool call's syntax, and matching of a growing text against them.

/// Longest text before the arguments of a call. Bounds the text that the parser holds back.
const MAX_HEAD_BYTES: usize = 4096;

/// An item of a tool call's syntax.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Item {
    /// This text.
    Marker(&'static str),
    /// This text, which may be missing.
    Hint(&'static str),
    /// The name as a JSON string.
    QuotedName,
    /// The name without quotes, of characters for which [`is_plain`] holds.
    BareName,
    /// A JSON object. Matching stops before its brace.
    Arguments,
}

/// INVARIANT: a result other than `Unfinished` does not change when the text grows.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Match {
    /// The items match the first `bytes` bytes. `name` is empty if no item is a name.
    Full { bytes: usize, name: String },
    /// The text ends inside the items.
    Unfinished,
    /// The text does not match.
    Not,
}

/// Whether names may contain the character in every format.
pub(super) fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_-.:/".contains(c)
}

/// Matches the items at the start of the text. JSON whitespace is allowed before each item.
pub(super) fn match_items(items: &[Item], text: &str) -> Match {
    let mut rest = text;
    let mut name = String::new();
    for item in items {
        rest = rest.trim_start_matches(is_space);
        let found = match *item {
            Item::Marker(marker) => starts(rest, marker),
            Item::Hint(marker) => starts(rest, marker).or_nothing(),
            Item::Arguments => starts(rest, "{").map(|_| 0),
            Item::QuotedName => quoted(rest, &mut name),
            Item::BareName => bare(rest, &mut name),
        };
        match found {
            Found::Bytes(bytes) => rest = &rest[bytes..],
            Found::Unfinished if text.len() <= MAX_HEAD_BYTES => return Match::Unfinished,
            Found::Unfinished | Found::Not => return Match::Not,
        }
    }
    let bytes = text.len() - rest.len();
    if bytes > MAX_HEAD_BYTES { Match::Not } else { Match::Full { bytes, name } }
}

/// JSON's whitespace.
pub(super) fn is_space(c: char) -> bool {
    matches!(c, ' ' | '\n' | '\r' | '\t')
}

enum Found {
    Bytes(usize),
    Unfinished,
    Not,
}

impl Found {
    fn or_nothing(self) -> Self {
        if matches!(self, Self::Not) { Self::Bytes(0) } else { self }
    }

    fn map(self, change: impl FnOnce(usize) -> usize) -> Self {
        if let Self::Bytes(bytes) = self { Self::Bytes(change(bytes)) } else { self }
    }
}

fn starts(text: &str, marker: &str) -> Found {
    if text.starts_with(marker) {
        Found::Bytes(marker.len())
    } else if marker.starts_with(text) {
        Found::Unfinished
    } else {
        Found::Not
    }
}

fn quoted(text: &str, name: &mut String) -> Found {
    let Found::Bytes(_) = starts(text, "\"") else { return starts(text, "\"") };
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => {
                return match serde_json::from_str(&text[..=at]) {
                    Ok(decoded) => {
                        *name = decoded;
                        Found::Bytes(at + 1)
                    }
                    Err(_) => Found::Not,
                };
            }
            _ => {}
        }
    }
    Found::Unfinished
}

fn bare(text: &str, name: &mut String) -> Found {
    match text.find(|c| !is_plain(c)) {
        None => Found::Unfinished,
        Some(0) => Found::Not,
        Some(end) => {
            text[..end].clone_into(name);
            Found::Bytes(end)
        }
    }
}
