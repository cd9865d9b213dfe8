//! Arguments between markers.

use serde_json::Value;

use super::super::call_item::is_space;
use super::super::format::{Tags, Types};
use super::super::value_kind::ValueKind;
use super::{Read, escaped, len_before};

/// Longest key with its markers.
const MAX_KEY_BYTES: usize = 1024;

pub(in crate::text::answer) struct TagReader {
    tags: &'static Tags,
    /// The function's schema.
    parameters: Option<Value>,
    has_begun: bool,
    num_arguments: usize,
    value: Option<OpenValue>,
}

struct OpenValue {
    kind: ValueKind,
    /// Whether the line end before the value has been dropped.
    has_begun: bool,
}

enum Key<'a> {
    Found { bytes: usize, key: &'a str, types: Types },
    Unfinished,
    None,
}

impl TagReader {
    pub(super) fn new(tags: &'static Tags, parameters: Option<Value>) -> Self {
        Self { tags, parameters, has_begun: false, num_arguments: 0, value: None }
    }

    pub(super) fn push(&mut self, text: &str) -> Read {
        let mut read = Read { bytes: 0, json: String::new(), ends: false };
        if !std::mem::replace(&mut self.has_begun, true) {
            read.json.push('{');
        }
        while self.step(&text[read.bytes..], &mut read) {}
        read
    }

    /// Returns false at the end, and where the next step takes more text.
    fn step(&mut self, text: &str, read: &mut Read) -> bool {
        let Some(value) = &mut self.value else { return self.next_argument(text, read) };
        let (before, text) = (text.len(), value.begin(text, self.tags.own_lines));
        read.bytes += before - text.len();
        let end = text.find(self.tags.after_value);
        let line_end = if self.tags.own_lines { "\n" } else { "" };
        if value.kind == ValueKind::Text && value.has_begun {
            let len = end.unwrap_or_else(|| len_before(text, self.tags.after_value));
            let shown = text[..len].strip_suffix(line_end).unwrap_or(&text[..len]);
            read.json.push_str(&escaped(shown));
            read.bytes += shown.len();
            if end.is_none() {
                return false;
            }
            read.json.push('"');
            read.bytes += len - shown.len();
        } else {
            let Some(end) = end else { return false };
            let shown = text[..end].strip_suffix(line_end).unwrap_or(&text[..end]);
            read.json.push_str(&value.kind.to_json(shown));
            read.bytes += end;
        }
        read.bytes += self.tags.after_value.len();
        self.value = None;
        true
    }

    fn next_argument(&mut self, text: &str, read: &mut Read) -> bool {
        match self.key(text) {
            Key::Found { bytes, key, types } => {
                let kind = match types {
                    Types::BySchema => ValueKind::of_argument(self.parameters.as_ref(), key),
                    Types::Text => ValueKind::Text,
                    _ => ValueKind::Any,
                };
                let separator = if self.num_arguments == 0 { "" } else { ", " };
                let quote = if kind == ValueKind::Text { "\"" } else { "" };
                read.json.push_str(&format!("{separator}{}: {quote}", Value::from(key)));
                read.bytes += bytes;
                self.num_arguments += 1;
                self.value = Some(OpenValue { kind, has_begun: false });
                true
            }
            Key::Unfinished => false,
            Key::None => {
                read.json.push('}');
                read.ends = true;
                false
            }
        }
    }

    fn key<'a>(&self, text: &'a str) -> Key<'a> {
        let Tags { before_key, after_key, before_value, .. } = self.tags;
        let unfinished = if text.len() > MAX_KEY_BYTES { Key::None } else { Key::Unfinished };
        let marked = text.trim_start_matches(is_space);
        let Some(rest) = marked.strip_prefix(before_key) else {
            return if before_key.starts_with(marked) { unfinished } else { Key::None };
        };
        let first = after_key.iter().find_map(|(marker, _)| marker.chars().next());
        let Some(end) = first.and_then(|first| rest.find(first)) else { return unfinished };
        let (key, rest) = rest.split_at(end);
        let Some((marker, types)) = after_key.iter().find(|(marker, _)| rest.starts_with(marker)) else {
            let may_follow = after_key.iter().any(|(marker, _)| marker.starts_with(rest));
            return if may_follow { unfinished } else { Key::None };
        };
        let rest = &rest[marker.len()..];
        let value = if before_value.is_empty() { rest } else { rest.trim_start_matches(is_space) };
        match value.strip_prefix(before_value) {
            Some(value) => Key::Found { bytes: text.len() - value.len(), key: key.trim(), types: *types },
            None if before_value.starts_with(value) => unfinished,
            None => Key::None,
        }
    }
}

impl OpenValue {
    /// The text without the line end that precedes the value.
    fn begin<'a>(&mut self, text: &'a str, own_lines: bool) -> &'a str {
        if text.is_empty() || std::mem::replace(&mut self.has_begun, true) || !own_lines {
            return text;
        }
        text.strip_prefix('\n').unwrap_or(text)
    }
}
