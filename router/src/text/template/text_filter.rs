//! Jinja's filters over texts that minijinja lacks or that differ from jinja's.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{Kwargs, Object, ObjectRepr, Rest, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::python_value::{Type, invalid};
use super::{operator, python_format, python_str, python_text};

/// jinja's policy `truncate.leeway`.
const LEEWAY: usize = 5;

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("string", |value: &Value| mapped(value, str::to_owned));
    environment.add_filter("upper", |value: &Value| mapped(value, str::to_uppercase));
    environment.add_filter("lower", |value: &Value| mapped(value, str::to_lowercase));
    environment.add_filter("capitalize", |value: &Value| mapped(value, python_text::capitalized));
    environment.add_filter("title", |value: &Value| mapped(value, title));
    environment
        .add_filter("trim", |value: &Value, set: Option<&str>| mapped(value, |text| python_text::strip(text, set)));
    environment.add_filter("wordcount", |value: &Value| {
        let is_in_word = |c: char| c.is_alphanumeric() || c == '_';
        python_str::str(value).map(|text| text.split(|c| !is_in_word(c)).filter(|word| !word.is_empty()).count())
    });
    environment.add_filter("safe", |value: &Value| python_str::str(value).map(Value::from_safe_string));
    for name in ["escape", "e"] {
        environment.add_filter(name, |value: &Value| operator::escaped(value).map(Value::from_safe_string));
    }
    environment.add_filter("indent", indent);
    environment.add_filter("center", |value: &Value, width: Option<usize>| {
        mapped(value, |text| python_text::center(text, width.unwrap_or(80), ' '))
    });
    environment.add_filter("truncate", truncate);
    environment.add_filter("replace", replace);
    environment.add_filter("format", |pattern: &Value, values: Rest<Value>| {
        python_format::format(&python_str::str(pattern)?, &values, true)
    });
    for name in ["lower", "upper"] {
        environment.add_test(name, move |value: &Value| {
            python_str::str(value).map(|text| python_text::has_only(&text, &format!("is{name}")))
        });
    }
    environment.add_function("joiner", |separator: Option<String>| {
        Value::from_object(Joiner {
            separator: separator.unwrap_or_else(|| ", ".to_owned()),
            calls: AtomicUsize::new(0),
        })
    });
    environment.add_function("cycler", cycler);
}

/// Applies a function to the value's text, which stays marked safe if it is.
fn mapped(value: &Value, function: impl Fn(&str) -> String) -> Result<Value, Error> {
    Ok(operator::text(&function(&python_str::str(value)?), value.is_safe()))
}

/// The text of a value that must be a text.
fn text_of<'a>(filter: &str, value: &'a Value) -> Result<&'a str, Error> {
    value.as_str().ok_or_else(|| invalid(format!("{filter} takes no value of type {}", Type::of(value).name())))
}

/// Words start after spaces and opening brackets.
fn title(text: &str) -> String {
    let is_boundary = |c: char| c.is_whitespace() || "-({[<".contains(c);
    let mut out = String::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|c| is_boundary(c) != is_boundary(first)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        let (head, tail) = word.split_at(first.len_utf8());
        out.extend([head.to_uppercase(), tail.to_lowercase()]);
        rest = after;
    }
    out
}

fn indent(
    value: &Value,
    width: Option<&Value>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let width = width.cloned().or(options.get("width")?).unwrap_or_else(|| Value::from(4));
    let first = first.or(options.get("first")?).unwrap_or(false);
    let blank = blank.or(options.get("blank")?).unwrap_or(false);
    options.assert_all_used()?;
    let indentation = match width.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(usize::try_from(width)?),
    };
    let text = text_of("indent", value)?.to_owned() + "\n";
    let lines = python_text::lines(&text, false).into_iter().enumerate().map(|(index, line)| {
        let is_indented = if index == 0 { first } else { blank || !line.is_empty() };
        if is_indented { format!("{indentation}{line}") } else { line.to_owned() }
    });
    Ok(operator::text(&lines.collect::<Vec<_>>().join("\n"), value.is_safe()))
}

fn truncate(value: &Value, arguments: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let (length, cuts_words, end, leeway): (Option<usize>, Option<bool>, Option<String>, Option<usize>) =
        from_args(&arguments)?;
    let length = length.or(options.get("length")?).unwrap_or(255);
    let cuts_words = cuts_words.or(options.get("killwords")?).unwrap_or(false);
    let end = end.or(options.get("end")?).unwrap_or_else(|| "...".to_owned());
    let leeway = leeway.or(options.get("leeway")?).unwrap_or(LEEWAY);
    options.assert_all_used()?;
    let text = text_of("truncate", value)?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(value.clone());
    }
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        return Err(invalid(format!("truncate: the length {length} is less than that of its end, {end:?}")));
    };
    let cut: String = text.chars().take(kept).collect();
    let whole = if cuts_words { &cut } else { cut.rsplit_once(' ').map_or(&*cut, |(words, _)| words) };
    Ok(operator::text(&format!("{whole}{end}"), value.is_safe()))
}

fn replace(value: &Value, old: &Value, new: &Value, count: Option<i64>, options: Kwargs) -> Result<String, Error> {
    let count = count.or(options.get("count")?).and_then(|count| usize::try_from(count).ok());
    options.assert_all_used()?;
    let (text, old, new) = (python_str::str(value)?, python_str::str(old)?, python_str::str(new)?);
    Ok(match count {
        Some(count) => text.replacen(&old, &new, count),
        None => text.replace(&old, &new),
    })
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
