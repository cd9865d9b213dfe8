//! Jinja's filters over texts that minijinja lacks or that differ from jinja's.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{Kwargs, Object, ObjectRepr, Rest, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::concat::CONCAT;
use super::{filter, python_str};

/// jinja's policy `truncate.leeway`.
const LEEWAY: usize = 5;

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("indent", indent);
    environment.add_filter("center", center);
    environment.add_filter("truncate", truncate);
    environment.add_filter("replace", replace);
    environment.add_filter("format", format);
    environment.add_function(CONCAT, |values: Rest<Value>| values.iter().map(python_str::str).collect::<String>());
    environment.add_function("joiner", |separator: Option<String>| {
        Value::from_object(Joiner {
            separator: separator.unwrap_or_else(|| ", ".to_owned()),
            calls: AtomicUsize::new(0),
        })
    });
    environment.add_function("cycler", cycler);
}

fn indent(
    value: &Value,
    width: Option<&Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<String, Error> {
    let width = width.cloned().or(options.get("width")?).unwrap_or_else(|| Value::from(4));
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let indentation = match width.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(usize::try_from(width)?),
    };
    let text = python_str::str(value);
    let lines = text.split('\n').enumerate().map(|(index, line)| {
        let is_indented = if index == 0 { first } else { blank || !line.is_empty() };
        if is_indented { format!("{indentation}{line}") } else { line.to_owned() }
    });
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

/// Odd space is on the left if the width is odd, too, as in Python.
fn center(value: &Value, width: Option<usize>) -> String {
    let text = python_str::str(value);
    let width = width.unwrap_or(80);
    let missing = width.saturating_sub(text.chars().count());
    let left = missing / 2 + (missing & width & 1);
    format!("{}{text}{}", " ".repeat(left), " ".repeat(missing - left))
}

fn truncate(value: &Value, arguments: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let (length, cuts_words, end, leeway): (Option<usize>, Option<bool>, Option<String>, Option<usize>) =
        from_args(&arguments)?;
    let length = length.or(options.get("length")?).unwrap_or(255);
    let cuts_words = cuts_words.or(options.get("killwords")?).unwrap_or(false);
    let end = end.or(options.get("end")?).unwrap_or_else(|| "...".to_owned());
    let leeway = leeway.or(options.get("leeway")?).unwrap_or(LEEWAY);
    options.assert_all_used()?;
    let text = python_str::str(value);
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        let message = format!("truncate: the length {length} is less than that of its end, {end:?}");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    };
    let cut: String = text.chars().take(kept).collect();
    let whole = if cuts_words { &cut } else { cut.rsplit_once(' ').map_or(&*cut, |(words, _)| words) };
    Ok(format!("{whole}{end}"))
}

fn replace(value: &Value, old: &Value, new: &Value, count: Option<i64>, options: Kwargs) -> Result<String, Error> {
    let count = count.or(options.get("count")?).and_then(|count| usize::try_from(count).ok());
    options.assert_all_used()?;
    let (text, old, new) = (python_str::str(value), python_str::str(old), python_str::str(new));
    Ok(match count {
        Some(count) => text.replacen(&old, &new, count),
        None => text.replace(&old, &new),
    })
}

/// Values of `%s` and `%r` are written as Python writes them.
fn format(state: &State<'_, '_>, pattern: &Value, values: Rest<Value>) -> Result<Value, Error> {
    let mut conversions = Vec::new();
    let text = python_str::str(pattern);
    let mut rest = text.as_str();
    while let Some((_, after)) = rest.split_once('%') {
        let end = after.find(|c: char| c.is_ascii_alphabetic() || "%(".contains(c)).unwrap_or(after.len());
        let kind = after[end..].chars().next();
        if kind != Some('%') {
            conversions.push(kind);
        }
        rest = after.get(end + 1..).unwrap_or_default();
    }
    let mut pattern = text.clone();
    let mut converted = Vec::new();
    for (index, value) in values.iter().enumerate() {
        converted.push(match conversions.get(index).copied().flatten() {
            Some('s') => Value::from(python_str::str(value)),
            Some('r') => Value::from(python_str::repr_text(value)),
            Some('d' | 'i' | 'u') => filter::int(value, None),
            _ => value.clone(),
        });
    }
    if conversions.contains(&Some('r')) {
        pattern = pattern.replace("%r", "%s");
    }
    minijinja::filters::format(state, &Value::from(pattern), Rest(converted))
}

/// Returns nothing on its first call, and the separator on all others.
#[derive(Debug)]
struct Joiner {
    separator: String,
    calls: AtomicUsize,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        let () = from_args(arguments)?;
        let is_first = self.calls.fetch_add(1, Ordering::Relaxed) == 0;
        Ok(Value::from(if is_first { "" } else { &self.separator }))
    }
}

/// Returns its items in turn, again and again.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    position: AtomicUsize,
}

fn cycler(items: Rest<Value>) -> Result<Value, Error> {
    if items.is_empty() {
        return Err(Error::new(ErrorKind::MissingArgument, "cycler: at least one item has to be provided"));
    }
    Ok(Value::from_object(Cycler { items: items.0, position: AtomicUsize::new(0) }))
}

impl Cycler {
    fn current(&self) -> Value {
        self.items[self.position.load(Ordering::Relaxed) % self.items.len()].clone()
    }
}

impl Object for Cycler {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str() == Some("current")).then(|| self.current())
    }

    fn call_method(self: &Arc<Self>, _: &State<'_, '_>, method: &str, arguments: &[Value]) -> Result<Value, Error> {
        let () = from_args(arguments)?;
        match method {
            "next" => {
                let item = self.current();
                self.position.fetch_add(1, Ordering::Relaxed);
                Ok(item)
            }
            "reset" => {
                self.position.store(0, Ordering::Relaxed);
                Ok(Value::from(()))
            }
            _ => Err(Error::from(ErrorKind::UnknownMethod)),
        }
    }
}
