//! The items of a tool call's syntax, and matching of a growing text against them.

use super::object_scan::ObjectScan;

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
    /// `functions.NAME:INDEX`, which is the call's id.
    NameInId,
    /// Letters and digits, which are the call's id: as many as the model writes.
    Id(usize),
    /// Digits.
    Index,
    /// A JSON string of digits.
    QuotedIndex,
    /// Fields of a JSON object up to the one with this key, which may be missing. Each ends with a comma.
    Fields(&'static str),
    /// Fields of a JSON object, which may be missing. Each starts with a comma.
    MoreFields,
    /// A JSON object. Matching stops before its brace.
    Object,
}

/// INVARIANT: a result other than `Unfinished` does not change when the text grows.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Match {
    /// The items match the first `bytes` bytes.
    Full { bytes: usize, call: CallHead },
    /// The text ends inside the items.
    Unfinished,
    /// The text does not match.
    Not,
}

/// What the items before the arguments say.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct CallHead {
    /// Empty if no item is a name.
    pub(super) name: String,
    /// The id, if the model writes it.
    pub(super) id: Option<String>,
}

/// Whether names may contain the character in every format.
pub(super) fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_-.:/".contains(c)
}

/// Matches the items at the start of the text. JSON whitespace is allowed before each item.
pub(super) fn match_items(items: &[Item], text: &str) -> Match {
    let mut rest = text;
    let mut call = CallHead::default();
    for item in items {
        rest = rest.trim_start_matches(is_space);
        let found = match *item {
            Item::Marker(marker) => starts(rest, marker),
            Item::Hint(marker) => starts(rest, marker).or_nothing(),
            Item::Object => starts(rest, "{").map(|_| 0),
            Item::QuotedName => quoted(rest, &mut call.name),
            Item::BareName => run_of(rest, is_plain).map(|end| {
                rest[..end].clone_into(&mut call.name);
                end
            }),
            Item::NameInId => run_of(rest, is_plain).map(|end| {
                let id = &rest[..end];
                let name = id.strip_prefix("functions.").unwrap_or(id);
                call.name = name.rsplit_once(':').map_or(name, |(name, _)| name).to_owned();
                call.id = Some(id.to_owned());
                end
            }),
            Item::Id(_) => run_of(rest, |c| c.is_ascii_alphanumeric()).map(|end| {
                call.id = Some(rest[..end].to_owned());
                end
            }),
            Item::Index => run_of(rest, |c| c.is_ascii_digit()),
            Item::QuotedIndex => quoted(rest, &mut String::new()),
            Item::Fields(key) => fields_before(rest, key),
            Item::MoreFields => more_fields(rest),
        };
        match found {
            Found::Bytes(bytes) => rest = &rest[bytes..],
            Found::Unfinished if text.len() <= MAX_HEAD_BYTES => return Match::Unfinished,
            Found::Unfinished | Found::Not => return Match::Not,
        }
    }
    let bytes = text.len() - rest.len();
    if bytes > MAX_HEAD_BYTES { Match::Not } else { Match::Full { bytes, call } }
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

    /// Continues with the text after what was found.
    fn then(self, text: &str, next: impl FnOnce(&str) -> Self) -> Self {
        let Self::Bytes(bytes) = self else { return self };
        let rest = text[bytes..].trim_start_matches(is_space);
        next(rest).map(|more| text.len() - rest.len() + more)
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

/// Length of a JSON string, which is decoded.
fn quoted(text: &str, decoded: &mut String) -> Found {
    let Found::Bytes(_) = starts(text, "\"") else { return starts(text, "\"") };
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate().skip(1) {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => {
                return serde_json::from_str(&text[..=at]).map_or(Found::Not, |string| {
                    *decoded = string;
                    Found::Bytes(at + 1)
                });
            }
            _ => {}
        }
    }
    Found::Unfinished
}

/// Length of the longest start of the text with such characters, which must be followed by another character.
fn run_of(text: &str, is: impl Fn(char) -> bool) -> Found {
    match text.find(|c| !is(c)) {
        None => Found::Unfinished,
        Some(0) => Found::Not,
        Some(end) => Found::Bytes(end),
    }
}

/// Length of a JSON value, which is not validated.
fn value(text: &str) -> Found {
    match text.chars().next() {
        None => Found::Unfinished,
        Some('"') => quoted(text, &mut String::new()),
        Some('{' | '[') => match ObjectScan::default().push(text) {
            (bytes, true) => Found::Bytes(bytes),
            (_, false) => Found::Unfinished,
        },
        Some(_) => run_of(text, |c| c.is_ascii_alphanumeric() || "+-.".contains(c)),
    }
}

fn field(text: &str) -> Found {
    quoted(text, &mut String::new()).then(text, |rest| starts(rest, ":").then(rest, value))
}

fn fields_before(text: &str, key: &str) -> Found {
    let mut rest = text;
    loop {
        match starts(rest, key) {
            Found::Not => {}
            Found::Unfinished => return Found::Unfinished,
            Found::Bytes(_) => return Found::Bytes(text.len() - rest.len()),
        }
        match field(rest).then(rest, |rest| starts(rest, ",")) {
            Found::Bytes(bytes) => rest = rest[bytes..].trim_start_matches(is_space),
            // The next item then fails at the same place.
            Found::Not => return Found::Bytes(text.len() - rest.len()),
            Found::Unfinished => return Found::Unfinished,
        }
    }
}

fn more_fields(text: &str) -> Found {
    let mut rest = text;
    loop {
        match starts(rest, ",").then(rest, field) {
            Found::Bytes(bytes) => rest = rest[bytes..].trim_start_matches(is_space),
            Found::Not => return Found::Bytes(text.len() - rest.len()),
            Found::Unfinished => return Found::Unfinished,
        }
    }
}
