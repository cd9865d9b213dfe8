//! Jinja's operators with Python's semantics. [`super::syntax`] replaces each operator of a template by a call of its function.

use std::cmp::Ordering;

use minijinja::value::Rest;
use minijinja::{Environment, Error, Value};

use super::python_value::{self, BoundMethod, Sequence, SequenceKind, Type, integer, invalid, items, number};
use super::{python_format, python_str};

/// Longest text or list that `*` makes.
const MAX_REPEATED: usize = 10_000_000;

/// The names of the functions, which are no names in a template.
pub(super) const ATTRIBUTE: &str = "operator .";
pub(super) const ITEM: &str = "operator []";
pub(super) const SLICE: &str = "operator [:]";
pub(super) const NEGATIVE: &str = "operator -x";
pub(super) const TUPLE: &str = "operator ()";
pub(super) const COMPARE: &str = "operator <=>";
pub(super) const LOOP: &str = "operator for";
pub(super) const CONCAT: &str = "operator ~";
pub(super) const ADD: &str = "operator +";
pub(super) const SUBTRACT: &str = "operator -";
pub(super) const MULTIPLY: &str = "operator *";
pub(super) const DIVIDE: &str = "operator /";
pub(super) const FLOOR_DIVIDE: &str = "operator //";
pub(super) const REMAINDER: &str = "operator %";
pub(super) const POWER: &str = "operator **";

pub(super) fn add_to(environment: &mut Environment<'_>) {
    environment.add_function(ATTRIBUTE, attribute);
    environment.add_function(ITEM, item);
    environment.add_function(SLICE, slice);
    environment.add_function(NEGATIVE, |value: &Value| subtract(&Value::from(0), value));
    environment.add_function(TUPLE, |items: Rest<Value>| python_value::tuple(items.0));
    environment.add_function(COMPARE, compare);
    environment.add_function(LOOP, |value: &Value| items(value).map(Value::from));
    environment.add_function(CONCAT, concat);
    environment.add_function(ADD, add);
    environment.add_function(SUBTRACT, subtract);
    environment.add_function(MULTIPLY, multiply);
    environment.add_function(DIVIDE, |a: &Value, b: &Value| {
        numbers("/", a, b)?;
        if number(b) == 0.0 { Err(invalid("division by zero")) } else { Ok(Value::from(number(a) / number(b))) }
    });
    environment.add_function(FLOOR_DIVIDE, |a: &Value, b: &Value| divide("//", a, b).map(|(quotient, _)| quotient));
    environment.add_function(REMAINDER, |a: &Value, b: &Value| match a.as_str() {
        Some(_) if a.is_safe() => Err(invalid("% is not supported for a text marked safe")),
        Some(pattern) => python_format::with_operator(pattern, b).map(Value::from),
        None => divide("%", a, b).map(|(_, remainder)| remainder),
    });
    environment.add_function(POWER, power);
    for name in ["eq", "equalto", "=="] {
        environment.add_test(name, |a: &Value, b: &Value| python_value::equals(a, b));
    }
    for name in ["ne", "!="] {
        environment.add_test(name, |a: &Value, b: &Value| !python_value::equals(a, b));
    }
    environment.add_test("divisibleby", is_divisible);
    environment.add_test("even", |value: &Value| is_divisible(value, &Value::from(2)));
    environment
        .add_test("odd", |value: &Value| divide("%", value, &Value::from(2)).map(|(_, rest)| number(&rest) == 1.0));
    environment.add_test("in", |a: &Value, b: &Value| contains(b, a));
    for (names, operator) in [
        (["lt", "lessthan", "<"], "<"),
        (["le", "<=", "<="], "<="),
        (["gt", "greaterthan", ">"], ">"),
        (["ge", ">=", ">="], ">="),
    ] {
        for name in names {
            environment.add_test(name, move |a: &Value, b: &Value| holds(a, operator, b));
        }
    }
}

/// Methods of lists and dictionaries that change them.
const MUTATING: [&str; 11] =
    ["append", "clear", "extend", "insert", "pop", "popitem", "remove", "reverse", "setdefault", "sort", "update"];

fn unsupported(operator: &str, a: &Value, b: &Value) -> Error {
    let (first, second) = (Type::of(a).name(), Type::of(b).name());
    invalid(format!("{operator} is not supported for values of type {first} and {second}"))
}

fn undefined(value: &Value, of: &str) -> Result<(), Error> {
    if value.is_undefined() {
        return Err(Error::new(minijinja::ErrorKind::UndefinedError, format!("{of} of an undefined value")));
    }
    Ok(())
}

/// jinja's `value.name`: an attribute of Python's type first, then an item.
fn attribute(value: &Value, name: &str) -> Result<Value, Error> {
    undefined(value, &format!("the attribute {name:?}"))?;
    if Type::of(value).has_method(name) {
        if MUTATING.contains(&name) && Type::of(value) != Type::Str {
            return Err(invalid(format!("the method {name} changes its object, which jinja's sandbox forbids")));
        }
        return Ok(Value::from_object(BoundMethod { object: value.clone(), name: name.to_owned() }));
    }
    if Type::of(value).is_number() && matches!(name, "real" | "imag" | "numerator" | "denominator") {
        return Err(invalid(format!("the attribute {name:?} of numbers is not supported")));
    }
    value.get_attr(name)
}

/// jinja's `value[key]`: an item first, then an attribute of Python's type.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value, Error> {
    undefined(value, "an item")?;
    let kind = Type::of(value);
    let found = match (kind, integer(key)) {
        (Type::Str, Some(index)) => {
            let count = || value.as_str().unwrap_or_default().chars().count();
            let index = position(index, count);
            index.and_then(|index| value.as_str()?.chars().nth(index)).map(|c| Value::from(c.to_string()))
        }
        (Type::List | Type::Tuple | Type::Range, Some(index)) => {
            let index = position(index, || value.len().unwrap_or_default());
            index.and_then(|index| value.get_item_by_index(index).ok()).filter(|item| !item.is_undefined())
        }
        (Type::Dict, Some(number)) => python_value::lookup(value, &whole(number)),
        (Type::Dict | Type::Object, _) => python_value::lookup(value, key),
        _ => None,
    };
    match (found, key.as_str()) {
        (Some(found), _) => Ok(found),
        (None, Some(name)) if kind.has_method(name) => attribute(value, name),
        _ => Ok(Value::UNDEFINED),
    }
}

/// The position of a Python index, which counts from the end if it is negative.
fn position(index: i128, len: impl FnOnce() -> usize) -> Option<usize> {
    let index = if index < 0 { index + i128::try_from(len()).ok()? } else { index };
    usize::try_from(index).ok()
}

fn slice(value: &Value, start: &Value, stop: &Value, step: &Value) -> Result<Value, Error> {
    let bound = |bound: &Value| match integer(bound) {
        None if bound.is_none() => Ok(None),
        None => Err(invalid(format!("a slice takes integers, not a value of type {}", Type::of(bound).name()))),
        number => Ok(number),
    };
    let (start, stop, step) = (bound(start)?, bound(stop)?, bound(step)?.unwrap_or(1));
    if step == 0 {
        return Err(invalid("slice step cannot be zero"));
    }
    let kind = Type::of(value);
    match kind {
        Type::Str | Type::List | Type::Tuple => {}
        Type::Undefined => {
            return Err(Error::new(minijinja::ErrorKind::UndefinedError, "a slice of an undefined value"));
        }
        _ => return Err(invalid(format!("a value of type {} cannot be sliced", kind.name()))),
    }
    let items = items(value)?;
    let len = i128::try_from(items.len()).unwrap_or(i128::MAX);
    let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamped = |bound: i128| (if bound < 0 { bound + len } else { bound }).clamp(lowest, highest);
    let (first, last) = if step > 0 { (lowest, highest) } else { (highest, lowest) };
    let (mut at, end) = (start.map_or(first, clamped), stop.map_or(last, clamped));
    let mut chosen = Vec::new();
    while if step > 0 { at < end } else { at > end } {
        chosen.extend(usize::try_from(at).ok().and_then(|at| items.get(at)).cloned());
        at = at.saturating_add(step);
    }
    Ok(match kind {
        Type::Str => text(&chosen.iter().filter_map(Value::as_str).collect::<String>(), value.is_safe()),
        Type::Tuple => python_value::tuple(chosen),
        _ => Value::from(chosen),
    })
}

/// A text, which is marked safe if `is_safe`.
pub(super) fn text(text: &str, is_safe: bool) -> Value {
    if is_safe { Value::from_safe_string(text.to_owned()) } else { Value::from(text) }
}

/// The value as text inside a text marked safe.
pub(super) fn escaped(value: &Value) -> Result<String, Error> {
    let text = python_str::str(value)?;
    if value.is_safe() {
        return Ok(text);
    }
    // The order matters: the entities contain an ampersand.
    let text = text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    Ok(text.replace('\'', "&#39;").replace('"', "&#34;"))
}

/// Joins texts. If one of two is marked safe, the other is escaped.
fn join(a: &Value, b: &Value) -> Result<Value, Error> {
    if a.is_safe() || b.is_safe() {
        return Ok(Value::from_safe_string(escaped(a)? + &escaped(b)?));
    }
    Ok(Value::from(python_str::str(a)? + &python_str::str(b)?))
}

fn concat(values: Rest<Value>) -> Result<String, Error> {
    values.iter().map(python_str::str).collect()
}

fn numbers(operator: &str, a: &Value, b: &Value) -> Result<(), Error> {
    let is_number = |value| Type::of(value).is_number();
    if is_number(a) && is_number(b) { Ok(()) } else { Err(unsupported(operator, a, b)) }
}

/// Applies an operation to two integers, or to two numbers of which one is a float.
fn arithmetic(
    operator: &str,
    a: &Value,
    b: &Value,
    integers: fn(i128, i128) -> Option<i128>,
    floats: fn(f64, f64) -> f64,
) -> Result<Value, Error> {
    numbers(operator, a, b)?;
    match (integer(a), integer(b)) {
        (Some(a), Some(b)) => {
            integers(a, b).map(whole).ok_or_else(|| invalid(format!("{operator}: the result is too large")))
        }
        _ => Ok(Value::from(floats(number(a), number(b)))),
    }
}

pub(super) fn whole(number: i128) -> Value {
    i64::try_from(number).map_or_else(|_| Value::from(number), Value::from)
}

pub(super) fn add(a: &Value, b: &Value) -> Result<Value, Error> {
    match (Type::of(a), Type::of(b)) {
        (Type::Str, Type::Str) => join(a, b),
        (Type::List, Type::List) => Ok(Value::from([items(a)?, items(b)?].concat())),
        (Type::Tuple, Type::Tuple) => Ok(python_value::tuple([items(a)?, items(b)?].concat())),
        _ => arithmetic("+", a, b, i128::checked_add, |a, b| a + b),
    }
}

fn subtract(a: &Value, b: &Value) -> Result<Value, Error> {
    arithmetic("-", a, b, i128::checked_sub, |a, b| a - b)
}

fn multiply(a: &Value, b: &Value) -> Result<Value, Error> {
    let is_repeatable = |value| matches!(Type::of(value), Type::Str | Type::List | Type::Tuple);
    let (repeated, count) = match (integer(a), integer(b)) {
        (_, Some(count)) if is_repeatable(a) => (a, count),
        (Some(count), _) if is_repeatable(b) => (b, count),
        _ => return arithmetic("*", a, b, i128::checked_mul, |a, b| a * b),
    };
    let count = usize::try_from(count.max(0)).unwrap_or(usize::MAX);
    let len = repeated.as_str().map(str::len).or(repeated.len()).unwrap_or_default();
    if len.saturating_mul(count) > MAX_REPEATED {
        return Err(invalid(format!("*: the result is longer than {MAX_REPEATED}")));
    }
    let repeated_items = |count| items(repeated).map(|items| std::iter::repeat_n(items, count).flatten().collect());
    Ok(match (repeated.as_str(), Type::of(repeated)) {
        (Some(repeated_text), _) => text(&repeated_text.repeat(count), repeated.is_safe()),
        (None, Type::Tuple) => python_value::tuple(repeated_items(count)?),
        _ => Value::from(repeated_items(count)?),
    })
}

/// The quotient and the remainder, both rounded down.
fn divide(operator: &str, a: &Value, b: &Value) -> Result<(Value, Value), Error> {
    numbers(operator, a, b)?;
    if number(b) == 0.0 {
        return Err(invalid("division by zero"));
    }
    match (integer(a), integer(b)) {
        (Some(a), Some(b)) => {
            let too_large = || invalid(format!("{operator}: the result is too large"));
            let (quotient, remainder) =
                (a.checked_div(b).ok_or_else(too_large)?, a.checked_rem(b).ok_or_else(too_large)?);
            let is_rounded_up = remainder != 0 && (remainder < 0) != (b < 0);
            Ok(if is_rounded_up {
                (whole(quotient - 1), whole(remainder + b))
            } else {
                (whole(quotient), whole(remainder))
            })
        }
        _ => {
            let (a, b) = (number(a), number(b));
            let remainder = a % b;
            let remainder = match remainder {
                0.0 => 0.0_f64.copysign(b),
                _ if (remainder < 0.0) != (b < 0.0) => remainder + b,
                _ => remainder,
            };
            Ok((Value::from(((a - remainder) / b).round()), Value::from(remainder)))
        }
    }
}

fn is_divisible(value: &Value, divisor: &Value) -> Result<bool, Error> {
    divide("%", value, divisor).map(|(_, remainder)| number(&remainder) == 0.0)
}

fn power(a: &Value, b: &Value) -> Result<Value, Error> {
    numbers("**", a, b)?;
    match (integer(a), integer(b)) {
        (Some(a), Some(b)) if b >= 0 => {
            let power = u32::try_from(b).ok().and_then(|b| a.checked_pow(b));
            power.map(whole).ok_or_else(|| invalid("**: the result is too large"))
        }
        _ if number(a) == 0.0 && number(b) < 0.0 => Err(invalid("zero cannot be raised to a negative power")),
        _ if number(a) < 0.0 && number(b).fract() != 0.0 => Err(invalid("**: complex numbers are not supported")),
        _ => Some(number(a).powf(number(b)))
            .filter(|power| power.is_finite())
            .map(Value::from)
            .ok_or_else(|| invalid("**: the result is too large")),
    }
}

/// A chain of comparisons: a value, an operator, a value, an operator, a value, …
fn compare(chain: Rest<Value>) -> Result<bool, Error> {
    for (index, operator) in chain.iter().enumerate().skip(1).step_by(2) {
        let (a, b) = (&chain[index - 1], &chain[index + 1]);
        if !holds(a, operator.as_str().unwrap_or_default(), b)? {
            return Ok(false);
        }
    }
    Ok(true)
}

fn holds(a: &Value, operator: &str, b: &Value) -> Result<bool, Error> {
    let ordered = |accepts: fn(Ordering) -> bool| {
        let ordering = python_value::compare(a, b).map_err(|_| unsupported(operator, a, b))?;
        Ok(ordering.is_some_and(accepts))
    };
    match operator {
        "==" => Ok(python_value::equals(a, b)),
        "!=" => Ok(!python_value::equals(a, b)),
        "in" => contains(b, a),
        "not in" => contains(b, a).map(|contains| !contains),
        "<" => ordered(Ordering::is_lt),
        "<=" => ordered(Ordering::is_le),
        ">" => ordered(Ordering::is_gt),
        _ => ordered(Ordering::is_ge),
    }
}

pub(super) fn check_hashable(value: &Value) -> Result<(), Error> {
    match Type::of(value) {
        kind @ (Type::List | Type::Dict | Type::View) => {
            Err(invalid(format!("a value of type {} cannot be the key of a dict", kind.name())))
        }
        Type::Tuple => items(value)?.iter().try_for_each(check_hashable),
        _ => Ok(()),
    }
}

fn contains(container: &Value, value: &Value) -> Result<bool, Error> {
    match (Type::of(container), value.as_str()) {
        (Type::Str, Some(part)) => Ok(container.as_str().unwrap_or_default().contains(part)),
        (Type::Dict, _) => {
            check_hashable(value)?;
            Ok(items(container)?.iter().any(|key| python_value::equals(key, value)))
        }
        (Type::Generator, _) => Ok(container.try_iter()?.any(|item| python_value::equals(&item, value))),
        (kind, _) if kind.is_iterable() && kind != Type::Str => {
            Ok(items(container)?.iter().any(|item| python_value::equals(item, value)))
        }
        _ => Err(unsupported("in", value, container)),
    }
}

/// jinja's `range`.
pub(super) fn range(first: i64, second: Option<i64>, step: Option<i64>) -> Result<Value, Error> {
    let (start, stop) = second.map_or((0, first), |stop| (first, stop));
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(invalid("range() arg 3 must not be zero"));
    }
    let distance = if step > 0 { stop.saturating_sub(start) } else { start.saturating_sub(stop) };
    let stride = i64::try_from(step.unsigned_abs()).unwrap_or(i64::MAX);
    let len = distance.max(0).saturating_add(stride - 1) / stride;
    if usize::try_from(len).map_or(true, |len| len > MAX_RANGE) {
        return Err(invalid(format!("range too big: {len} numbers, at most {MAX_RANGE} are allowed")));
    }
    let text = if step == 1 { format!("range({start}, {stop})") } else { format!("range({start}, {stop}, {step})") };
    let items = (0..len).map(|index| Value::from(start + index * step)).collect();
    Ok(Value::from_object(Sequence { kind: SequenceKind::Range(text), items }))
}

/// Longest `range` of jinja's sandbox.
pub(super) const MAX_RANGE: usize = 100_000;
