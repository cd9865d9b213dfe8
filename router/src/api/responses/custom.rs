//! The free-form input of custom tools. The model calls them as functions with one argument, `input`, because formats of calls have no
//! other.

use serde_json::{Value, json};

const INPUT: &str = "input";

/// The JSON schema of the arguments. `pattern`: a regular expression of the whole input.
pub(super) fn schema(pattern: Option<&str>) -> Value {
    let mut input = json!({"type": "string"});
    if let Some(pattern) = pattern {
        input["pattern"] = format!("^(?:{})$", without_anchors(pattern)).into();
    }
    json!({"type": "object", "properties": {INPUT: input}, "required": [INPUT], "additionalProperties": false})
}

/// The pattern without the anchors of a whole text.
fn without_anchors(pattern: &str) -> &str {
    let pattern = pattern.strip_prefix('^').unwrap_or(pattern);
    pattern.strip_suffix('$').filter(|rest| !rest.ends_with('\\')).unwrap_or(pattern)
}

/// The arguments of a call with this input, as JSON text.
pub(super) fn arguments(input: &str) -> String {
    json!({INPUT: input}).to_string()
}

/// Reads the input out of a call's arguments as they arrive.
#[derive(Debug, Default)]
pub(crate) struct InputReader {
    /// JSON text that is not read yet.
    unread: String,
    state: State,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Before,
    Within,
    After,
}

impl InputReader {
    /// The input that a fragment of the arguments completes.
    pub(crate) fn push(&mut self, fragment: &str) -> String {
        self.unread.push_str(fragment);
        if self.state == State::Before
            && let Some(start) = start(&self.unread)
        {
            self.unread.drain(..start);
            self.state = State::Within;
        }
        if self.state != State::Within {
            return String::new();
        }
        let (end, is_end) = complete(&self.unread);
        let text = decoded(&self.unread[..end]);
        self.unread.drain(..end);
        if is_end {
            self.state = State::After;
        }
        text
    }

    /// What is left at the end: the arguments themselves, if they are not those of a custom tool.
    pub(crate) fn finish(&mut self) -> String {
        let is_other = std::mem::take(&mut self.state) == State::Before;
        let unread = std::mem::take(&mut self.unread);
        if is_other && !"{\"input\":".starts_with(unread.replace(' ', "").as_str()) { unread } else { String::new() }
    }
}

/// Byte offset at which the text of the input starts.
fn start(json: &str) -> Option<usize> {
    let rest = json.trim_start().strip_prefix('{')?.trim_start().strip_prefix("\"input\"")?;
    let text = rest.trim_start().strip_prefix(':')?.trim_start().strip_prefix('"')?;
    Some(json.len() - text.len())
}

/// The bytes of a JSON string's inside that are complete, and whether its end follows.
fn complete(text: &str) -> (usize, bool) {
    let bytes = text.as_bytes();
    let unit = |at: usize| u16::from_str_radix(text.get(at + 2..at + 6)?, 16).ok();
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let num_bytes = match (byte, bytes.get(at + 1)) {
            (b'"', _) => return (at, true),
            (b'\\', None) => break,
            (b'\\', Some(b'u')) => match unit(at) {
                // The first half of a character.
                Some(0xD800..=0xDBFF) => 12,
                _ => 6,
            },
            (b'\\', Some(_)) => 2,
            _ => 1,
        };
        if at + num_bytes > bytes.len() {
            break;
        }
        at += num_bytes;
    }
    (at, false)
}

/// The text of a JSON string's inside; what is not one stays as it is.
fn decoded(text: &str) -> String {
    serde_json::from_str(&format!("\"{text}\"")).unwrap_or_else(|_| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<'a>(fragments: impl IntoIterator<Item = &'a str>) -> String {
        let mut reader = InputReader::default();
        let text: String = fragments.into_iter().map(|fragment| reader.push(fragment)).collect();
        text + &reader.finish()
    }

    #[test]
    fn the_input_is_the_same_however_its_arguments_are_cut() {
        let input = "a \"b\"\n\\n é 😀 }";
        for arguments in [arguments(input), r#"{ "input" : "a \"b\"\n\\n \u00e9 \ud83d\ude00 }" }"#.to_owned()] {
            let cut = arguments.char_indices().map(|(at, c)| &arguments[at..at + c.len_utf8()]);
            assert_eq!(read(cut), input, "{arguments}");
            assert_eq!(read([arguments.as_str()]), input, "{arguments}");
        }
    }

    #[test]
    fn other_arguments_are_the_input_themselves() {
        assert_eq!(read([r#"{"city": "#, r#""x"}"#]), r#"{"city": "x"}"#);
        assert_eq!(read([r#"{"inp"#]), "", "of a call that was cut");
    }
}
