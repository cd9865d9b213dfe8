//! Arguments of a call, read from a growing text and passed on as JSON.

mod element;
mod literal;
mod tag;

use std::sync::Arc;

use element::ElementReader;
use literal::LiteralReader;
use tag::TagReader;

use super::format::Encoding;
use super::object_scan::ObjectScan;
use super::tool::Tool;

/// The next step of a reader.
pub(super) struct Read {
    /// The bytes of the text that are done with.
    pub(super) bytes: usize,
    /// The next fragment of the arguments.
    pub(super) json: String,
    /// Whether the arguments end here.
    pub(super) ends: bool,
}

/// Reads the arguments of one call.
pub(super) enum ArgumentReader {
    Json(ObjectScan),
    Tags(TagReader),
    Elements(ElementReader),
    Literals(LiteralReader),
}

impl ArgumentReader {
    /// `name`: of the function.
    pub(super) fn new(encoding: Encoding, tools: &Arc<[Tool]>, name: &str) -> Self {
        let parameters = || tools.iter().find(|tool| tool.name == name).and_then(|tool| tool.parameters.clone());
        match encoding {
            Encoding::Json => Self::Json(ObjectScan::default()),
            Encoding::Tags(tags) => Self::Tags(TagReader::new(tags, parameters())),
            Encoding::Elements(elements) => Self::Elements(ElementReader::new(elements, parameters())),
            Encoding::Literals(literals) => Self::Literals(LiteralReader::new(literals)),
        }
    }

    /// Reads the text that was not done with before, and more. Where `bytes` is less than the text's length and the
    /// arguments do not end, the rest takes more text.
    pub(super) fn push(&mut self, text: &str) -> Read {
        match self {
            Self::Json(scan) => {
                let (bytes, ends) = scan.push(text);
                Read { bytes, json: text[..bytes].to_owned(), ends }
            }
            Self::Tags(reader) => reader.push(text),
            Self::Elements(reader) => reader.push(text),
            Self::Literals(reader) => reader.push(text),
        }
    }
}

/// The text as the inside of a JSON string.
fn escaped(text: &str) -> String {
    let quoted = serde_json::Value::from(text).to_string();
    quoted[1..quoted.len() - 1].to_owned()
}

/// Length of the text without a possible start of `marker` at its end.
pub(super) fn len_before(text: &str, marker: &str) -> usize {
    let longest = (marker.len() - 1).min(text.len());
    let begins = |start: &usize| text.is_char_boundary(*start) && marker.starts_with(&text[*start..]);
    (text.len() - longest..text.len()).find(begins).unwrap_or(text.len())
}
