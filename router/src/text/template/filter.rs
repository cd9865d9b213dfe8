//! Jinja's filters over numbers and any values, and its tests, that minijinja lacks or that differ from jinja's.

use minijinja::value::{Kwargs, Rest, ValueKind, ViaDeserialize};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::python_json::{self, Style};
use super::python_value::{self, Type, invalid};
use super::{operator, python_str};

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_filter("tojson", to_json);
    environment.add_filter("default", default);
    environment.add_filter("d", default);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("round", round);
    // They write texts that no prompt needs, each in a way of its own.
    for name in ["pprint", "attr"] {
        environment.remove_filter(name);
    }
    environment.add_test("sequence", |value: &Value| {
        !matches!(Type::of(value), Type::View | Type::Generator | Type::Object) && Type::of(value).is_iterable()
    });
    environment.add_test("iterable", |value: &Value| Type::of(value).is_iterable());
    environment.add_test("mapping", |value: &Value| Type::of(value) == Type::Dict);
    environment
        .add_test("callable", |value: &Value| value.kind() == ValueKind::Plain || Type::of(value) == Type::Undefined);
    environment.add_test("number", |value: &Value| Type::of(value).is_number());
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
    Ok(Value::from(python_json::to_string(&as_json(value, style.sort_keys)?, &style)))
}

/// The value as `json.dumps` reads it.
fn as_json(value: &Value, sorts_keys: bool) -> Result<serde_json::Value, Error> {
    match Type::of(value) {
        Type::List | Type::Tuple => value.try_iter()?.map(|item| as_json(&item, sorts_keys)).collect(),
        Type::Dict => {
            let key = |key: &Value| match Type::of(key) {
                Type::Str => Ok(python_str::str(key)?),
                kind if sorts_keys => Err(invalid(format!("tojson: keys of type {} cannot be sorted", kind.name()))),
                Type::None | Type::Bool | Type::Int | Type::Float => {
                    Ok(python_json::to_string(&serde_json::to_value(key).unwrap_or_default(), &Style::default()))
                }
                kind => Err(invalid(format!("tojson: a key of type {} is not allowed", kind.name()))),
            };
            let field = |name: Value| Ok((key(&name)?, as_json(&value.get_item(&name)?, sorts_keys)?));
            value.try_iter()?.map(field).collect()
        }
        Type::None | Type::Bool | Type::Int | Type::Float | Type::Str => serde_json::to_value(value).map_err(|error| {
            Error::new(ErrorKind::BadSerialization, "cannot write this value as JSON").with_source(error)
        }),
        kind => Err(invalid(format!("tojson takes no value of type {}", kind.name()))),
    }
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

fn undefined(value: &Value) -> Result<(), Error> {
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "an undefined value is no number"));
    }
    Ok(())
}

/// `default` for values that Python's `int` refuses.
fn int(value: &Value, default: Option<Value>, base: Option<u32>, options: Kwargs) -> Result<Value, Error> {
    undefined(value)?;
    let default = default.or(options.get("default")?).unwrap_or_else(|| Value::from(0));
    let base = base.or(options.get("base")?).unwrap_or(10);
    options.assert_all_used()?;
    if !(2..=36).contains(&base) {
        return Err(invalid(format!("int: the base {base} is not supported, from 2 to 36 are")));
    }
    let float = |number: f64| if number.is_finite() { Some(whole(number)) } else { None };
    let number = match (Type::of(value), value.as_str()) {
        (_, Some(text)) => {
            let text = text.trim();
            parsed_int(text, base).or_else(|| text.parse().ok().and_then(float))
        }
        (Type::Float, _) => float(python_value::number(value)),
        _ => python_value::integer(value),
    };
    Ok(number.map_or(default, operator::whole))
}

fn parsed_int(text: &str, base: u32) -> Option<i128> {
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let has_prefix = digits.get(..prefix.len()).is_some_and(|head| head.eq_ignore_ascii_case(prefix));
    let digits = if has_prefix { &digits[prefix.len()..] } else { digits };
    let is_number = digits.starts_with(|c: char| c.is_digit(base));
    i128::from_str_radix(digits, base).ok().filter(|_| is_number).map(|number| sign * number)
}

#[expect(clippy::cast_possible_truncation, reason = "Python's int truncates, too")]
fn whole(number: f64) -> i128 {
    number as i128
}

/// `default` for values that Python's `float` refuses.
fn float(value: &Value, default: Option<Value>, options: Kwargs) -> Result<Value, Error> {
    undefined(value)?;
    let default = default.or(options.get("default")?).unwrap_or_else(|| Value::from(0.0));
    options.assert_all_used()?;
    let number = match value.as_str() {
        Some(text) => text.trim().parse().ok(),
        None => Some(python_value::number(value)).filter(|_| Type::of(value).is_number()),
    };
    Ok(number.map_or(default, |number: f64| Value::from(number)))
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
