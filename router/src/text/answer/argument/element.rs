//! Arguments as elements. The tool's schema says which elements are text, objects and lists.

use serde_json::Value;

use super::super::call_item::is_space;
use super::super::format::Elements;
use super::super::value_kind::{Container, ValueKind, container, empty_value, field_schema, item_schema};
use super::{Read, escaped, len_before};

/// Longest tag.
const MAX_TAG_BYTES: usize = 1024;

pub(in crate::text::answer) struct ElementReader {
    elements: &'static Elements,
    /// Precedes the name in an end tag, and ends a text.
    end: String,
    /// The function's schema.
    parameters: Option<Value>,
    /// The elements that are open. The first one is the object of all arguments, which has no tags.
    open: Vec<Element>,
}

struct Element {
    schema: Option<Value>,
    content: Content,
}

enum Content {
    /// Not known yet.
    Unknown,
    /// Text, which is passed on as it arrives.
    Text,
    /// A value that is passed on as a whole.
    Scalar,
    Children {
        of: Container,
        is_first: bool,
    },
}

/// A tag at the start of a text.
enum Tag<'a> {
    Start {
        bytes: usize,
        name: &'a str,
    },
    End {
        bytes: usize,
    },
    /// The text ends inside a possible tag.
    Unfinished,
    None,
}

impl ElementReader {
    pub(super) fn new(elements: &'static Elements, parameters: Option<Value>) -> Self {
        Self { elements, end: format!("{}</", elements.before_tag), parameters, open: Vec::new() }
    }

    pub(super) fn push(&mut self, text: &str) -> Read {
        let mut read = Read { bytes: 0, json: String::new(), ends: false };
        if self.open.is_empty() {
            read.json.push('{');
            let content = Content::Children { of: Container::Object, is_first: true };
            self.open.push(Element { schema: self.parameters.clone(), content });
        }
        while self.step(&text[read.bytes..], &mut read) {}
        read
    }

    /// Returns false at the end, and where the next step takes more text.
    fn step(&mut self, text: &str, read: &mut Read) -> bool {
        match self.open.last().map(|element| &element.content) {
            None => false,
            Some(Content::Unknown) => self.begin(text, read),
            Some(Content::Text) => self.text(text, read),
            Some(Content::Scalar) => self.scalar(text, read),
            Some(Content::Children { .. }) => self.next_child(text, read),
        }
    }

    fn kind(&self) -> ValueKind {
        let (schema, root) = self.schemas();
        schema.map_or(ValueKind::Any, |schema| ValueKind::of(schema, root))
    }

    /// The schema of the innermost element, and the document to whose definitions it refers.
    fn schemas(&self) -> (Option<&Value>, &Value) {
        let schema = self.open.last().and_then(|element| element.schema.as_ref());
        (schema, self.parameters.as_ref().unwrap_or(&Value::Null))
    }

    fn set(&mut self, content: Content) {
        if let Some(element) = self.open.last_mut() {
            element.content = content;
        }
    }

    /// Finds out what the innermost element contains.
    fn begin(&mut self, text: &str, read: &mut Read) -> bool {
        let rest = text.trim_start_matches(is_space);
        let (schema, root) = self.schemas();
        match self.tag(rest) {
            Tag::Unfinished => return false,
            Tag::Start { name, .. } => {
                let of = container(schema, root, name == self.elements.item);
                read.json.push(if of == Container::List { '[' } else { '{' });
                self.set(Content::Children { of, is_first: true });
            }
            Tag::End { bytes } => {
                let space = text.len() - rest.len();
                read.json.push_str(&empty_value(schema, root, &text[..space]));
                read.bytes += space + bytes;
                self.open.pop();
            }
            Tag::None if self.kind() == ValueKind::Text => {
                read.json.push('"');
                self.set(Content::Text);
            }
            Tag::None => self.set(Content::Scalar),
        }
        true
    }

    fn text(&mut self, text: &str, read: &mut Read) -> bool {
        let end = text.find(&self.end);
        let len = end.unwrap_or_else(|| len_before(text, &self.end));
        read.json.push_str(&escaped(&text[..len]));
        read.bytes += len;
        match self.tag(&text[len..]) {
            Tag::End { bytes } => {
                read.json.push('"');
                read.bytes += bytes;
                self.open.pop();
                true
            }
            Tag::None if end.is_some() => self.end_all(read),
            _ => false,
        }
    }

    fn scalar(&mut self, text: &str, read: &mut Read) -> bool {
        let Some(end) = text.find(&self.end) else { return false };
        match self.tag(&text[end..]) {
            Tag::End { bytes } => {
                read.json.push_str(&self.kind().to_json(&text[..end]));
                read.bytes += end + bytes;
                self.open.pop();
                true
            }
            Tag::Unfinished => false,
            Tag::Start { .. } | Tag::None => {
                read.json.push_str("null");
                self.end_all(read)
            }
        }
    }

    /// The next element inside the innermost one.
    fn next_child(&mut self, text: &str, read: &mut Read) -> bool {
        let rest = text.trim_start_matches(is_space);
        let is_outermost = self.open.len() == 1;
        match self.tag(rest) {
            Tag::Unfinished => false,
            Tag::Start { bytes, name } => {
                read.bytes += text.len() - rest.len() + bytes;
                self.begin_child(name, read);
                true
            }
            Tag::End { bytes } if !is_outermost => {
                read.bytes += text.len() - rest.len() + bytes;
                self.close_bracket(read);
                true
            }
            Tag::End { .. } | Tag::None => self.end_all(read),
        }
    }

    fn begin_child(&mut self, name: &str, read: &mut Read) {
        let Some(Element { schema, content: Content::Children { of, is_first } }) = self.open.last_mut() else {
            return;
        };
        if !std::mem::replace(is_first, false) {
            read.json.push_str(", ");
        }
        if *of == Container::Object {
            read.json.push_str(&format!("{}: ", Value::from(name)));
        }
        let root = self.parameters.as_ref().unwrap_or(&Value::Null);
        let schema = schema.as_ref().and_then(|schema| match of {
            Container::Object => field_schema(schema, root, name),
            Container::List => item_schema(schema, root),
        });
        let schema = schema.cloned();
        self.open.push(Element { schema, content: Content::Unknown });
    }

    fn close_bracket(&mut self, read: &mut Read) {
        if let Some(Element { content: Content::Children { of, .. }, .. }) = self.open.pop() {
            read.json.push(if of == Container::List { ']' } else { '}' });
        }
    }

    /// Ends the arguments where no tag follows.
    fn end_all(&mut self, read: &mut Read) -> bool {
        if matches!(self.open.last(), Some(Element { content: Content::Text, .. })) {
            read.json.push('"');
        }
        while !self.open.is_empty() {
            self.close_bracket(read);
        }
        read.ends = true;
        false
    }

    fn tag<'a>(&self, text: &'a str) -> Tag<'a> {
        let before_tag = self.elements.before_tag;
        let Some(tag) = text.strip_prefix(before_tag) else {
            return if before_tag.starts_with(text) { Tag::Unfinished } else { Tag::None };
        };
        if "</".starts_with(tag) {
            return Tag::Unfinished;
        }
        if !tag.starts_with('<') {
            return Tag::None;
        }
        match tag.bytes().take(MAX_TAG_BYTES).position(|byte| byte == b'>') {
            Some(end) => {
                let (name, bytes) = (&tag[1..end], before_tag.len() + end + 1);
                if name.starts_with('/') { Tag::End { bytes } } else { Tag::Start { bytes, name } }
            }
            None if tag.len() < MAX_TAG_BYTES => Tag::Unfinished,
            None => Tag::None,
        }
    }
}
