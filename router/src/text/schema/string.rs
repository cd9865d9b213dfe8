//! Formats and patterns.

use serde_json::{Value, json};

use super::{Enforcement, Object, Pass, ecma, pattern, place};

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
        self.pattern(object, path)?;
        self.pattern_properties(object, path)
    }

    fn pattern(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        let Some(given) = object.get("pattern").and_then(Value::as_str).map(str::to_owned) else { return Ok(()) };
        let (mut patterns, last) = ecma::split_look_aheads(&given).unwrap_or_else(|| (Vec::new(), given.clone()));
        patterns.push(last);
        let mut patterns: Vec<_> = patterns.iter().map(|pattern| ecma::translated(pattern)).collect();
        if let Some(problem) = patterns.iter().find_map(|pattern| pattern::check(pattern).err()) {
            object.shift_remove("pattern");
            return self.leave_out(&format!("`pattern` {given:?}, which {problem},"), path);
        }
        if let Some(last) = patterns.pop() {
            object.insert("pattern".to_owned(), last.into());
        }
        if !patterns.is_empty()
            && let Some(all) = object.entry("allOf").or_insert_with(|| json!([])).as_array_mut()
        {
            all.extend(patterns.into_iter().map(|pattern| json!({"pattern": pattern})));
        }
        Ok(())
    }

    /// The engine needs patterns of which no name matches two.
    fn pattern_properties(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        let Some(Value::Object(given)) = object.get_mut("patternProperties").map(Value::take) else { return Ok(()) };
        let mut kept = Object::new();
        for (pattern, schema) in given {
            let translated = ecma::translated(&pattern);
            let overlaps = |other: &String| !pattern::are_disjoint(&translated, other);
            let problem = match pattern::check(&translated) {
                Ok(()) if self.enforcement == Enforcement::Lenient => kept
                    .keys()
                    .find(|other| overlaps(other))
                    .map(|other| format!("may match names that {other:?} matches")),
                checked => checked.err(),
            };
            match problem {
                None => drop(kept.insert(translated, schema)),
                Some(problem) => {
                    self.leave_out(&format!("`patternProperties` {pattern:?}, which {problem},"), path)?;
                    // Names of this pattern must not be excluded.
                    object.shift_remove("additionalProperties");
                }
            }
        }
        object.insert("patternProperties".to_owned(), kept.into());
        Ok(())
    }
}
