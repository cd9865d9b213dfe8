//! Formats values as Python's `str` and `repr` do.

use minijinja::{Error, Value};

use super::python_json::python_float;
use super::python_value::{Sequence, SequenceKind, Type, invalid, number};

pub(super) fn str(value: &Value) -> Result<String, Error> {
    match value.as_str() {
        Some(text) => Ok(text.to_owned()),
        None => {
            let mut out = String::new();
            write(value, &mut out)?;
            Ok(out)
        }
    }
}

/// `repr` of the value.
pub(super) fn repr_text(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    repr(value, &mut out)?;
    Ok(out)
}

fn repr(value: &Value, out: &mut String) -> Result<(), Error> {
    match value.as_str() {
        Some(text) if value.is_safe() => {
            out.push_str("Markup(");
            quote(text, out);
            out.push(')');
        }
        Some(text) => quote(text, out),
        None if value.is_undefined() => out.push_str("Undefined"),
        None => write(value, out)?,
    }
    Ok(())
}

fn write(value: &Value, out: &mut String) -> Result<(), Error> {
    match Type::of(value) {
        Type::Undefined => {}
        Type::None => out.push_str("None"),
        Type::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        Type::Float => out.push_str(&python_float(number(value))),
        Type::Str | Type::Int => out.push_str(&value.to_string()),
        Type::List | Type::Tuple | Type::Range | Type::View => sequence(value, out)?,
        Type::Dict => map(value, out)?,
        Type::Generator | Type::Object => {
            return Err(invalid(
                "a generator, method, function or other object is written with its address in memory, which is not supported",
            ));
        }
    }
    Ok(())
}

fn sequence(value: &Value, out: &mut String) -> Result<(), Error> {
    let (open, close) =
        match value.downcast_object_ref::<Sequence>().map(|sequence| (&sequence.kind, &sequence.items[..])) {
            Some((SequenceKind::Range(text), _)) => {
                out.push_str(text);
                return Ok(());
            }
            Some((SequenceKind::Tuple, [_])) => ("(", ",)"),
            Some((SequenceKind::Tuple | SequenceKind::Group, _)) => ("(", ")"),
            Some((SequenceKind::View(name), _)) => {
                out.push_str(name);
                ("([", "])")
            }
            None => ("[", "]"),
        };
    out.push_str(open);
    for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
        if index > 0 {
            out.push_str(", ");
        }
        repr(&item, out)?;
    }
    out.push_str(close);
    Ok(())
}

fn map(value: &Value, out: &mut String) -> Result<(), Error> {
    out.push('{');
    for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
        if index > 0 {
            out.push_str(", ");
        }
        repr(&key, out)?;
        out.push_str(": ");
        repr(&value.get_item(&key).unwrap_or_default(), out)?;
    }
    out.push('}');
    Ok(())
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
pub(super) fn is_printable(c: char) -> bool {
    c.is_ascii_graphic() || c == ' ' || format!("a{c}").escape_debug().skip(1).eq([c])
}
