//! Keywords that the engine lacks: those that say nothing are removed, and those that say the same as others are replaced.

use std::collections::HashSet;

use serde_json::Value;

use super::{Object, Pass, place};

/// The engine keeps four items for each property that may come next, and at most 2,000.
const MAX_OPTIONAL: usize = 400;

/// With these keywords, properties or items may be evaluated elsewhere.
const APPLICATORS: [&str; 8] = ["$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef", "not"];
/// Keywords that the engine lacks and that have no other form.
const UNKNOWN: [&str; 2] = ["$dynamicRef", "$recursiveRef"];

impl Pass<'_> {
    /// Returns whether no instance matches.
    pub(super) fn keywords(&mut self, object: &mut Object, path: &str) -> Result<bool, String> {
        self.unevaluated(object, path)?;
        if self.negation(object, path)? {
            return Ok(true);
        }
        self.condition(object, path)?;
        self.contains(object, path)?;
        self.unique_items(object, path)?;
        self.dependencies(object, path)?;
        self.property_names(object, path)?;
        for keyword in UNKNOWN {
            if object.shift_remove(keyword).is_some() {
                self.leave_out(&format!("`{keyword}`"), path)?;
            }
        }
        self.number_of_properties(object, path)?;
        Ok(false)
    }

    fn negation(&mut self, object: &mut Object, path: &str) -> Result<bool, String> {
        let Some(not) = object.shift_remove("not") else { return Ok(false) };
        if is_any(&not) {
            return Ok(true);
        }
        let excluded = match (not.get("const"), not.get("enum").and_then(Value::as_array)) {
            _ if not.as_object().is_none_or(|not| not.len() != 1) => None,
            (Some(value), _) => Some(vec![value.clone()]),
            (None, values) => values.cloned(),
        };
        match (not, excluded, object.get_mut("enum").and_then(Value::as_array_mut)) {
            (Value::Bool(false), ..) => {}
            (_, Some(excluded), Some(values)) => {
                values.retain(|value| !excluded.contains(value));
                return Ok(values.is_empty());
            }
            _ => self.leave_out("`not`", path)?,
        }
        Ok(false)
    }

    fn condition(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        let [condition, then, otherwise] = ["if", "then", "else"].map(|keyword| object.shift_remove(keyword));
        let narrows = [then, otherwise].iter().flatten().any(|schema| !is_any(schema));
        if condition.is_some() && narrows { self.leave_out("`if`", path) } else { Ok(()) }
    }

    fn contains(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        let [least, most] = ["minContains", "maxContains"].map(|keyword| object.shift_remove(keyword));
        let Some(contains) = object.shift_remove("contains") else { return Ok(()) };
        let least = least.and_then(|least| least.as_u64()).unwrap_or(1);
        let most = most.and_then(|most| most.as_u64());
        if is_any(&contains) {
            let bound = |keyword: &str| object.get(keyword).and_then(Value::as_u64);
            let min = bound("minItems").unwrap_or(0).max(least);
            let max = bound("maxItems").into_iter().chain(most).min();
            object.insert("minItems".to_owned(), min.into());
            if let Some(max) = max {
                object.insert("maxItems".to_owned(), max.into());
            }
            Ok(())
        } else if least == 0 && most.is_none() {
            Ok(())
        } else {
            self.leave_out("`contains`", path)
        }
    }

    fn unique_items(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        let unique = object.shift_remove("uniqueItems");
        let has_several = object.get("maxItems").and_then(Value::as_u64).is_none_or(|most| most > 1);
        if unique == Some(Value::Bool(true)) && has_several { self.leave_out("`uniqueItems`", path) } else { Ok(()) }
    }

    fn unevaluated(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        for (keyword, evaluating) in [("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")]
        {
            let Some(schema) = object.shift_remove(keyword) else { continue };
            if is_any(&schema) {
                continue;
            }
            if APPLICATORS.iter().any(|keyword| object.contains_key(*keyword)) || object.contains_key("contains") {
                self.leave_out(&format!("`{keyword}`"), path)?;
            } else if !object.contains_key(evaluating) {
                object.insert(evaluating.to_owned(), schema);
            }
        }
        Ok(())
    }

    fn dependencies(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        for keyword in ["dependentRequired", "dependentSchemas", "dependencies"] {
            let given = object.shift_remove(keyword);
            let says_nothing = |of: &Value| is_any(of) || of.as_array().is_some_and(Vec::is_empty);
            let narrows = |given: &Value| given.as_object().is_none_or(|by_name| !by_name.values().all(says_nothing));
            if given.as_ref().is_some_and(narrows) {
                self.leave_out(&format!("`{keyword}`"), path)?;
            }
        }
        Ok(())
    }

    /// The engine counts properties only where all of them are required, or all but one kind are excluded.
    fn number_of_properties(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        let required = object.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
        let names: HashSet<&str> =
            object.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
        let is_required = |name: &str| names.contains(name);
        let declared = object.get("properties").and_then(Value::as_object);
        let num_optional = declared.map_or(0, |named| named.keys().filter(|name| !is_required(name)).count());
        if num_optional > MAX_OPTIONAL {
            return Err(format!(
                "`properties` lists {num_optional} that are not required, at most {MAX_OPTIONAL} are allowed; require them, or \
                 group them in objects; at {}",
                place(path)
            ));
        }
        let has_optional = num_optional > 0;
        let limit = |keyword: &str| object.get(keyword).and_then(Value::as_u64);
        let (least, most) = (limit("minProperties").unwrap_or(0), limit("maxProperties"));
        let is_closed = object.get("additionalProperties") == Some(&Value::Bool(false));
        let is_one = least.saturating_sub(required) <= 1
            && most.is_none_or(|most| most.saturating_sub(required) == 1)
            && is_closed
            && !object.contains_key("patternProperties");
        if has_optional && !is_one && (least > required || most.is_some()) {
            for keyword in ["minProperties", "maxProperties"] {
                if object.shift_remove(keyword).is_some() {
                    self.leave_out(&format!("`{keyword}`, with `properties` that are not required,"), path)?;
                }
            }
        }
        Ok(())
    }
}

/// Whether every instance matches: there are annotations only.
pub(super) fn is_any(schema: &Value) -> bool {
    const ANNOTATIONS: [&str; 9] =
        ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "example"];
    match schema {
        Value::Bool(allows) => *allows,
        Value::Object(object) => {
            object.keys().all(|keyword| ANNOTATIONS.contains(&keyword.as_str()) || keyword.starts_with("x-"))
        }
        _ => false,
    }
}
