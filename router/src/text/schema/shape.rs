//! Whether keywords have values that JSON Schema allows them.

use serde_json::Value;

use super::{Object, Pass, place};

const TYPES: [&str; 7] = ["null", "boolean", "number", "integer", "string", "array", "object"];
pub(super) const COUNTS: [&str; 8] =
    ["minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains"];
const MAX_SHOWN_CHARACTERS: usize = 40;

impl Pass<'_> {
    /// Refuses values that a keyword cannot have. Types in upper case, and counts such as `2.0`, are written as they are meant.
    /// Null, and types that JSON Schema lacks, are keywords that cannot be enforced.
    pub(super) fn shape(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        let says_nothing = |keyword: &str, value: &Value| match value {
            Value::Null => expected(keyword, value).is_some(),
            // Draft 3 marks a required property in the property itself.
            Value::Bool(_) => keyword == "required",
            _ => false,
        };
        let empty: Vec<_> = object.iter().filter(|(keyword, value)| says_nothing(keyword, value)).collect();
        for (keyword, value) in
            empty.into_iter().map(|(keyword, value)| (keyword.clone(), value.clone())).collect::<Vec<_>>()
        {
            object.shift_remove(&keyword);
            self.leave_out(&format!("`{keyword}` {value}"), path)?;
        }
        for keyword in COUNTS {
            if let Some(count) =
                object.get(keyword).and_then(Value::as_f64).filter(|count| count.fract() == 0.0 && *count >= 0.0)
            {
                object.insert(keyword.to_owned(), (count as u64).into());
            }
        }
        if let Some(given) = object.get_mut("type") {
            lower_case(given);
            if unknown_type(given) {
                let what = format!("`type` {given}");
                object.shift_remove("type");
                self.leave_out(&what, path)?;
            }
        }
        match object.iter().find_map(|(keyword, value)| Some((keyword, value, expected(keyword, value)?))) {
            None => Ok(()),
            Some((keyword, value, expected)) => {
                let shown: String = value.to_string().chars().take(MAX_SHOWN_CHARACTERS).collect();
                Err(format!("`{keyword}` at {} is {shown}, but must be {expected}", place(path)))
            }
        }
    }
}

/// What the value of a keyword should be. `None`: it is, or the keyword has no such rule.
fn expected(keyword: &str, value: &Value) -> Option<&'static str> {
    let is_schema = |value: &Value| value.is_object() || value.is_boolean();
    let all = |are: fn(&Value) -> bool| value.as_array().is_some_and(|values| values.iter().all(are));
    let (is_valid, expected) = match keyword {
        "anyOf" | "oneOf" | "allOf" | "prefixItems" => {
            (all(|schema| schema.is_object() || schema.is_boolean()), "a list of schemas")
        }
        "items" => (
            is_schema(value) || all(|schema| schema.is_object() || schema.is_boolean()),
            "a schema, or a list of schemas",
        ),
        "additionalItems"
        | "additionalProperties"
        | "unevaluatedItems"
        | "unevaluatedProperties"
        | "contains"
        | "propertyNames"
        | "not"
        | "if"
        | "then"
        | "else" => (is_schema(value), "a schema"),
        "properties" | "patternProperties" | "dependentSchemas" => {
            (value.as_object().is_some_and(|named| named.values().all(is_schema)), "an object of schemas")
        }
        "$defs" | "definitions" | "dependentRequired" | "dependencies" => (value.is_object(), "an object"),
        "required" => (all(Value::is_string), "a list of names"),
        "enum" => (value.is_array(), "a list of values"),
        "type" => (value.is_string() || all(Value::is_string), "a type, or a list of types"),
        "minimum" | "maximum" => (value.is_number(), "a number"),
        "exclusiveMinimum" | "exclusiveMaximum" => (value.is_number() || value.is_boolean(), "a number"),
        "multipleOf" => (value.as_f64().is_some_and(|number| number != 0.0), "a number other than 0"),
        "pattern" | "format" | "$ref" => (value.is_string(), "a string"),
        "uniqueItems" => (value.is_boolean(), "true or false"),
        _ if COUNTS.contains(&keyword) => (value.is_u64(), "a whole number, 0 or more"),
        _ => return None,
    };
    (!is_valid).then_some(expected)
}

/// COMPAT: Google's clients write the names of types in upper case.
fn lower_case(given: &mut Value) {
    match given {
        Value::String(name) if TYPES.contains(&name.to_ascii_lowercase().as_str()) => name.make_ascii_lowercase(),
        Value::Array(names) => names.iter_mut().for_each(lower_case),
        _ => {}
    }
}

fn unknown_type(given: &Value) -> bool {
    match given {
        Value::String(name) => !TYPES.contains(&name.as_str()),
        Value::Array(names) => names.iter().any(unknown_type),
        _ => false,
    }
}
