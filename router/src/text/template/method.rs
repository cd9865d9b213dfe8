//! Methods of Python's `str`, `dict` and `list` that leave their object unchanged, which are those that jinja's sandbox
//! allows. minijinja-contrib has most of them; here are those that it lacks or that differ from Python's.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::python_str::{self, Pair};

pub(super) fn call(state: &State<'_, '_>, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let result = match value.kind() {
        ValueKind::String => call_on_string(value.as_str().unwrap_or_default(), method, arguments),
        ValueKind::Map => call_on_map(value, method, arguments),
        ValueKind::Seq | ValueKind::Iterable => call_on_list(value, method, arguments),
        _ => Ok(None),
    };
    match result? {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// `None` if the method is not defined here.
fn call_on_string(text: &str, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    let argument = || from_args::<(&str,)>(arguments).map(|(argument,)| argument);
    let result = match method {
        "casefold" => Value::from(text.to_lowercase()),
        "swapcase" => Value::from(swap_case(text)),
        "removeprefix" => Value::from(text.strip_prefix(argument()?).unwrap_or(text)),
        "removesuffix" => Value::from(text.strip_suffix(argument()?).unwrap_or(text)),
        "split" | "rsplit" => split(text, arguments, method == "rsplit")?,
        "partition" | "rpartition" => partition(text, argument()?, method == "rpartition")?,
        "splitlines" => {
            let (keeps_ends,): (Option<bool>,) = from_args(arguments)?;
            split_lines(text, keeps_ends.unwrap_or(false))
        }
        "join" => {
            let (items,): (&Value,) = from_args(arguments)?;
            let texts: Option<Vec<String>> = items.try_iter()?.map(|item| item.as_str().map(str::to_owned)).collect();
            Value::from(texts.ok_or_else(|| invalid("join() takes strings only"))?.join(text))
        }
        "count" => Value::from(text.matches(argument()?).count()),
        "find" | "rfind" | "index" | "rindex" => find(text, method, argument()?)?,
        "isspace" | "isdigit" | "isdecimal" | "isnumeric" | "isalpha" | "isalnum" | "islower" | "isupper" => {
            let () = from_args(arguments)?;
            Value::from(has_only(text, method))
        }
        _ => return Ok(None),
    };
    Ok(Some(result))
}

fn swap_case(text: &str) -> String {
    let swap = |c: char| if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() };
    text.chars().map(swap).collect()
}

/// `str.isspace`, which includes four separators that Unicode classifies as control characters.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// The predicates of `str`, which are false for an empty text.
fn has_only(text: &str, method: &str) -> bool {
    let all = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    let is_cased = |c: char| c.is_lowercase() || c.is_uppercase();
    match method {
        "isspace" => all(is_space),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "islower" => text.chars().any(is_cased) && !text.chars().any(char::is_uppercase),
        "isupper" => text.chars().any(is_cased) && !text.chars().any(char::is_lowercase),
        _ => all(char::is_numeric),
    }
}

fn split(text: &str, arguments: &[Value], from_end: bool) -> Result<Value, Error> {
    let (separator, max_splits, options): (Option<&Value>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = match separator.cloned().or(options.get::<Option<Value>>("sep")?) {
        Some(separator) if !separator.is_none() => Some(python_str::str(&separator)),
        _ => None,
    };
    let max_splits = max_splits.or(options.get::<Option<i64>>("maxsplit")?).and_then(|max| usize::try_from(max).ok());
    options.assert_all_used()?;
    let num_pieces = max_splits.unwrap_or(usize::MAX).saturating_add(1);
    let mut pieces: Vec<&str> = match separator.as_deref() {
        Some("") => return Err(invalid("empty separator")),
        Some(separator) if from_end => text.rsplitn(num_pieces, separator).collect(),
        Some(separator) => text.splitn(num_pieces, separator).collect(),
        None => split_words(text, num_pieces, from_end),
    };
    if from_end {
        pieces.reverse();
    }
    Ok(pieces.into_iter().map(Value::from).collect())
}

/// Words between runs of whitespace, in the order in which they are found.
fn split_words(text: &str, num_pieces: usize, from_end: bool) -> Vec<&str> {
    let trim = if from_end { str::trim_end_matches::<fn(char) -> bool> } else { str::trim_start_matches };
    let mut words = Vec::new();
    let mut rest = trim(text, is_space);
    while !rest.is_empty() {
        let found = if from_end { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = found.filter(|_| words.len() + 1 < num_pieces) else {
            words.push(rest);
            break;
        };
        let (head, tail) = rest.split_at(at);
        words.push(if from_end { tail.trim_start_matches(is_space) } else { head });
        rest = trim(if from_end { head } else { tail }, is_space);
    }
    words
}

fn partition(text: &str, separator: &str, from_end: bool) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(invalid("empty separator"));
    }
    let found = if from_end { text.rsplit_once(separator) } else { text.split_once(separator) };
    let pieces = match found {
        Some((head, tail)) => [head, separator, tail],
        None if from_end => ["", "", text],
        None => [text, "", ""],
    };
    Ok(pieces.into_iter().map(Value::from).collect())
}

fn split_lines(text: &str, keeps_ends: bool) -> Value {
    let is_end = |c| matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let line = |line: &str| {
        let content = line.strip_suffix("\r\n").or_else(|| line.strip_suffix(is_end)).unwrap_or(line);
        Value::from(if keeps_ends { line } else { content })
    };
    let mut lines = Vec::new();
    let mut start = 0;
    for (at, end) in text.match_indices(is_end) {
        let stop = at + end.len();
        if end != "\r" || !text[stop..].starts_with('\n') {
            lines.push(line(&text[start..stop]));
            start = stop;
        }
    }
    if start < text.len() {
        lines.push(line(&text[start..]));
    }
    lines.into()
}

/// Positions count characters.
fn find(text: &str, method: &str, wanted: &str) -> Result<Value, Error> {
    let found = if method.starts_with('r') { text.rfind(wanted) } else { text.find(wanted) };
    match found {
        Some(at) => Ok(Value::from(text[..at].chars().count())),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(invalid("substring not found")),
    }
}

/// The items of a map as Python's pairs.
pub(super) fn items(map: &Value) -> Value {
    let pairs = map.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten();
    pairs.map(|(key, value)| Value::from_object(Pair(key, value))).collect()
}

fn call_on_map(value: &Value, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    if !matches!(method, "items" | "copy") {
        return Ok(None);
    }
    let () = from_args(arguments)?;
    Ok(Some(if method == "items" { items(value) } else { value.clone() }))
}

fn call_on_list(value: &Value, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    match method {
        "index" => {
            let (wanted,): (&Value,) = from_args(arguments)?;
            let found = value.try_iter()?.position(|item| item == *wanted);
            Ok(Some(Value::from(found.ok_or_else(|| invalid("the list does not hold this value"))?)))
        }
        "copy" => {
            let () = from_args(arguments)?;
            Ok(Some(value.clone()))
        }
        _ => Ok(None),
    }
}
