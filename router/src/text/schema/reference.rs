//! References to schemas of the same document.

use std::collections::HashSet;

use serde_json::Value;

use super::{Object, Pass, place};

const MAX_REFERENCES: usize = 64;
/// Keywords that a reference may stand beside, because they do not narrow it.
const BESIDE: [&str; 13] = [
    "$ref",
    "$defs",
    "definitions",
    "$anchor",
    "$schema",
    "$id",
    "$comment",
    "title",
    "description",
    "default",
    "readOnly",
    "writeOnly",
    "examples",
];

/// The schema that a reference leads to: a pointer, which may be percent-encoded, or the name of an anchor, also behind the
/// document's own address.
pub(crate) fn target<'a>(root: &'a Value, reference: &str) -> Option<&'a Value> {
    match fragment(root, reference)? {
        fragment if fragment.is_empty() || fragment.starts_with('/') => root.pointer(&fragment),
        name => anchored(root, &name),
    }
}

/// The decoded fragment of a reference within the document.
fn fragment(root: &Value, reference: &str) -> Option<String> {
    let id = root.get("$id").or_else(|| root.get("id")).and_then(Value::as_str).unwrap_or_default();
    let fragment = reference.strip_prefix(id.trim_end_matches('#')).unwrap_or(reference).strip_prefix('#')?;
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let Some((&byte, behind)) = rest.split_first() {
        let digits = (byte == b'%').then(|| behind.get(..2).and_then(|two| str::from_utf8(two).ok())).flatten();
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(decoded) => {
                bytes.push(decoded);
                rest = &behind[2..];
            }
            None => {
                bytes.push(byte);
                rest = behind;
            }
        }
    }
    String::from_utf8(bytes).ok()
}

fn anchored<'a>(schema: &'a Value, name: &str) -> Option<&'a Value> {
    match schema {
        Value::Object(object) if object.get("$anchor").is_some_and(|anchor| anchor == name) => Some(schema),
        Value::Object(object) => object.values().find_map(|value| anchored(value, name)),
        Value::Array(values) => values.iter().find_map(|value| anchored(value, name)),
        _ => None,
    }
}

/// Removes the document's name if no reference needs it: some clients' names are no addresses, which the engine refuses.
pub(super) fn remove_name(schema: &mut Value) {
    fn are_local(value: &Value) -> bool {
        match value {
            Value::Object(object) => {
                let is_local = |reference: &str| reference.starts_with('#');
                object.get("$ref").and_then(Value::as_str).is_none_or(is_local) && object.values().all(are_local)
            }
            Value::Array(values) => values.iter().all(are_local),
            _ => true,
        }
    }
    if are_local(schema)
        && let Some(object) = schema.as_object_mut()
    {
        ["$id", "id"].iter().for_each(|keyword| drop(object.shift_remove(*keyword)));
    }
}

impl<'a> Pass<'a> {
    /// Notes where a reference points. Refuses one that leads back to itself: no instance can be checked against it.
    pub(super) fn reference(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        let Some(reference) = object.get("$ref").and_then(Value::as_str).map(str::to_owned) else { return Ok(()) };
        self.references.extend(fragment(self.root, &reference).filter(|pointer| !pointer.starts_with(|c| c != '/')));
        let mut target = self.target(&reference);
        for _ in 0..MAX_REFERENCES {
            match target.and_then(|schema| schema.get("$ref")).and_then(Value::as_str) {
                None => return self.beside_recursion(object, &reference, path),
                Some(next) => target = self.target(next),
            }
        }
        Err(format!("`$ref` {reference:?} leads back to itself at {}", place(path)))
    }

    /// The engine cannot narrow a schema that contains itself.
    fn beside_recursion(&mut self, object: &mut Object, reference: &str, path: &str) -> Result<(), String> {
        let Some(target) = self.target(reference) else { return Ok(()) };
        // Objects may hold definitions.
        object
            .retain(|keyword, value| BESIDE.contains(&keyword.as_str()) || is_constraint(keyword) || value.is_object());
        let says_same = |keyword: &str, value: &Value| target.get(keyword) == Some(value);
        let narrows = |(keyword, value): (&String, &Value)| {
            (is_constraint(keyword) && !says_same(keyword, value)).then(|| keyword.clone())
        };
        if !object.keys().any(|keyword| is_constraint(keyword)) || !self.contains_itself(target) {
            return Ok(());
        }
        let narrowing: Vec<_> = object.iter().filter_map(narrows).collect();
        object.retain(|keyword, _| !is_constraint(keyword));
        for keyword in narrowing {
            self.leave_out(&format!("`{keyword}`, beside a `$ref` to a schema that contains itself,"), path)?;
        }
        Ok(())
    }

    /// Whether a schema contains a reference that leads to it.
    fn contains_itself(&self, schema: &Value) -> bool {
        let mut seen: HashSet<&str> = HashSet::new();
        let mut next = vec![schema];
        while let Some(value) = next.pop() {
            match value {
                Value::Object(object) => {
                    if let Some(reference) = object.get("$ref").and_then(Value::as_str)
                        && seen.insert(reference)
                        && let Some(target) = self.target(reference)
                    {
                        if std::ptr::eq(target, schema) {
                            return true;
                        }
                        next.push(target);
                    }
                    next.extend(object.values());
                }
                Value::Array(values) => next.extend(values),
                _ => {}
            }
        }
        false
    }

    pub(super) fn target(&self, reference: &str) -> Option<&'a Value> {
        target(self.root, reference)
    }

    /// The schema itself, or the definition that it refers to.
    pub(super) fn resolved<'b>(&self, mut schema: &'b Value) -> &'b Value
    where
        'a: 'b,
    {
        for _ in 0..MAX_REFERENCES {
            match schema.get("$ref").and_then(Value::as_str).and_then(|reference| self.target(reference)) {
                Some(target) => schema = target,
                None => break,
            }
        }
        schema
    }
}

fn is_constraint(keyword: &str) -> bool {
    const OTHERS: [&str; 31] = [
        "anyOf",
        "oneOf",
        "allOf",
        "const",
        "enum",
        "items",
        "additionalItems",
        "prefixItems",
        "properties",
        "additionalProperties",
        "patternProperties",
        "required",
        "pattern",
        "format",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "contains",
        "uniqueItems",
        "unevaluatedItems",
        "propertyNames",
        "unevaluatedProperties",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "not",
        "if",
        "then",
        "else",
    ];
    keyword == "type" || OTHERS.contains(&keyword) || super::shape::COUNTS.contains(&keyword)
}
