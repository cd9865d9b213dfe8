//! `oneOf`: the engine enforces it only where it sees that no instance matches several branches.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Enforcement, Object, Pass};

impl Pass<'_> {
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
        let is_required = |schema: &Value, name: &String| {
            let required = schema.get("required").and_then(Value::as_array);
            required.is_some_and(|names| names.iter().any(|of| of == name))
        };
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
    // Those within lists and objects are not compared.
    let is_plain = |value: &Value| !value.is_array() && !value.is_object();
    one.iter().all(is_plain) && one.iter().all(|one| other.iter().all(|other| !is_same(one, other)))
}

fn values(schema: &Value) -> Option<Vec<Value>> {
    match (schema.get("const"), schema.get("enum").and_then(Value::as_array)) {
        (Some(value), _) => Some(vec![value.clone()]),
        (None, values) => values.cloned(),
    }
}
