//! Writes JSON as Python's `json.dumps(value, ensure_ascii=False)` does, which models were trained with.

use serde_json::{Map, Value};

/// The arguments of `json.dumps` that templates use.
#[derive(Clone, Debug, Default)]
pub(super) struct Style {
    /// Spaces per level; `None` writes one line.
    pub(super) indent: Option<usize>,
    /// Between items, and between key and value.
    pub(super) separators: Option<(String, String)>,
    pub(super) sort_keys: bool,
    pub(super) ensure_ascii: bool,
}

/// The value as JSON text.
pub(super) fn to_string(value: &Value, style: &Style) -> String {
    let default_item = if style.indent.is_some() { "," } else { ", " };
    let (item, key) = style.separators.as_ref().map_or((default_item, ": "), |(item, key)| (item, key));
    let mut writer = Writer { style, item_separator: item, key_separator: key, out: String::new() };
    writer.value(value, 0);
    writer.out
}

struct Writer<'a> {
    style: &'a Style,
    item_separator: &'a str,
    key_separator: &'a str,
    out: String,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) {
        match value {
            Value::Null => self.out.push_str("null"),
            Value::Bool(true) => self.out.push_str("true"),
            Value::Bool(false) => self.out.push_str("false"),
            Value::Number(number) if number.is_f64() => {
                self.out.push_str(&python_float(number.as_f64().unwrap_or_default()));
            }
            Value::Number(number) => self.out.push_str(&number.to_string()),
            Value::String(text) => self.string(text),
            Value::Array(items) if items.is_empty() => self.out.push_str("[]"),
            Value::Array(items) => self.array(items, depth),
            Value::Object(fields) if fields.is_empty() => self.out.push_str("{}"),
            Value::Object(fields) => self.object(fields, depth),
        }
    }

    fn array(&mut self, items: &[Value], depth: usize) {
        self.out.push('[');
        for (index, item) in items.iter().enumerate() {
            self.before_item(index, depth + 1);
            self.value(item, depth + 1);
        }
        self.line(depth);
        self.out.push(']');
    }

    fn object(&mut self, fields: &Map<String, Value>, depth: usize) {
        let mut fields: Vec<_> = fields.iter().collect();
        if self.style.sort_keys {
            fields.sort_by_key(|(name, _)| *name);
        }
        self.out.push('{');
        for (index, (name, value)) in fields.into_iter().enumerate() {
            self.before_item(index, depth + 1);
            self.string(name);
            self.out.push_str(self.key_separator);
            self.value(value, depth + 1);
        }
        self.line(depth);
        self.out.push('}');
    }

    fn before_item(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.out.push_str(self.item_separator);
        }
        self.line(depth);
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.style.ensure_ascii && !(' '..='~').contains(&c)) => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Python's `repr` of a float: the shortest digits, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn python_float(value: f64) -> String {
    let magnitude = value.abs();
    if value == 0.0 || (1e-4..1e16).contains(&magnitude) {
        return format!("{value:?}");
    }
    with_python_exponent(&format!("{value:e}"))
}

/// The number with a sign and at least two digits in its exponent.
pub(super) fn with_python_exponent(number: &str) -> String {
    let Some((digits, exponent)) = number.split_once('e') else { return number.to_owned() };
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
    format!("{digits}e{sign}{exponent:0>2}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_text_equals_python_s() {
        let value = json!({"b": [1, 2.0, 1e16, 1e-5, true, null], "a": {"é\n": "<'&\">"}, "e": [], "o": {}});
        insta::assert_snapshot!(to_string(&value, &Style::default()), @r#"{"b": [1, 2.0, 1e+16, 1e-05, true, null], "a": {"é\n": "<'&\">"}, "e": [], "o": {}}"#);
        let style = Style { indent: Some(2), sort_keys: true, ensure_ascii: true, ..Style::default() };
        insta::assert_snapshot!(to_string(&json!({"b": [1, "é😀"], "a": {}}), &style), @r#"
        {
          "a": {},
          "b": [
            1,
            "\u00e9\ud83d\ude00"
          ]
        }
        "#);
    }
}
