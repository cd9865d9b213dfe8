//! `propertyNames`, as `properties` or `patternProperties`.

use serde_json::{Map, Value, json};

use super::keyword::is_any;
use super::{Object, Pass, pattern};

/// Names that are listed, each of which gets a copy of a schema.
const MAX_NAMES: usize = 1024;
const MAX_COPIED_BYTES: usize = 64 << 10;

impl Pass<'_> {
    pub(super) fn property_names(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        let Some(names) = object.shift_remove("propertyNames") else { return Ok(()) };
        let names = self.resolved(&names).clone();
        if says_nothing(&names) {
            return Ok(());
        }
        let has_patterns = object.contains_key("patternProperties");
        if object.get("additionalProperties") == Some(&Value::Bool(false)) && !has_patterns {
            return self.check_declared(object, &names, path);
        }
        let further = object.get("additionalProperties").cloned().unwrap_or(Value::Bool(true));
        if let Some(listed) = self.listed(&names, 8)
            && !has_patterns
            && listed.len() <= MAX_NAMES
            && listed.len() * further.to_string().len() <= MAX_COPIED_BYTES
        {
            let declared = object.entry("properties").or_insert_with(|| json!({}));
            let declared = declared.as_object_mut().map(std::mem::take).unwrap_or_default();
            let mut properties: Map<String, Value> = declared
                .into_iter()
                .map(|(name, schema)| if listed.contains(&name) { (name, schema) } else { (name, Value::Bool(false)) })
                .collect();
            for name in listed {
                properties.entry(name).or_insert_with(|| further.clone());
            }
            object.insert("properties".to_owned(), properties.into());
            object.insert("additionalProperties".to_owned(), false.into());
            return Ok(());
        }
        match name_pattern(&names) {
            Some(pattern)
                if !has_patterns && is_empty(object.get("properties")) && is_empty(object.get("required")) =>
            {
                object.insert("patternProperties".to_owned(), json!({pattern: further}));
                object.insert("additionalProperties".to_owned(), false.into());
                Ok(())
            }
            _ => self.leave_out("`propertyNames`", path),
        }
    }

    /// Declared names of an object without others must match, too.
    fn check_declared(&mut self, object: &mut Object, names: &Value, path: &str) -> Result<(), String> {
        match (self.listed(names, 8), object.get_mut("properties").and_then(Value::as_object_mut)) {
            (_, None) => Ok(()),
            (Some(listed), Some(declared)) => {
                let other = declared.iter_mut().filter(|(name, _)| !listed.contains(name));
                other.for_each(|(_, schema)| *schema = Value::Bool(false));
                Ok(())
            }
            (None, Some(_)) => self.leave_out("`propertyNames`", path),
        }
    }

    /// All names that a schema allows, if it lists them.
    fn listed(&self, names: &Value, depth: usize) -> Option<Vec<String>> {
        let names = self.resolved(names);
        let object = names.as_object().filter(|_| depth > 0)?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let says_more = |keyword: &String| {
            !matches!(keyword.as_str(), "const" | "enum" | "anyOf" | "oneOf" | "type" | "title" | "description")
        };
        if object.keys().any(says_more) {
            return None;
        }
        match (object.get("const"), object.get("enum"), object.get("anyOf").or(object.get("oneOf"))) {
            (Some(value), None, None) => Some(text(value).into_iter().collect()),
            (None, Some(Value::Array(values)), None) => Some(values.iter().filter_map(text).collect()),
            (None, None, Some(Value::Array(branches))) => {
                let listed: Option<Vec<_>> = branches.iter().map(|branch| self.listed(branch, depth - 1)).collect();
                Some(listed?.concat())
            }
            _ => None,
        }
    }
}

/// Whether every name matches: names are strings.
fn says_nothing(names: &Value) -> bool {
    is_any(names)
        || names.as_object().is_some_and(|object| {
            let rest: Object =
                object.iter().filter(|(key, _)| *key != "type").map(|(k, v)| (k.clone(), v.clone())).collect();
            object
                .get("type")
                .is_none_or(|of| of == "string" || of.as_array().is_some_and(|of| of.contains(&json!("string"))))
                && is_any(&Value::Object(rest))
        })
}

fn is_empty(value: Option<&Value>) -> bool {
    value
        .is_none_or(|value| value.as_object().is_some_and(Map::is_empty) || value.as_array().is_some_and(Vec::is_empty))
}

/// The pattern of names that a schema describes by one, or by their length.
fn name_pattern(names: &Value) -> Option<String> {
    let object = names.as_object()?;
    let known = ["type", "pattern", "minLength", "maxLength", "title", "description"];
    if object.keys().any(|keyword| !known.contains(&keyword.as_str())) {
        return None;
    }
    let limit = |keyword: &str| object.get(keyword).and_then(Value::as_u64);
    match (object.get("pattern").and_then(Value::as_str), limit("minLength"), limit("maxLength")) {
        (Some(given), None, None) => pattern::check(given).is_ok().then(|| given.to_owned()),
        (None, least, most) => {
            let most = most.map(|most| most.to_string()).unwrap_or_default();
            let pattern = format!("^(?s:.{{{},{most}}})$", least.unwrap_or(0));
            pattern::check(&pattern).is_ok().then_some(pattern)
        }
        _ => None,
    }
}
