//! Methods of Python's `str`, `dict` and `list` that leave their object unchanged, which are those that jinja's sandbox
//! allows. minijinja-contrib has most of them; here are those that it lacks or that differ from Python's.

use minijinja::value::{Kwargs, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::python_value::{self, SequenceKind, Type, tuple};
use super::{python_format, python_str, python_text};

/// The widest text that a method makes.
const MAX_COLUMNS: usize = 100_000;

pub(super) fn call(state: &State<'_, '_>, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let kind = Type::of(value);
    let result = match kind {
        Type::Str => call_on_string(state, value, method, arguments)?,
        Type::Dict => call_on_map(value, method, arguments)?,
        Type::List | Type::Tuple | Type::Range => call_on_list(value, kind, method, arguments)?,
        _ => None,
    };
    match result {
        Some(result) if value.is_safe() => safe_result(method, arguments, result),
        Some(result) => Ok(result),
        None if matches!(kind, Type::Str | Type::Dict | Type::List | Type::Tuple | Type::Range) => {
            let result = pycompat::unknown_method_callback(state, value, method, arguments)?;
            if value.is_safe() { safe_result(method, arguments, result) } else { Ok(result) }
        }
        None => Err(Error::from(ErrorKind::UnknownMethod)),
    }
}

/// Methods of a text marked safe return such texts, and escape their arguments.
fn safe_result(method: &str, arguments: &[Value], result: Value) -> Result<Value, Error> {
    let safe = |text: &Value| text.as_str().map(|text| Value::from_safe_string(text.to_owned()));
    match Type::of(&result) {
        Type::Bool | Type::Int => Ok(result),
        Type::Str if arguments.is_empty() => Ok(safe(&result).unwrap_or_default()),
        Type::List if arguments.is_empty() => Ok(result.try_iter()?.filter_map(|text| safe(&text)).collect()),
        _ => Err(python_value::invalid(format!(
            "the method {method} of a text marked safe is not supported with arguments"
        ))),
    }
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// `None` if the method is not defined here.
fn call_on_string(
    state: &State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Option<Value>, Error> {
    let text = value.as_str().unwrap_or_default();
    let argument = || from_args::<(&str,)>(arguments).map(|(argument,)| argument);
    let nothing = || from_args::<()>(arguments);
    let result = match method {
        "casefold" if text.is_ascii() => nothing().map(|()| Value::from(text.to_lowercase()))?,
        "casefold" => return Err(invalid("casefold is supported for ASCII only")),
        "swapcase" => nothing().map(|()| Value::from(python_text::swap_case(text)))?,
        "title" => nothing().map(|()| Value::from(python_text::title(text)))?,
        "capitalize" => nothing().map(|()| Value::from(python_text::capitalized(text)))?,
        "istitle" => nothing().map(|()| Value::from(python_text::is_title(text)))?,
        "isprintable" => nothing().map(|()| Value::from(text.chars().all(python_str::is_printable)))?,
        "zfill" => {
            let (width,): (i64,) = from_args(arguments)?;
            Value::from(python_text::with_zeros(text, columns(width)?))
        }
        "center" | "ljust" | "rjust" => {
            let (width, fill): (i64, Option<char>) = from_args(arguments)?;
            let (width, fill) = (columns(width)?, fill.unwrap_or(' '));
            Value::from(match method {
                "center" => python_text::center(text, width, fill),
                _ => python_text::justified(text, width, fill, method == "rjust"),
            })
        }
        "expandtabs" => {
            let (size,): (Option<i64>,) = from_args(arguments)?;
            Value::from(python_text::with_spaces_for_tabs(text, columns(size.unwrap_or(8))?))
        }
        "format" => Value::from(python_format::with_braces(state, text, arguments)?),
        "removeprefix" => Value::from(text.strip_prefix(argument()?).unwrap_or(text)),
        "removesuffix" => Value::from(text.strip_suffix(argument()?).unwrap_or(text)),
        "split" | "rsplit" => split(text, arguments, method == "rsplit")?,
        "partition" | "rpartition" => partition(text, argument()?, method == "rpartition")?,
        "splitlines" => {
            let (keeps_ends, options): (Option<bool>, Kwargs) = from_args(arguments)?;
            let keeps_ends = keeps_ends.or(options.get("keepends")?).unwrap_or(false);
            options.assert_all_used()?;
            python_text::lines(text, keeps_ends).into_iter().map(Value::from).collect()
        }
        "join" => {
            let (items,): (&Value,) = from_args(arguments)?;
            let items = python_value::items(items)?;
            let texts: Option<Vec<&str>> = items.iter().map(Value::as_str).collect();
            Value::from(texts.ok_or_else(|| invalid("join() takes strings only"))?.join(text))
        }
        "count" | "find" | "rfind" | "index" | "rindex" | "startswith" | "endswith" => search(text, method, arguments)?,
        "isspace" | "isdigit" | "isdecimal" | "isnumeric" | "isalpha" | "isalnum" | "islower" | "isupper" => {
            nothing()?;
            Value::from(python_text::has_only(text, method))
        }
        _ => return Ok(None),
    };
    Ok(Some(result))
}

/// A width, which is zero if it is negative.
fn columns(width: i64) -> Result<usize, Error> {
    match usize::try_from(width.max(0)) {
        Ok(width) if width <= MAX_COLUMNS => Ok(width),
        _ => Err(python_value::invalid(format!(
            "a width of {width} columns is too large, at most {MAX_COLUMNS} are allowed"
        ))),
    }
}

/// Methods that take what to search for, and optionally the first and the last position.
fn search(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (wanted, start, end): (&Value, Option<&Value>, Option<&Value>) = from_args(arguments)?;
    let len = i128::try_from(text.chars().count()).unwrap_or(i128::MAX);
    let position = |position: Option<&Value>, default: i128| match position {
        Some(position) if !position.is_none() => {
            let position = python_value::integer(position).ok_or_else(|| invalid("positions are integers"))?;
            Ok::<_, Error>(if position < 0 { (position + len).max(0) } else { position })
        }
        _ => Ok(default),
    };
    let (start, end) = (position(start, 0)?, position(end, len)?.min(len));
    let is_empty = start > end;
    let skipped = usize::try_from(start).unwrap_or(usize::MAX);
    let kept = usize::try_from(end - start).unwrap_or(0);
    let part: String = text.chars().skip(skipped).take(kept).collect();
    if let "startswith" | "endswith" = method {
        let alternatives =
            if Type::of(wanted) == Type::Tuple { python_value::items(wanted)? } else { vec![wanted.clone()] };
        let alternatives: Option<Vec<&str>> = alternatives.iter().map(Value::as_str).collect();
        let alternatives = alternatives.ok_or_else(|| invalid("it takes a text or a tuple of texts"))?;
        let matches = |text: &&str| if method == "startswith" { part.starts_with(text) } else { part.ends_with(text) };
        return Ok(Value::from(!is_empty && alternatives.iter().any(matches)));
    }
    let wanted = wanted.as_str().ok_or_else(|| invalid("it takes a text"))?;
    let found = match method {
        _ if is_empty => None,
        "count" => return Ok(Value::from(part.matches(wanted).count())),
        "rfind" | "rindex" => part.rfind(wanted),
        _ => part.find(wanted),
    };
    match found {
        Some(at) => Ok(Value::from(skipped + part[..at].chars().count())),
        None if method == "count" => Ok(Value::from(0)),
        None if method.ends_with("find") => Ok(Value::from(-1)),
        None => Err(invalid("substring not found")),
    }
}

fn split(text: &str, arguments: &[Value], from_end: bool) -> Result<Value, Error> {
    let (separator, max_splits, options): (Option<&Value>, Option<i64>, Kwargs) = from_args(arguments)?;
    let separator = match separator.cloned().or(options.get::<Option<Value>>("sep")?) {
        Some(separator) if !separator.is_none() => Some(python_str::str(&separator)?),
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
    let mut rest = trim(text, python_text::is_space);
    while !rest.is_empty() {
        let found = if from_end { rest.rfind(python_text::is_space) } else { rest.find(python_text::is_space) };
        let Some(at) = found.filter(|_| words.len() + 1 < num_pieces) else {
            words.push(rest);
            break;
        };
        let (head, tail) = rest.split_at(at);
        words.push(if from_end { tail.trim_start_matches(python_text::is_space) } else { head });
        rest = trim(if from_end { head } else { tail }, python_text::is_space);
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
    Ok(tuple(pieces.into_iter().map(Value::from).collect()))
}

/// The items of a map as Python's pairs.
pub(super) fn items(map: &Value) -> Vec<Value> {
    let pairs = map.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten();
    pairs.map(|(key, value)| tuple(vec![key, value])).collect()
}

fn call_on_map(value: &Value, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    let none = || from_args::<()>(arguments);
    let view = |name, items| python_value::sequence(SequenceKind::View(name), items);
    Ok(Some(match method {
        "items" => none().map(|()| view("dict_items", items(value)))?,
        "keys" => none().map(|()| view("dict_keys", value.try_iter().into_iter().flatten().collect()))?,
        "values" => {
            none()?;
            let pairs = value.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten();
            view("dict_values", pairs.map(|(_, value)| value).collect())
        }
        "copy" => none().map(|()| value.clone())?,
        _ => return Ok(None),
    }))
}

fn call_on_list(value: &Value, kind: Type, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    match method {
        "index" => {
            let (wanted,): (&Value,) = from_args(arguments)?;
            let found = value.try_iter()?.position(|item| python_value::equals(&item, wanted));
            Ok(Some(Value::from(found.ok_or_else(|| invalid("the list does not hold this value"))?)))
        }
        "count" => {
            let (wanted,): (&Value,) = from_args(arguments)?;
            Ok(Some(Value::from(value.try_iter()?.filter(|item| python_value::equals(item, wanted)).count())))
        }
        "copy" if kind == Type::List => {
            let () = from_args(arguments)?;
            Ok(Some(value.clone()))
        }
        _ => Ok(None),
    }
}
