//! Methods of Python's str, dict and list, as far as a sandbox lets templates call them: none changes its object.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::python_str::{self, Pair};

pub(super) fn call(_: &State<'_, '_>, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::String => of_string(value.as_str().unwrap_or_default(), method, arguments),
        ValueKind::Map => of_map(value, method, arguments),
        ValueKind::Seq | ValueKind::Iterable => of_list(value, method, arguments),
        _ => Err(unknown()),
    }
}

fn unknown() -> Error {
    Error::from(ErrorKind::UnknownMethod)
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn of_string(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match method {
        "upper" | "lower" | "title" | "capitalize" | "swapcase" | "casefold" => change_case(text, method, arguments),
        "strip" | "lstrip" | "rstrip" => {
            let (set,): (Option<&str>,) = from_args(arguments)?;
            Ok(Value::from(match method {
                "strip" => strip(text, set),
                "lstrip" => text.trim_start_matches(|c| is_in(c, set)),
                _ => text.trim_end_matches(|c| is_in(c, set)),
            }))
        }
        "startswith" => is_any(arguments, |prefix| text.starts_with(prefix)),
        "endswith" => is_any(arguments, |suffix| text.ends_with(suffix)),
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "replace" => {
            let (old, new, count, options): (&str, &str, Option<i64>, Kwargs) = from_args(arguments)?;
            let count = count.or(options.get::<Option<i64>>("count")?).and_then(|count| usize::try_from(count).ok());
            options.assert_all_used()?;
            Ok(Value::from(text.replacen(old, new, count.unwrap_or(usize::MAX))))
        }
        "split" | "rsplit" => split(text, arguments, method == "rsplit"),
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            partition(text, separator, method == "rpartition")
        }
        "splitlines" => {
            let (keeps_ends,): (Option<bool>,) = from_args(arguments)?;
            Ok(split_lines(text, keeps_ends.unwrap_or(false)))
        }
        "join" => {
            let (items,): (&Value,) = from_args(arguments)?;
            let texts: Option<Vec<String>> = items.try_iter()?.map(|item| item.as_str().map(str::to_owned)).collect();
            Ok(Value::from(texts.ok_or_else(|| invalid("join() takes strings only"))?.join(text)))
        }
        "find" | "rfind" | "index" | "rindex" | "count" => search(text, method, arguments),
        "format" => minijinja::format_filter(minijinja::FormatStyle::StrFormat, text, arguments).map(Value::from),
        _ => predicate(text, method, arguments),
    }
}

fn change_case(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let () = from_args(arguments)?;
    Ok(Value::from(match method {
        "upper" => text.to_uppercase(),
        "lower" | "casefold" => text.to_lowercase(),
        "capitalize" => {
            let mut chars = text.chars();
            chars
                .next()
                .map(|first| first.to_uppercase().chain(chars.as_str().to_lowercase().chars()).collect())
                .unwrap_or_default()
        }
        "swapcase" => text
            .chars()
            .map(|c| if c.is_uppercase() { c.to_lowercase().to_string() } else { c.to_uppercase().to_string() })
            .collect(),
        _ => title(text),
    }))
}

/// Upper case at the start of each run of letters.
fn title(text: &str) -> String {
    let mut is_inside = false;
    let mut out = String::new();
    for c in text.chars() {
        if is_inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        is_inside = c.is_alphabetic();
    }
    out
}

/// Python's strip: of whitespace, or of the characters in `set`.
pub(super) fn strip<'a>(text: &'a str, set: Option<&str>) -> &'a str {
    text.trim_matches(|c| is_in(c, set))
}

fn is_in(c: char, set: Option<&str>) -> bool {
    set.map_or_else(|| is_space(c), |set| set.contains(c))
}

/// `str.isspace`, which counts four separators that Unicode calls control characters.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

fn is_any(arguments: &[Value], is: impl Fn(&str) -> bool) -> Result<Value, Error> {
    let (wanted,): (&Value,) = from_args(arguments)?;
    if let Some(wanted) = wanted.as_str() {
        return Ok(Value::from(is(wanted)));
    }
    if !matches!(wanted.kind(), ValueKind::Seq) {
        return Err(invalid("startswith() and endswith() take a string or several"));
    }
    let found = wanted.try_iter()?.map(|wanted| wanted.as_str().map(&is)).collect::<Option<Vec<_>>>();
    found.map(|found| Value::from(found.contains(&true))).ok_or_else(|| invalid("only strings can be looked for"))
}

fn split(text: &str, arguments: &[Value], from_the_end: bool) -> Result<Value, Error> {
    let (separator, most, options): (Option<&Value>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = match separator.cloned().or(options.get::<Option<Value>>("sep")?) {
        Some(separator) if !separator.is_none() => Some(python_str::str(&separator)),
        _ => None,
    };
    let most = most.or(options.get::<Option<i64>>("maxsplit")?).and_then(|most| usize::try_from(most).ok());
    options.assert_all_used()?;
    let num_pieces = most.unwrap_or(usize::MAX).saturating_add(1);
    match separator.as_deref() {
        Some("") => Err(invalid("empty separator")),
        Some(separator) if from_the_end => {
            let mut pieces: Vec<_> = text.rsplitn(num_pieces, separator).map(Value::from).collect();
            pieces.reverse();
            Ok(pieces.into())
        }
        Some(separator) => Ok(text.splitn(num_pieces, separator).map(Value::from).collect()),
        None => Ok(split_words(text, num_pieces, from_the_end).into_iter().map(Value::from).collect()),
    }
}

/// Runs of whitespace separate; there are no empty words.
fn split_words(text: &str, num_pieces: usize, from_the_end: bool) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = if from_the_end { text.trim_end_matches(is_space) } else { text.trim_start_matches(is_space) };
    while !rest.is_empty() {
        let found = if from_the_end { rest.rfind(is_space) } else { rest.find(is_space) };
        match found.filter(|_| words.len() + 1 < num_pieces) {
            Some(at) if from_the_end => {
                words.push(rest[at..].trim_start_matches(is_space));
                rest = rest[..at].trim_end_matches(is_space);
            }
            Some(at) => {
                words.push(&rest[..at]);
                rest = rest[at..].trim_start_matches(is_space);
            }
            None => {
                words.push(rest);
                break;
            }
        }
    }
    if from_the_end {
        words.reverse();
    }
    words
}

fn partition(text: &str, separator: &str, from_the_end: bool) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(invalid("empty separator"));
    }
    let found = if from_the_end { text.rsplit_once(separator) } else { text.split_once(separator) };
    let pieces = match found {
        Some((head, tail)) => [head, separator, tail],
        None if from_the_end => ["", "", text],
        None => [text, "", ""],
    };
    Ok(pieces.into_iter().map(Value::from).collect())
}

fn split_lines(text: &str, keeps_ends: bool) -> Value {
    let is_end = |c| matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut lines = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let line = rest.find(is_end).unwrap_or(rest.len());
        let num_end_bytes = match &rest[line..] {
            end if end.starts_with("\r\n") => 2,
            end => end.chars().next().map_or(0, char::len_utf8),
        };
        let end = line + num_end_bytes;
        lines.push(Value::from(if keeps_ends { &rest[..end] } else { &rest[..line] }));
        rest = &rest[end..];
    }
    lines.into()
}

/// Positions are counted in characters.
fn search(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (wanted,): (&str,) = from_args(arguments)?;
    if method == "count" {
        return Ok(Value::from(text.matches(wanted).count()));
    }
    let found = if method.starts_with('r') { text.rfind(wanted) } else { text.find(wanted) };
    match found {
        Some(at) => Ok(Value::from(text[..at].chars().count())),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(invalid("substring not found")),
    }
}

fn predicate(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let all = |is: fn(char) -> bool| !text.is_empty() && text.chars().all(is);
    let has_case = text.chars().any(|c| c.is_lowercase() || c.is_uppercase());
    let answer = match method {
        "isspace" => all(is_space),
        "isdigit" | "isdecimal" | "isnumeric" => all(char::is_numeric),
        "isalpha" => all(char::is_alphabetic),
        "isalnum" => all(char::is_alphanumeric),
        "isascii" => text.is_ascii(),
        "islower" => has_case && !text.chars().any(char::is_uppercase),
        "isupper" => has_case && !text.chars().any(char::is_lowercase),
        _ => return Err(unknown()),
    };
    let () = from_args(arguments)?;
    Ok(Value::from(answer))
}

fn pairs(map: &Value) -> impl Iterator<Item = (Value, Value)> {
    map.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten()
}

pub(super) fn items(map: &Value) -> Value {
    pairs(map).map(|(key, value)| Value::from_object(Pair(key, value))).collect()
}

fn of_map(value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match method {
        "get" => {
            let (key, default): (&Value, Option<Value>) = from_args(arguments)?;
            let found = value.as_object().and_then(|object| object.get_value(key));
            Ok(found.or(default).unwrap_or_else(|| Value::from(())))
        }
        "keys" | "values" | "items" | "copy" => {
            let () = from_args(arguments)?;
            Ok(match method {
                "keys" => pairs(value).map(|(key, _)| key).collect(),
                "values" => pairs(value).map(|(_, value)| value).collect(),
                "items" => items(value),
                _ => value.clone(),
            })
        }
        _ => Err(unknown()),
    }
}

fn of_list(value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    match method {
        "count" => {
            let (wanted,): (&Value,) = from_args(arguments)?;
            Ok(Value::from(value.try_iter()?.filter(|item| item == wanted).count()))
        }
        "index" => {
            let (wanted,): (&Value,) = from_args(arguments)?;
            let found = value.try_iter()?.position(|item| item == *wanted);
            found.map(Value::from).ok_or_else(|| invalid("the list does not hold this value"))
        }
        "copy" => {
            let () = from_args(arguments)?;
            Ok(value.clone())
        }
        _ => Err(unknown()),
    }
}
