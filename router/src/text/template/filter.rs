//! Jinja's filters and tests, where minijinja's differ or are missing.

use minijinja::value::{Kwargs, Rest, ValueKind, ViaDeserialize};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::{method, python_str};
use crate::text::python_json::{self, Style};

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| python_str::str(value));
    environment.add_filter("join", join);
    environment.add_filter("trim", |value: &Value, set: Option<String>| {
        method::strip(&python_str::str(value), set.as_deref()).to_owned()
    });
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("upper", |value: &Value| python_str::str(value).to_uppercase());
    environment.add_filter("lower", |value: &Value| python_str::str(value).to_lowercase());
    environment.add_test("sequence", |value: &Value| has_items(value) || value.is_undefined());
    environment.add_test("iterable", |value: &Value| has_items(value) || value.is_undefined());
    environment.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
}

/// What Python can iterate.
fn has_items(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::String | ValueKind::Seq | ValueKind::Map | ValueKind::Iterable)
}

fn to_json(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let separators = options.get::<Option<ViaDeserialize<(String, String)>>>("separators")?;
    let style = Style {
        indent: options.get("indent")?,
        separators: separators.map(|pair| pair.0),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "an undefined value cannot be written as JSON"));
    }
    let value = serde_json::to_value(value).map_err(|error| {
        Error::new(ErrorKind::BadSerialization, "cannot write this value as JSON").with_source(error)
    })?;
    Ok(Value::from(python_json::to_string(&value, &style)))
}

fn join(value: &Value, separator: Option<&Value>, options: Kwargs) -> Result<String, Error> {
    let attribute = options.get::<Option<&str>>("attribute")?;
    let separator = match separator {
        Some(separator) => python_str::str(separator),
        None => options.get::<Option<String>>("d")?.unwrap_or_default(),
    };
    options.assert_all_used()?;
    let texts = value.try_iter()?.map(|item| match attribute {
        Some(name) => item.get_attr(name).map(|value| python_str::str(&value)),
        None => Ok(python_str::str(&item)),
    });
    Ok(texts.collect::<Result<Vec<_>, _>>()?.join(&separator))
}

fn default(value: &Value, arguments: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let other = match arguments.first() {
        Some(other) => other.clone(),
        None => options.get::<Option<Value>>("default_value")?.unwrap_or_else(|| Value::from("")),
    };
    let replaces_false = match arguments.get(1) {
        Some(flag) => flag.is_true(),
        None => options.get::<Option<Value>>("boolean")?.is_some_and(|flag| flag.is_true()),
    };
    options.assert_all_used()?;
    let is_replaced = value.is_undefined() || (replaces_false && !value.is_true());
    Ok(if is_replaced { other } else { value.clone() })
}

/// What is no number is the default, 0.
fn int(value: &Value, default: Option<i64>) -> Value {
    let number = match value.as_str() {
        Some(text) => text.trim().parse::<i64>().ok().or_else(|| text.trim().parse::<f64>().ok().and_then(whole)),
        None if value.is_integer() => return value.clone(),
        None if value.kind() == ValueKind::Bool => Some(value.is_true().into()),
        None => f64::try_from(value.clone()).ok().and_then(whole),
    };
    Value::from(number.or(default).unwrap_or(0))
}

#[expect(clippy::cast_possible_truncation, reason = "towards zero, as Python's int")]
fn whole(number: f64) -> Option<i64> {
    number.is_finite().then_some(number as i64)
}

fn float(value: &Value, default: Option<f64>) -> f64 {
    let number = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None if value.kind() == ValueKind::Bool => Some(if value.is_true() { 1.0 } else { 0.0 }),
        None => f64::try_from(value.clone()).ok(),
    };
    number.or(default).unwrap_or(0.0)
}
