//! `oneOf`: the engine enforces it only where it sees that no instance matches several branches.

use std::collections::{BTreeSet, HashSet};

use serde_json::Value;

use super::{Enforcement, Object, Pass, place};

/// What the engine may keep at one place of a text, and what it keeps of an optional property that may come next: one more where
/// nothing has to follow.
const MAX_ITEMS: usize = 2000;
const ITEMS_OF_OPTIONAL: usize = 3;
const MAX_DEPTH: usize = 8;

impl Pass<'_> {
    /// Refuses unions whose objects the engine has to follow at once, because they begin alike, and which are too many for it.
    /// It would find that only when a text has come to them.
    pub(super) fn union_size(&self, object: &Object, path: &str) -> Result<(), String> {
        for keyword in ["anyOf", "oneOf"] {
            let Some(branches) = object.get(keyword).and_then(Value::as_array) else { continue };
            let num_items = self.num_items(branches, MAX_DEPTH);
            if num_items > MAX_ITEMS {
                return Err(format!(
                    "`{keyword}` has objects that cannot be told apart by their first properties, with about {} properties that are \
                     not required, at most {} are allowed; begin each object with a required `const` of its own; at {}",
                    num_items / ITEMS_OF_OPTIONAL,
                    MAX_ITEMS / ITEMS_OF_OPTIONAL,
                    place(path)
                ));
            }
        }
        Ok(())
    }

    fn num_items(&self, branches: &[Value], depth: usize) -> usize {
        let items = branches.iter().map(|branch| {
            let branch = self.resolved(branch);
            let inner = ["anyOf", "oneOf"].iter().filter_map(|keyword| branch.get(*keyword)?.as_array());
            let inner: usize = inner.filter(|_| depth > 0).map(|branches| self.num_items(branches, depth - 1)).sum();
            let declared = branch.get("properties").and_then(Value::as_object);
            let num_optional =
                declared.map_or(0, |named| named.keys().filter(|name| !is_required(branch, name)).count());
            let has_required = branch.get("required").and_then(Value::as_array).is_some_and(|names| !names.is_empty());
            inner + (ITEMS_OF_OPTIONAL + usize::from(!has_required)) * num_optional + 1
        });
        let objects = branches.iter().map(|branch| self.resolved(branch)).filter(|of| of.get("properties").is_some());
        let firsts: Option<Vec<_>> = objects.map(|branch| self.first_values(branch)).collect();
        let are_told_apart = firsts.is_some_and(|firsts| {
            let mut seen = HashSet::new();
            firsts.into_iter().flatten().all(|value| seen.insert(value.to_string()))
        });
        if are_told_apart { items.max().unwrap_or(0) } else { items.sum() }
    }

    /// The values of the first listed property, if it is required.
    fn first_values(&self, schema: &Value) -> Option<Vec<Value>> {
        let (name, first) = schema.get("properties")?.as_object()?.iter().next()?;
        values(self.resolved(first)).filter(|_| is_required(schema, name))
    }

    /// COMPAT: where overlapping branches cannot be told apart, `oneOf` becomes `anyOf`.
    pub(super) fn union(&mut self, object: &mut Object, path: &str) -> Result<(), String> {
        let Some(branches) = object.get("oneOf").and_then(Value::as_array) else { return Ok(()) };
        if object.contains_key("anyOf") {
            return Ok(());
        }
        let are_disjoint = branches
            .iter()
            .enumerate()
            .all(|(index, one)| branches[index + 1..].iter().all(|other| self.are_disjoint(one, other)));
        if !are_disjoint && self.enforcement == Enforcement::Strict {
            // The engine sees more.
            return Ok(());
        }
        if !are_disjoint {
            self.leave_out("`oneOf`, whose branches may overlap,", path)?;
        }
        if let Some(branches) = object.shift_remove("oneOf") {
            object.insert("anyOf".to_owned(), branches);
        }
        Ok(())
    }

    fn are_disjoint(&self, one: &Value, other: &Value) -> bool {
        let (one, other) = (self.resolved(one), self.resolved(other));
        match (types(one), types(other)) {
            (Some(one), Some(other)) if one.is_disjoint(&other) => return true,
            _ => {}
        }
        match (values(one), values(other)) {
            (Some(one), Some(other)) => return have_none_in_common(&one, &other),
            (None, None) => {}
            _ => return false,
        }
        let properties = |schema: &'_ Value| schema.get("properties").and_then(Value::as_object).cloned();
        let (Some(of_one), Some(of_other)) = (properties(one), properties(other)) else { return false };
        let is_object = |schema: &Value| schema.get("type").is_some_and(|of| of == "object");
        is_object(one)
            && is_object(other)
            && of_one.iter().filter(|(name, _)| is_required(one, name) && is_required(other, name)).any(
                |(name, schema)| {
                    let values_of = |schema: &Value| values(self.resolved(schema));
                    match (values_of(schema), of_other.get(name).and_then(values_of)) {
                        (Some(one), Some(other)) => have_none_in_common(&one, &other),
                        _ => false,
                    }
                },
            )
    }
}

fn is_required(schema: &Value, name: &String) -> bool {
    schema.get("required").and_then(Value::as_array).is_some_and(|names| names.iter().any(|of| of == name))
}

/// The types that a schema names. Integers are numbers.
fn types(schema: &Value) -> Option<BTreeSet<&str>> {
    let named: Option<BTreeSet<_>> = match schema.get("type")? {
        Value::Array(types) => types.iter().map(Value::as_str).collect(),
        of => Some(BTreeSet::from([of.as_str()?])),
    };
    named.map(|named| named.into_iter().map(|of| if of == "integer" { "number" } else { of }).collect())
}

/// A number has the same value with and without a decimal point.
fn have_none_in_common(one: &[Value], other: &[Value]) -> bool {
    let is_same = |one: &Value, other: &Value| match (one.as_f64(), other.as_f64()) {
        (Some(one), Some(other)) => one == other,
        _ => one == other,
    };
    // Values within lists and objects are not compared.
    let is_plain = |value: &Value| !value.is_array() && !value.is_object();
    one.iter().all(is_plain) && one.iter().all(|one| other.iter().all(|other| !is_same(one, other)))
}

fn values(schema: &Value) -> Option<Vec<Value>> {
    match (schema.get("const"), schema.get("enum").and_then(Value::as_array)) {
        (Some(value), _) => Some(vec![value.clone()]),
        (None, values) => values.cloned(),
    }
}
