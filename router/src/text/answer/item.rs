//! The items of which a call is written, and how a text is matched against them as it arrives.

/// A text that has not become a call within so many bytes does not become one: what waits for more stays small.
const MAX_HEAD_BYTES: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Item {
    Mark(&'static str),
    /// May be missing.
    Hint(&'static str),
    /// A JSON string.
    QuotedName,
    /// Without quotes: see [`is_plain`].
    BareName,
    /// A JSON object. Matches where it begins.
    Arguments,
}

/// INVARIANT: an answer other than `Unfinished` stays the same however the text goes on.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Match {
    /// So many bytes are the items'; `name` is empty where the items have none.
    Full {
        bytes: usize,
        name: String,
    },
    /// The text ends within the items.
    Unfinished,
    Not,
}

/// A character that names have in every format.
pub(super) fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_-.:/".contains(c)
}

/// Matches the items from the start of the text; JSON whitespace may stand before each.
pub(super) fn match_items(items: &[Item], text: &str) -> Match {
    let mut rest = text;
    let mut name = String::new();
    for item in items {
        rest = rest.trim_start_matches(is_space);
        let found = match *item {
            Item::Mark(mark) => starts(rest, mark),
            Item::Hint(mark) => starts(rest, mark).or_nothing(),
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

fn starts(text: &str, mark: &str) -> Found {
    if text.starts_with(mark) {
        Found::Bytes(mark.len())
    } else if mark.starts_with(text) {
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
