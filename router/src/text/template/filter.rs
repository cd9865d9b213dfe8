//! Jinja's filters and tests that minijinja lacks or that differ from jinja's.

use minijinja::value::{Kwargs, Rest, ValueKind, ViaDeserialize};
use minijinja::{Environment, Error, ErrorKind, State, Value};

use super::python_json::{self, Style};
use super::python_str::Pair;
use super::{method, python_str};

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("tojson", to_json);
    environment.add_filter("string", |value: &Value| python_str::str(value));
    environment.add_filter("join", join);
    environment.add_filter("trim", |value: &Value, set: Option<&str>| {
        let text = python_str::str(value);
        set.map_or_else(|| text.trim(), |set| text.trim_matches(|c| set.contains(c))).to_owned()
    });
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("round", round);
    environment.add_filter("sum", sum);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("items", items);
    environment.add_filter("dictsort", dictsort);
    environment.add_filter("wordcount", |value: &Value| python_str::str(value).split_whitespace().count());
    environment.add_filter("upper", |value: &Value| python_str::str(value).to_uppercase());
    environment.add_filter("lower", |value: &Value| python_str::str(value).to_lowercase());
    environment.add_test("sequence", |value: &Value| has_items(value) || value.is_undefined());
    environment.add_test("iterable", |value: &Value| has_items(value) || value.is_undefined());
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
    environment.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
}

/// Whether Python can iterate over the value.
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

/// `default`, or 0, for values that are not a number.
pub(super) fn int(value: &Value, default: Option<i64>) -> Value {
    let number = match value.as_str() {
        Some(text) => text.trim().parse::<i64>().ok().or_else(|| text.trim().parse::<f64>().ok().and_then(whole)),
        None if value.is_integer() => return value.clone(),
        None if value.kind() == ValueKind::Bool => Some(value.is_true().into()),
        None => f64::try_from(value.clone()).ok().and_then(whole),
    };
    Value::from(number.or(default).unwrap_or(0))
}

#[expect(clippy::cast_possible_truncation, reason = "Python's int truncates, too")]
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

/// Rounds halves to even, as Python does, or in the direction of `method`.
fn round(value: &Value, precision: Option<i32>, method: Option<String>, options: Kwargs) -> Result<Value, Error> {
    let precision = precision.or(options.get("precision")?).unwrap_or(0);
    let method = method.or(options.get("method")?);
    options.assert_all_used()?;
    let scale = 10_f64.powi(precision);
    let number = || f64::try_from(value.clone());
    match method.as_deref() {
        None | Some("common") if value.is_integer() && precision >= 0 => Ok(value.clone()),
        None | Some("common") if value.is_integer() => {
            Ok(Value::from(whole((number()? * scale).round_ties_even() / scale)))
        }
        // The decimal digits decide, as in Python: 2.675 is less than what its digits say.
        None | Some("common") if precision > 0 => {
            let precision = usize::try_from(precision).unwrap_or_default();
            Ok(Value::from(format!("{:.precision$}", number()?).parse::<f64>().unwrap_or_default()))
        }
        None | Some("common") => Ok(Value::from((number()? * scale).round_ties_even() / scale)),
        Some("ceil") => Ok(Value::from((number()? * scale).ceil() / scale)),
        Some("floor") => Ok(Value::from((number()? * scale).floor() / scale)),
        Some(other) => {
            let message = format!("round: the method {other:?} is not known, only common, ceil and floor are");
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
    }
}

fn sum(state: &State<'_, '_>, values: &Value, options: Kwargs) -> Result<Value, Error> {
    let attribute = options.get::<Option<&str>>("attribute")?;
    options.assert_all_used()?;
    let Some(name) = attribute else { return minijinja::filters::sum(state, values.try_iter()?.collect()) };
    let numbers = values.try_iter()?.map(|item| item.get_attr(name)).collect::<Result<Vec<_>, _>>()?;
    minijinja::filters::sum(state, numbers.into())
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.len() {
        Some(len) => Ok(len),
        None if value.is_undefined() => Ok(0),
        None if value.kind() == ValueKind::Iterable => Ok(value.try_iter()?.count()),
        None => Err(Error::new(ErrorKind::InvalidOperation, format!("a {} has no length", value.kind()))),
    }
}

fn items(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Map => Ok(method::items(value)),
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        kind => Err(Error::new(ErrorKind::InvalidOperation, format!("a {kind} has no items"))),
    }
}

fn dictsort(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let sorted = minijinja::filters::dictsort(value, options)?;
    let pairs = sorted.try_iter()?.map(|pair| {
        let at = |index| pair.get_item_by_index(index);
        Ok(Value::from_object(Pair(at(0)?, at(1)?)))
    });
    pairs.collect::<Result<Vec<_>, Error>>().map(Value::from)
}
