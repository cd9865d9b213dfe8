//! Numbers that the engine keeps: it reads them as doubles, and writes the bounds of ranges as integers of 64 bits.

use serde_json::{Number, Value, json};

use super::Object;

/// The largest bound of the engine: 2^63 - 1 as the nearest double, which it takes for 2^63 - 1.
const MAX_BOUND: i128 = i64::MAX as i128;
/// The largest bound of fractions: the double before 2^63, since the engine writes their integer part with 64 bits.
const MAX_FRACTION_BOUND: i128 = 9_223_372_036_854_774_784;
/// The smallest bound of the engine: the double after -2^63, whose absolute value it could not write.
const MIN_BOUND: i128 = -9_223_372_036_854_774_784;
/// The engine finds the end of the digits of a lower bound up to here.
const MAX_OPEN_BOUND: i128 = 1_000_000_000_000_000_000;
/// All doubles up to here are exact integers.
const MAX_EXACT: i128 = 1 << 53;

/// Makes the engine keep the numbers of this schema, without its subschemas. Bounds beyond 64 bits become the nearest ones,
/// which is noted. Fails with the number that cannot be kept.
pub(super) fn make_exact(object: &mut Object, note: &mut dyn FnMut(String)) -> Result<(), String> {
    if let Some(value) = object.get("const") {
        check_instance("const", value)?;
    }
    for value in object.get("enum").and_then(Value::as_array).into_iter().flatten() {
        check_instance("enum", value)?;
    }
    if let Some(given) = object.get("multipleOf").and_then(Value::as_number) {
        let kept = multiple(given).ok_or_else(|| inexact("multipleOf", given))?;
        object.insert("multipleOf".to_owned(), kept.into());
    }
    let is_integer = match object.get("type") {
        Some(Value::Array(types)) => types.iter().all(|of| of != "number") && types.iter().any(|of| of == "integer"),
        of => of.is_some_and(|of| of == "integer"),
    };
    let lower = bound(object, Side::Lower, is_integer)?;
    let upper = bound(object, Side::Upper, is_integer)?;
    let max_bound = if is_integer { MAX_BOUND } else { MAX_FRACTION_BOUND };
    let (has_lower, has_upper) = (lower.is_some(), upper.is_some());
    // The engine needs the other end of a range of numbers as long as these.
    if !has_upper && lower.is_some_and(|lower| lower >= MAX_OPEN_BOUND) {
        object.insert("maximum".to_owned(), json!(max_bound as i64));
        note(format!("`minimum` is enforced with a `maximum` of {max_bound}"));
    }
    if !has_lower && upper.is_some_and(|upper| upper <= -MAX_OPEN_BOUND) {
        object.insert("minimum".to_owned(), json!(MIN_BOUND as i64));
        note(format!("`maximum` is enforced with a `minimum` of {MIN_BOUND}"));
    }
    for (side, bound) in [(Side::Lower, lower), (Side::Upper, upper)] {
        let Some(given) = bound.filter(|bound| !(MIN_BOUND..=max_bound).contains(bound)) else { continue };
        let [inclusive, exclusive] = side.keywords();
        let nearest = match side {
            Side::Lower if given < MIN_BOUND => MIN_BOUND as i64,
            Side::Upper if given > max_bound => max_bound as i64,
            _ => return Err(format!("`{inclusive}` {given} cannot be enforced: it has more than 64 bits")),
        };
        object.shift_remove(exclusive);
        object.insert(inclusive.to_owned(), nearest.into());
        note(format!("`{inclusive}` is enforced as {nearest}"));
    }
    Ok(())
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Lower,
    Upper,
}

impl Side {
    fn keywords(self) -> [&'static str; 2] {
        match self {
            Self::Lower => ["minimum", "exclusiveMinimum"],
            Self::Upper => ["maximum", "exclusiveMaximum"],
        }
    }
}

/// Checks the bounds of one side, and returns the tighter one's integer part. Exclusive bounds of large integers become
/// inclusive ones: the engine adds 1 to a double.
fn bound(object: &mut Object, side: Side, is_integer: bool) -> Result<Option<i128>, String> {
    let [inclusive, exclusive] = side.keywords();
    if is_integer {
        let step = if side == Side::Lower { 1 } else { -1 };
        let (key, given) = match object.get(exclusive) {
            Some(Value::Bool(true)) => (inclusive, object.get(inclusive)),
            given => (exclusive, given),
        };
        let given_number = given.and_then(Value::as_number).cloned();
        if let Some(given_number) = given_number
            && let Some(given) = integer(&given_number).filter(|given| given.abs() >= MAX_EXACT)
        {
            let next = given.saturating_add(step);
            let tighter = match object.get(inclusive).and_then(Value::as_number).and_then(integer) {
                Some(other) if key == exclusive && side == Side::Lower => other.max(next),
                Some(other) if key == exclusive => other.min(next),
                _ => next,
            };
            if in_reach(tighter) && !is_kept(tighter) {
                return Err(inexact(exclusive, &given_number));
            }
            // Beyond 64 bits, the caller replaces it.
            let shown = i64::try_from(tighter).map_or_else(|_| json!(tighter as f64), Value::from);
            object.shift_remove(exclusive);
            object.insert(inclusive.to_owned(), shown);
        }
    }
    let mut tighter: Option<i128> = None;
    for keyword in [inclusive, exclusive] {
        let Some(given) = object.get(keyword).and_then(Value::as_number) else { continue };
        let value = match integer(given) {
            Some(value) if value.abs() > MAX_EXACT && in_reach(value) && !is_kept(value) => {
                return Err(inexact(keyword, given));
            }
            Some(value) => value,
            // A fraction, or a number whose digits are zeros.
            None => given.as_f64().unwrap_or(f64::INFINITY) as i128,
        };
        tighter = Some(match (tighter, side) {
            (None, _) => value,
            (Some(other), Side::Lower) => other.max(value),
            (Some(other), Side::Upper) => other.min(value),
        });
    }
    Ok(tighter)
}

fn in_reach(value: i128) -> bool {
    (MIN_BOUND..=MAX_BOUND).contains(&value)
}

/// Whether the engine keeps this bound.
fn is_kept(value: i128) -> bool {
    value == MAX_BOUND || value as f64 as i128 == value
}

fn integer(given: &Number) -> Option<i128> {
    let whole = |value: f64| (value.fract() == 0.0 && value.abs() < 1e30).then_some(value as i128);
    given.as_i64().map(i128::from).or_else(|| given.as_u64().map(i128::from)).or_else(|| given.as_f64().and_then(whole))
}

/// Checks all numbers of an instance.
fn check_instance(keyword: &str, instance: &Value) -> Result<(), String> {
    match instance {
        Value::Number(given) => {
            // The engine writes an integer of more than 63 bits like a fraction: all digits of the double.
            let is_kept = match (given.as_i64().map(i128::from), given.as_u64()) {
                (Some(value), _) => (value.abs() <= MAX_EXACT || is_kept(value)) && value >= MIN_BOUND,
                (None, Some(value)) => value as f64 as u128 == u128::from(value),
                (None, None) => true,
            };
            if is_kept { Ok(()) } else { Err(inexact(keyword, given)) }
        }
        Value::Array(values) => values.iter().try_for_each(|value| check_instance(keyword, value)),
        Value::Object(fields) => fields.values().try_for_each(|value| check_instance(keyword, value)),
        _ => Ok(()),
    }
}

/// A double that the engine reads as this number: it multiplies with 10 until no fraction is left.
fn multiple(given: &Number) -> Option<Number> {
    let value = given.as_f64().filter(|value| value.is_finite())?.abs();
    if value == 0.0 || integer(given).is_some_and(|value| value.abs() > MAX_EXACT) {
        return None;
    }
    let exact = decimal(&value.to_string())?;
    let near = [0, 1, -1, 2, -2, 3, -3]
        .into_iter()
        .map(|offset: i64| f64::from_bits(value.to_bits().wrapping_add_signed(offset)));
    let kept = near.into_iter().find(|&near| as_read(near) == Some(exact))?;
    if kept.fract() == 0.0 { Some(Number::from(kept as u64)) } else { Number::from_f64(kept) }
}

/// Checks that the engine can combine multiples: it computes their least common one with 32 bits.
pub(super) fn check_common_multiple<'a>(multiples: impl Iterator<Item = &'a Number>) -> Result<(), String> {
    let mut common: Option<(u32, u32)> = None;
    for given in multiples {
        let Some((factor, places)) = given.as_f64().and_then(|value| as_read(value.abs())) else { continue };
        let Some((other, other_places)) = common else {
            common = Some((factor, places));
            continue;
        };
        let all = places.max(other_places);
        let scaled = |factor: u32, places: u32| factor.checked_mul(10_u32.checked_pow(all - places)?);
        let product = scaled(factor, places)
            .zip(scaled(other, other_places))
            .filter(|(one, two)| one.checked_mul(*two).is_some());
        let Some((one, two)) = product else {
            return Err(format!("`multipleOf` {given} and that of another schema cannot be enforced together"));
        };
        common = Some(reduced(one * two / greatest_common_divisor(one, two).max(1), all));
    }
    Ok(())
}

fn greatest_common_divisor(one: u32, other: u32) -> u32 {
    if other == 0 { one } else { greatest_common_divisor(other, one % other) }
}

/// Coefficient and number of decimal places, as the engine computes them.
fn as_read(mut value: f64) -> Option<(u32, u32)> {
    let mut places = 0;
    while value.fract() != 0.0 {
        value *= 10.0;
        places += 1;
    }
    (value <= f64::from(u32::MAX)).then(|| reduced(value as u32, places))
}

/// Coefficient and number of decimal places of digits.
fn decimal(text: &str) -> Option<(u32, u32)> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    Some(reduced(format!("{whole}{fraction}").parse().ok()?, fraction.len() as u32))
}

fn reduced(mut coefficient: u32, mut places: u32) -> (u32, u32) {
    while places > 0 && coefficient.is_multiple_of(10) {
        coefficient /= 10;
        places -= 1;
    }
    (coefficient, places)
}

fn inexact(keyword: &str, given: &Number) -> String {
    format!(
        "`{keyword}` {given} cannot be enforced exactly, because it has too many digits; send another number, or a string"
    )
}
