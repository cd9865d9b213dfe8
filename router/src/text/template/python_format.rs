//! Python's formatting of texts, with `%` and with braces.

use minijinja::value::{Kwargs, Rest, from_args};
use minijinja::{Error, State, Value};
use minijinja_contrib::pycompat;

use super::python_value::{self, Type, integer, invalid};
use super::{python_json, python_str};

/// `pattern % values`, where a tuple is several values.
pub(super) fn with_operator(pattern: &str, values: &Value) -> Result<String, Error> {
    match Type::of(values) {
        Type::Tuple => format(pattern, &python_value::items(values)?, true),
        Type::Dict if pattern.contains("%(") => Err(invalid("%(name) in a format is not supported")),
        // Python ignores a mapping that the pattern does not use.
        Type::Dict | Type::List | Type::Range => format(pattern, std::slice::from_ref(values), false),
        // Jinja's undefined value has an item access, too.
        Type::Undefined => format(pattern, std::slice::from_ref(values), false),
        _ => format(pattern, std::slice::from_ref(values), true),
    }
}

#[derive(Default)]
struct Conversion {
    left: bool,
    zeros: bool,
    sign: Option<char>,
    alternate: bool,
    width: usize,
    precision: Option<usize>,
}

/// `needs_all`: whether every value must be used.
pub(super) fn format(pattern: &str, values: &[Value], needs_all: bool) -> Result<String, Error> {
    let mut out = String::new();
    let mut values_left = values.iter();
    let mut chars = pattern.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let mut conversion = Conversion::default();
        while let Some(flag) = chars.next_if(|c| "-0+ #".contains(*c)) {
            match flag {
                '-' => conversion.left = true,
                '0' => conversion.zeros = true,
                '#' => conversion.alternate = true,
                '+' => conversion.sign = Some('+'),
                _ => conversion.sign = conversion.sign.or(Some(' ')),
            }
        }
        let mut digits = || {
            let mut digits = String::new();
            while let Some(digit) = chars.next_if(char::is_ascii_digit) {
                digits.push(digit);
            }
            digits
        };
        let limited = |digits: String| match digits.parse() {
            Ok(number) if number <= 10_000 => Ok(number),
            _ if digits.is_empty() => Ok(0),
            _ => Err(invalid("a width or precision of a format is too large")),
        };
        conversion.width = limited(digits())?;
        if chars.next_if_eq(&'.').is_some() {
            let mut digits = String::new();
            while let Some(digit) = chars.next_if(char::is_ascii_digit) {
                digits.push(digit);
            }
            conversion.precision = Some(limited(digits)?);
        }
        match chars.next() {
            Some('%') => out.push('%'),
            Some(kind) => {
                let value = values_left.next().ok_or_else(|| invalid("not enough arguments for format string"))?;
                out.push_str(&conversion.apply(kind, value)?);
            }
            None => return Err(invalid("incomplete format")),
        }
    }
    if needs_all && values_left.next().is_some() {
        return Err(invalid("not all arguments converted during string formatting"));
    }
    Ok(out)
}

impl Conversion {
    fn apply(&self, kind: char, value: &Value) -> Result<String, Error> {
        let is_number = Type::of(value).is_number();
        let wrong = || invalid(format!("%{kind} takes no value of type {}", Type::of(value).name()));
        let cut = |text: String| match self.precision {
            Some(precision) => text.chars().take(precision).collect(),
            None => text,
        };
        match kind {
            's' => Ok(self.padded("", &cut(python_str::str(value)?))),
            'r' => Ok(self.padded("", &cut(python_str::repr_text(value)?))),
            'd' | 'i' | 'u' if is_number => {
                let number = whole(value).ok_or_else(wrong)?;
                Ok(self.numeric(number < 0, "", &self.with_zeros(number.unsigned_abs().to_string())))
            }
            'x' | 'X' | 'o' => {
                let number = integer(value).ok_or_else(wrong)?;
                let magnitude = number.unsigned_abs();
                let (prefix, text) = match kind {
                    'x' => ("0x", format!("{magnitude:x}")),
                    'X' => ("0X", format!("{magnitude:X}")),
                    _ => ("0o", format!("{magnitude:o}")),
                };
                Ok(self.numeric(number < 0, if self.alternate { prefix } else { "" }, &self.with_zeros(text)))
            }
            'f' | 'F' | 'e' | 'E' if is_number && !self.alternate => {
                let number = python_value::number(value);
                let precision = self.precision.unwrap_or(6);
                let text = match kind {
                    'f' | 'F' => format!("{:.precision$}", number.abs()),
                    _ => python_json::with_python_exponent(&format!("{:.precision$e}", number.abs())),
                };
                if !number.is_finite() {
                    return Err(wrong());
                }
                let text = if kind == 'E' { text.to_uppercase() } else { text };
                Ok(self.numeric(number.is_sign_negative(), "", &text))
            }
            'c' => match value.as_str().map(|text| text.chars().count()) {
                Some(1) => Ok(self.padded("", value.as_str().unwrap_or_default())),
                _ => Err(invalid("%c of a value that is not one character is not supported")),
            },
            _ if "diufFeE".contains(kind) && !is_number => Err(wrong()),
            _ => Err(invalid(format!("the format %{kind} is not supported"))),
        }
    }

    fn with_zeros(&self, digits: String) -> String {
        let missing = self.precision.unwrap_or(0).saturating_sub(digits.len());
        "0".repeat(missing) + &digits
    }

    fn numeric(&self, is_negative: bool, prefix: &str, digits: &str) -> String {
        let sign = if is_negative { Some('-') } else { self.sign };
        let head = sign.map(String::from).unwrap_or_default() + prefix;
        if self.zeros && !self.left {
            let missing = self.width.saturating_sub(head.len() + digits.len());
            return format!("{head}{}{digits}", "0".repeat(missing));
        }
        self.padded(&head, digits)
    }

    fn padded(&self, head: &str, text: &str) -> String {
        let missing = " ".repeat(self.width.saturating_sub(head.len() + text.chars().count()));
        if self.left { format!("{head}{text}{missing}") } else { format!("{missing}{head}{text}") }
    }
}

#[expect(clippy::cast_possible_truncation, reason = "Python truncates, too")]
fn whole(value: &Value) -> Option<i128> {
    integer(value)
        .or_else(|| Some(python_value::number(value)).filter(|number| number.is_finite()).map(|number| number as i128))
}

/// `pattern.format(arguments)`.
pub(super) fn with_braces(state: &State<'_, '_>, pattern: &str, arguments: &[Value]) -> Result<String, Error> {
    let (positional, named): (Rest<Value>, Kwargs) = from_args(arguments)?;
    let mut out = String::new();
    let mut num_automatic = 0;
    let mut rest = pattern;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let (brace, after) = rest[at..].split_at(1);
        if let Some(after) = after.strip_prefix(brace) {
            out.push_str(brace);
            rest = after;
            continue;
        }
        let (field, after) =
            after.split_once('}').filter(|_| brace == "{").ok_or_else(|| invalid("single brace in a format"))?;
        rest = after;
        let (field, specification) = field.split_once(':').unwrap_or((field, ""));
        let (name, conversion) = field.split_once('!').unwrap_or((field, ""));
        if name.contains(['.', '[', '{']) || specification.contains('{') {
            return Err(invalid(format!("the format field {name:?} is not supported: it is no number and no name")));
        }
        let value = match name.parse::<usize>() {
            _ if name.is_empty() => {
                num_automatic += 1;
                positional.get(num_automatic - 1).cloned()
            }
            Ok(index) => positional.get(index).cloned(),
            Err(_) => named.get::<Option<Value>>(name)?,
        };
        let value = value.ok_or_else(|| invalid(format!("the format field {name:?} has no value")))?;
        let value = match conversion {
            "" => value,
            "s" => Value::from(python_str::str(&value)?),
            "r" => Value::from(python_str::repr_text(&value)?),
            other => return Err(invalid(format!("the conversion !{other} is not supported"))),
        };
        if specification.is_empty() {
            out.push_str(&python_str::str(&value)?);
            continue;
        }
        let kind = Type::of(&value);
        if kind != Type::Str && !kind.is_number() {
            return Err(invalid(format!("a value of type {} takes no format specification", kind.name())));
        }
        let field = Value::from(format!("{{:{specification}}}"));
        let formatted = pycompat::unknown_method_callback(state, &field, "format", &[value])?;
        out.push_str(formatted.as_str().unwrap_or_default());
    }
    out.push_str(rest);
    Ok(out)
}
