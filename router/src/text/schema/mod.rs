//! JSON schemas as the grammar engine can enforce them exactly.
//!
//! The engine refuses keywords that it does not know, keeps numbers as doubles, and reads patterns as regular expressions
//! without look-around. Here annotations are removed, keywords are replaced by others that mean the same, and what still
//! cannot be enforced is refused by name, or left out and listed. INVARIANT: a text that the result allows is an instance of
//! the schema, apart from the keywords that are listed.

mod ecma;
mod keyword;
mod name;
mod number;
mod pattern;
mod reference;
mod shape;
mod string;
mod union;

use std::collections::HashSet;

use serde_json::{Map, Value};

pub(crate) use self::reference::target;

/// What happens to keywords that cannot be enforced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Enforcement {
    /// They are refused.
    Strict,
    /// They are left out and listed. Numbers that the engine cannot keep are refused nevertheless.
    Lenient,
}

type Object = Map<String, Value>;

/// Keywords that other keywords have made part of a schema, or that have no effect on instances, but that the engine refuses.
const WITHOUT_EFFECT: [&str; 8] = [
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "$dynamicAnchor",
    "$recursiveAnchor",
    "$vocabulary",
    "deprecated",
    // Options of the engine, which are the server's.
    "x-guidance",
];
/// Specifications that the engine knows; other values of `$schema` are taken for the newest.
const SPECIFICATIONS: [&str; 5] = ["draft/2020-12", "draft/2019-09", "draft-07", "draft-06", "draft-04"];
/// These say which types an instance may have.
const OTHER_TYPES: [&str; 6] = ["type", "const", "enum", "$ref", "anyOf", "oneOf"];

/// Rewrites the schema. Returns what is not enforced, one sentence each. Errors are for the client, and name the keyword and
/// its place as a JSON pointer.
pub(crate) fn make_enforceable(schema: &mut Value, enforcement: Enforcement) -> Result<Vec<String>, String> {
    if *schema == Value::Bool(true) {
        *schema = Object::new().into();
    }
    reference::remove_name(schema);
    let root = schema.clone();
    let mut pass =
        Pass { root: &root, enforcement, left_out: Vec::new(), references: Vec::new(), seen: HashSet::new() };
    pass.schema(schema, "", true)?;
    // Definitions may be anywhere.
    while let Some(reference) = pass.references.pop() {
        if !pass.seen.contains(&reference)
            && let Some(target) = schema.pointer_mut(&reference)
        {
            pass.schema(target, &reference, true)?;
        }
    }
    Ok(pass.left_out)
}

struct Pass<'a> {
    /// As given.
    root: &'a Value,
    enforcement: Enforcement,
    left_out: Vec<String>,
    /// Pointers to referenced schemas.
    references: Vec<String>,
    /// Pointers to the schemas that have been rewritten.
    seen: HashSet<String>,
}

impl<'a> Pass<'a> {
    /// `path`: JSON pointer to the schema. `is_object`: with `properties` and without a type it means an object.
    fn schema(&mut self, schema: &mut Value, path: &str, is_object: bool) -> Result<(), String> {
        self.seen.insert(path.to_owned());
        let Some(object) = schema.as_object_mut() else { return Ok(()) };
        WITHOUT_EFFECT.iter().for_each(|keyword| drop(object.shift_remove(*keyword)));
        let is_known = |named: &str| SPECIFICATIONS.iter().any(|known| named.contains(known));
        if object.get("$schema").and_then(Value::as_str).is_none_or(|named| !is_known(named)) {
            object.shift_remove("$schema");
        }
        self.shape(object, path)?;
        self.reference(object, path)?;
        if is_object && object.contains_key("properties") && !OTHER_TYPES.iter().any(|key| object.contains_key(*key)) {
            // COMPAT: as TGI's clients and tools mean it; JSON Schema would allow a string, too.
            object.insert("type".to_owned(), "object".into());
        }
        number::make_exact(object, &mut |note| self.left_out.push(format!("{note} at {}", place(path))))
            .map_err(|problem| format!("{problem} at {}", place(path)))?;
        self.common_multiple(object).map_err(|problem| format!("{problem} at {}", place(path)))?;
        self.string(object, path)?;
        if self.keywords(object, path)? {
            *schema = Value::Bool(false);
            return Ok(());
        }
        self.union(object, path)?;
        self.union_size(object, path)?;
        let has_type = |schema: &Value| self.resolved(schema).get("type").is_some();
        let is_typed = object.contains_key("type")
            || object.get("allOf").and_then(Value::as_array).is_some_and(|schemas| schemas.iter().any(has_type));
        for (keyword, value) in object.iter_mut() {
            let is_object = keyword != "allOf" || !is_typed;
            let path = format!("{path}/{}", keyword.replace('~', "~0").replace('/', "~1"));
            match (keyword.as_str(), value) {
                ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                    for (name, schema) in named {
                        self.schema(schema, &format!("{path}/{}", name.replace('~', "~0").replace('/', "~1")), true)?;
                    }
                }
                ("items" | "prefixItems" | "anyOf" | "oneOf" | "allOf", Value::Array(schemas)) => {
                    for (index, schema) in schemas.iter_mut().enumerate() {
                        self.schema(schema, &format!("{path}/{index}"), is_object)?;
                    }
                }
                ("items" | "additionalItems" | "additionalProperties", schema) => self.schema(schema, &path, true)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Checks the `multipleOf` of all schemas that apply to the same number.
    fn common_multiple(&self, object: &Object) -> Result<(), String> {
        let parts = object.get("allOf").and_then(Value::as_array).into_iter().flatten();
        let parts = parts.map(|part| self.resolved(part).get("multipleOf"));
        let referenced = object.get("$ref").and_then(Value::as_str).and_then(|reference| self.target(reference));
        let referenced = referenced.map(|schema| self.resolved(schema).get("multipleOf"));
        let all = parts.chain(referenced).chain([object.get("multipleOf")]).flatten();
        number::check_common_multiple(all.filter_map(Value::as_number))
    }

    /// `what` is not enforced: an error, or a note.
    fn leave_out(&mut self, what: &str, path: &str) -> Result<(), String> {
        match self.enforcement {
            Enforcement::Strict => Err(format!("{what} at {} cannot be enforced; leave it out", place(path))),
            Enforcement::Lenient => {
                self.left_out.push(format!("{what} at {} is not enforced", place(path)));
                Ok(())
            }
        }
    }
}

fn place(path: &str) -> String {
    if path.is_empty() { "the root".to_owned() } else { format!("`{path}`") }
}

#[cfg(test)]
mod tests;
