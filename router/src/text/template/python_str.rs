//! Formats values as Python's `str` and `repr` do.

use std::sync::Arc;

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};

use super::python_json::python_float;

pub(super) fn str(value: &Value) -> String {
    let mut out = String::new();
    match value.as_str() {
        Some(text) => out.push_str(text),
        None => write(value, &mut out),
    }
    out
}

fn repr(value: &Value, out: &mut String) {
    match value.as_str() {
        Some(text) => quote(text, out),
        None if value.is_undefined() => out.push_str("Undefined"),
        None => write(value, out),
    }
}

/// `repr` of the value.
pub(super) fn repr_text(value: &Value) -> String {
    let mut out = String::new();
    repr(value, &mut out);
    out
}

fn write(value: &Value, out: &mut String) {
    match value.kind() {
        ValueKind::Undefined => {}
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&python_float(number)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::Seq | ValueKind::Iterable => sequence(value, out),
        ValueKind::Map => map(value, out),
        _ => out.push_str(&value.to_string()),
    }
}

fn sequence(value: &Value, out: &mut String) {
    let (open, close) = if value.downcast_object_ref::<Pair>().is_some() { ('(', ')') } else { ('[', ']') };
    out.push(open);
    for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
        if index > 0 {
            out.push_str(", ");
        }
        repr(&item, out);
    }
    out.push(close);
}

fn map(value: &Value, out: &mut String) {
    out.push('{');
    for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
        if index > 0 {
            out.push_str(", ");
        }
        repr(&key, out);
        out.push_str(": ");
        repr(&value.get_item(&key).unwrap_or_default(), out);
    }
    out.push('}');
}

fn quote(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            c => out.push_str(&match u32::from(c) {
                code @ ..0x100 => format!("\\x{code:02x}"),
                code @ ..0x1_0000 => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
        }
    }
    out.push(quote);
}

/// `str.isprintable`. Rust's `Debug` has the same rule, except that it escapes a combining mark at the start of a text.
fn is_printable(c: char) -> bool {
    c.is_ascii_graphic() || c == ' ' || format!("a{c}").escape_debug().skip(1).eq([c])
}

/// A pair of `items()` and similar functions. Python writes it in parentheses.
#[derive(Debug)]
pub(super) struct Pair(pub(super) Value, pub(super) Value);

impl Object for Pair {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_usize()? {
            0 => Some(self.0.clone()),
            1 => Some(self.1.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(2)
    }
}
