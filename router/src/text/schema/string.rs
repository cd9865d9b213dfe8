//! Formats and patterns.

use serde_json::Value;

use super::{Enforcement, Object, Pass, pattern, place};

/// Formats that the engine enforces.
const ENFORCED: [&str; 11] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];
/// Formats of the specification that are not enforced. All others are names that its readers have agreed upon.
const STANDARD: [&str; 9] = [
    "idn-email",
    "idn-hostname",
    "uri-reference",
    "iri",
    "iri-reference",
    "uri-template",
    "json-pointer",
    "relative-json-pointer",
    "regex",
];

impl Pass<'_> {
    pub(super) fn string(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        if let Some(Value::String(format)) = object.get("format")
            && !ENFORCED.contains(&format.as_str())
        {
            if STANDARD.contains(&format.as_str()) {
                // The specification calls a format an annotation, so it is never a reason to refuse.
                self.left_out.push(format!("`format` {format:?} at {} is not enforced", place(path)));
            }
            object.shift_remove("format");
        }
        if let Some(Value::String(given)) = object.get("pattern")
            && let Err(problem) = pattern::check(given)
        {
            self.leave_out(&format!("`pattern` {given:?}, which {problem},"), path)?;
            object.shift_remove("pattern");
        }
        if self.enforcement == Enforcement::Lenient
            && let Some(Value::Object(patterns)) = object.get("patternProperties")
        {
            let irregular: Vec<_> =
                patterns.keys().filter_map(|given| Some((given.clone(), pattern::check(given).err()?))).collect();
            for (given, problem) in irregular {
                self.leave_out(&format!("`patternProperties` {given:?}, which {problem},"), path)?;
                if let Some(Value::Object(patterns)) = object.get_mut("patternProperties") {
                    patterns.shift_remove(&given);
                    // Names of this pattern must not be excluded.
                    object.shift_remove("additionalProperties");
                }
            }
        }
        Ok(())
    }
}
