//! Numbers in schemas that a double would change. The JSON parser reads integers of more than 64 bits, and all fractions, as
//! doubles; afterwards nothing tells that digits are missing.

use std::sync::LazyLock;

use regex::bytes::Regex;

/// Keywords of schemas whose numbers matter.
const NUMERIC: [&[u8]; 7] =
    [b"const", b"enum", b"minimum", b"maximum", b"exclusiveMinimum", b"exclusiveMaximum", b"multipleOf"];
/// One of them as it is written.
static KEYWORD: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(&format!("\"(?:{})\"", NUMERIC.map(String::from_utf8_lossy).join("|")))
        .expect("invariant: keywords are a valid pattern")
});
/// Fields of requests that hold conversations, and keywords of schemas that hold examples.
const DATA: [&[u8]; 9] =
    [b"messages", b"input", b"inputs", b"prompt", b"system", b"metadata", b"default", b"examples", b"example"];

/// Refuses a schema, or a request with schemas, that has such a number. Invalid JSON passes.
pub(crate) fn check(json: &[u8]) -> Result<(), String> {
    // PERF: most requests have no schema, and this search is many times as fast as reading.
    if !KEYWORD.is_match(json) {
        return Ok(());
    }
    // The key of each enclosing object or, for lists, of the list.
    let mut keys: Vec<&[u8]> = vec![b""];
    let mut position = 0;
    while let Some(&byte) = json.get(position) {
        match byte {
            b'"' => {
                let end = string_end(json, position + 1);
                let rest = json[end.min(json.len())..].trim_ascii_start();
                if rest.first() == Some(&b':')
                    && let Some(key) = keys.last_mut()
                {
                    *key = &json[position + 1..end - 1];
                }
                position = end;
                continue;
            }
            b'{' | b'[' => keys.push(b""),
            b'}' | b']' => drop(keys.pop()),
            b'-' | b'0'..=b'9' => {
                let is_part = |byte: &u8| byte.is_ascii_digit() || b"+-.eE".contains(byte);
                let length = json[position..].iter().take_while(|byte| is_part(byte)).count();
                let literal = &json[position..position + length];
                if length > MAX_EXACT_BYTES
                    && keys.iter().any(|key| NUMERIC.contains(key))
                    && !keys.iter().any(|key| DATA.contains(key))
                    && let Ok(literal) = str::from_utf8(literal)
                    && !is_exact(literal)
                {
                    let keyword = keys.iter().rev().find(|key| NUMERIC.contains(key)).copied().unwrap_or_default();
                    return Err(format!(
                        "`{}` {literal} cannot be enforced exactly, because it has too many digits; send another number, or \
                         a string",
                        String::from_utf8_lossy(keyword)
                    ));
                }
                position += length;
                continue;
            }
            _ => {}
        }
        position += 1;
    }
    Ok(())
}

/// Literals up to this length are exact.
const MAX_EXACT_BYTES: usize = 4;

/// The position after the closing quote.
fn string_end(json: &[u8], mut position: usize) -> usize {
    while let Some(&byte) = json.get(position) {
        position += match byte {
            b'"' => return position + 1,
            b'\\' => 2,
            _ => 1,
        };
    }
    json.len() + 1
}

/// Whether the parser keeps the number's value. One that is no JSON, or beyond all doubles, is left to the parser.
fn is_exact(literal: &str) -> bool {
    if literal.parse::<i64>().is_ok() || literal.parse::<u64>().is_ok() {
        return true;
    }
    match literal.parse::<f64>() {
        Ok(value) if value.is_finite() => digits(literal) == digits(&format!("{value:e}")),
        _ => true,
    }
}

/// The significant digits of a number, and the power of ten of the last one.
fn digits(literal: &str) -> (String, i64) {
    let literal = literal.trim_start_matches('-');
    let (mantissa, exponent) = literal.split_once(['e', 'E']).unwrap_or((literal, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let all = format!("{whole}{fraction}");
    let significant = all.trim_end_matches('0');
    let exponent = exponent.trim_start_matches('+').parse().unwrap_or(0_i64);
    let last = exponent - fraction.len() as i64 + (all.len() - significant.len()) as i64;
    match significant.trim_start_matches('0') {
        "" => (String::new(), 0),
        significant => (significant.to_owned(), last),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_a_double_would_change_are_refused_by_name() {
        for (schema, keyword) in [
            (r#"{"const": 123456789012345678901234567890}"#, "const"),
            (r#"{"const": {"a": [9007199254740993.0]}}"#, "const"),
            (r#"{"enum": ["a", {"b": 0.12345678901234567890}]}"#, "enum"),
            (r#"{"properties": {"a\"{": {"minimum" : -18446744073709551617}}}"#, "minimum"),
            (r#"{"exclusiveMaximum": 1.00000000000000000001e30}"#, "exclusiveMaximum"),
            (r#"{"multipleOf": 0.1000000000000000055}"#, "multipleOf"),
            (r#"{"const": 1e-400}"#, "const"),
        ] {
            let error = check(schema.as_bytes()).unwrap_err();
            assert!(error.starts_with(&format!("`{keyword}` ")), "{schema}: {error}");
        }
    }

    #[test]
    fn other_numbers_pass() {
        for json in [
            r#"{"const": 18446744073709551615, "enum": [-9223372036854775808, 0.1, 1e22, 100000000000000000000]}"#,
            r#"{"minimum": -3.4028234663852886e+38, "maximum": 1.7976931348623157e308, "multipleOf": 0.010}"#,
            r#"{"default": {"const": 123456789012345678901234567890}}"#,
            r#"{"messages": [{"tool_calls": [{"minimum": 123456789012345678901234567890}]}]}"#,
            r#"{"temperature": 0.12345678901234567890}"#,
            r#"{"const": "123456789012345678901234567890"#,
            r#"{"const": 1e400, "enum": [-0.0, 0e5]}"#,
            "}}]\"",
        ] {
            assert_eq!(check(json.as_bytes()), Ok(()), "{json}");
        }
    }
}
