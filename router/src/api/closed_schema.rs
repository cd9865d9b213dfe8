//! COMPAT: in TGI an object with `properties` has no other properties, whatever JSON Schema says; small models would keep
//! inventing more. Here that holds unless the schema mentions additional properties.
//!
//! If several schemas apply to one object (`allOf`, or `properties` beside `$ref`, `anyOf` or `oneOf`), the object has the
//! properties that any of them lists. There, a reference points to an open copy of its definition, since elsewhere the definition
//! is closed.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::text::schema_target;

type Object = Map<String, Value>;

/// Keywords whose schemas apply to the same object.
const BRANCHES: [&str; 3] = ["allOf", "anyOf", "oneOf"];
const CONDITIONAL: [&str; 2] = ["then", "else"];
const MENTIONS_OTHERS: [&str; 3] = ["additionalProperties", "patternProperties", "unevaluatedProperties"];

/// Closes every object that has `properties` and does not mention others.
pub(super) fn close(schema: &mut Value) {
    let root = schema.clone();
    let mut closing = Closing { root: &root, open: Vec::new() };
    closing.value(schema);
    let mut copies = Object::new();
    while let Some(reference) = closing.open.get(copies.len()).cloned() {
        let mut copy = schema_target(&root, &reference).cloned().unwrap_or_default();
        closing.part(&mut copy);
        copies.insert(open_name(copies.len()), copy);
    }
    if let Some(object) = schema.as_object_mut().filter(|_| !copies.is_empty())
        && let Some(definitions) = object.entry("$defs").or_insert_with(|| Object::new().into()).as_object_mut()
    {
        definitions.extend(copies);
    }
}

fn open_name(index: usize) -> String {
    format!("penstock-open-{index}")
}

/// The properties of an object that several schemas describe.
#[derive(Default)]
struct Listed {
    names: BTreeSet<String>,
    /// Whether one of the schemas has `properties`.
    is_object: bool,
    /// Whether one of them allows other properties.
    has_others: bool,
}

struct Closing<'a> {
    /// As given.
    root: &'a Value,
    /// References to the definitions with open copies.
    open: Vec<String>,
}

impl Closing<'_> {
    /// A schema that describes its instance alone.
    fn value(&mut self, schema: &mut Value) {
        let Some(object) = schema.as_object_mut() else { return };
        if merges(object) {
            let mut listed = Listed::default();
            self.list(object, &mut listed, &mut BTreeSet::new());
            if listed.is_object {
                self.part(schema);
                if let Some(object) = schema.as_object_mut().filter(|_| !listed.has_others) {
                    list_properties(object, listed.names);
                    object.insert("additionalProperties".to_owned(), false.into());
                }
                return;
            }
        } else if object.contains_key("properties") && !MENTIONS_OTHERS.iter().any(|key| object.contains_key(*key)) {
            list_properties(object, required(object));
            object.insert("additionalProperties".to_owned(), false.into());
        }
        for keyword in BRANCHES {
            object.get_mut(keyword).into_iter().flat_map(schemas).for_each(|branch| self.value(branch));
        }
        self.inner(object);
    }

    /// One of several schemas that apply to one object.
    fn part(&mut self, schema: &mut Value) {
        let Some(object) = schema.as_object_mut() else { return };
        if let Some(reference) = object.get("$ref").and_then(Value::as_str)
            && schema_target(self.root, reference).is_some()
        {
            let index = self.open.iter().position(|open| open == reference).unwrap_or(self.open.len());
            if index == self.open.len() {
                self.open.push(reference.to_owned());
            }
            object.insert("$ref".to_owned(), format!("#/$defs/{}", open_name(index)).into());
        }
        for keyword in BRANCHES {
            object.get_mut(keyword).into_iter().flat_map(schemas).for_each(|branch| self.part(branch));
        }
        self.inner(object);
    }

    /// The schemas of other instances. The JSON parser bounds their depth.
    fn inner(&mut self, object: &mut Object) {
        for (key, value) in object {
            match (key.as_str(), value) {
                ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                    named.values_mut().for_each(|schema| self.value(schema));
                }
                ("prefixItems" | "items", Value::Array(schemas)) => {
                    schemas.iter_mut().for_each(|schema| self.value(schema));
                }
                ("items" | "additionalItems" | "additionalProperties", schema) => self.value(schema),
                _ => {}
            }
        }
    }

    fn list(&self, object: &Object, listed: &mut Listed, seen: &mut BTreeSet<String>) {
        if let Some(named) = object.get("properties").and_then(Value::as_object) {
            listed.is_object = true;
            listed.names.extend(named.keys().cloned());
        }
        listed.names.extend(required(object));
        let mentions = |key: &&str| object.get(*key).is_some_and(|others| *others != Value::Bool(false));
        listed.has_others |= MENTIONS_OTHERS.iter().any(mentions);
        let branches = BRANCHES.iter().filter_map(|key| object.get(*key)?.as_array()).flatten();
        let conditional = CONDITIONAL.iter().filter_map(|key| object.get(*key));
        let dependent = object.get("dependentSchemas").and_then(Value::as_object).into_iter().flat_map(Object::values);
        for part in branches.chain(conditional).chain(dependent).filter_map(Value::as_object) {
            self.list(part, listed, seen);
        }
        if let Some(reference) = object.get("$ref").and_then(Value::as_str)
            && seen.insert(reference.to_owned())
        {
            match schema_target(self.root, reference) {
                Some(Value::Object(target)) => self.list(target, listed, seen),
                Some(_) => {}
                None => listed.has_others = true,
            }
        }
    }
}

/// The names that an object must have, whether or not it describes them.
fn required(object: &Object) -> BTreeSet<String> {
    let names = object.get("required").and_then(Value::as_array).into_iter().flatten();
    names.filter_map(Value::as_str).map(str::to_owned).collect()
}

/// Lists properties with any value, unless they are listed already.
fn list_properties(object: &mut Object, names: BTreeSet<String>) {
    let properties = object.entry("properties").or_insert_with(|| Object::new().into());
    for name in names {
        properties.as_object_mut().map(|named| named.entry(name).or_insert(Value::Bool(true)));
    }
}

fn schemas(branches: &mut Value) -> impl Iterator<Item = &mut Value> {
    branches.as_array_mut().into_iter().flatten()
}

/// Whether several schemas apply to one instance: closing one would exclude the properties of the others.
fn merges(object: &Object) -> bool {
    let has = |keyword: &&str| object.contains_key(*keyword);
    let alternatives = ["$ref", "anyOf", "oneOf"].iter().filter(|keyword| has(keyword)).count();
    let num_all = object.get("allOf").and_then(Value::as_array).map_or(0, Vec::len);
    let is_own = object.contains_key("properties");
    let has_conditions = CONDITIONAL.iter().chain(&["dependentSchemas"]).any(has);
    usize::from(is_own) + alternatives + num_all + usize::from(has_conditions) > 1
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn closed(mut schema: Value) -> Value {
        close(&mut schema);
        schema
    }

    #[test]
    fn objects_with_properties_have_no_others() {
        let inner = json!({"properties": {"b": {}}});
        let given = json!({"properties": {"a": {"items": inner}}, "$defs": {"d": inner}});
        let inner = json!({"properties": {"b": {}}, "additionalProperties": false});
        let expected =
            json!({"properties": {"a": {"items": inner}}, "$defs": {"d": inner}, "additionalProperties": false});
        assert_eq!(closed(given), expected);
    }

    #[test]
    fn an_object_that_several_schemas_describe_has_the_properties_of_all() {
        let a = json!({"properties": {"a": {"properties": {"c": {}}}}});
        let b = json!({"properties": {"b": {}}});
        let open_a = json!({"properties": {"a": {"properties": {"c": {}}, "additionalProperties": false}}});
        let closed_a = json!({"properties": open_a["properties"], "additionalProperties": false});
        let names = json!({"a": true, "b": true});
        assert_eq!(
            closed(json!({"allOf": [a, b]})),
            json!({"allOf": [open_a, b], "properties": names, "additionalProperties": false})
        );
        // The definition is closed where it stands alone.
        let given = json!({
            "properties": {"alone": {"$ref": "#/$defs/a"}, "both": {"allOf": [{"$ref": "#/$defs/a"}, b]}},
            "$defs": {"a": a},
        });
        let open = json!({"$ref": "#/$defs/penstock-open-0"});
        assert_eq!(
            closed(given),
            json!({
                "properties": {
                    "alone": {"$ref": "#/$defs/a"},
                    "both": {"allOf": [open, b], "properties": names, "additionalProperties": false},
                },
                "$defs": {"a": closed_a, "penstock-open-0": open_a},
                "additionalProperties": false,
            })
        );
        // One schema alone does not merge.
        let single = json!({"allOf": [{"$ref": "#/$defs/a"}], "description": "d"});
        let given = json!({"properties": {"x": single}, "$defs": {"a": b}});
        let closed_b = json!({"properties": {"b": {}}, "additionalProperties": false});
        let expected = json!({"properties": {"x": single}, "$defs": {"a": closed_b}, "additionalProperties": false});
        assert_eq!(closed(given), expected);
    }

    #[test]
    fn required_names_are_properties() {
        assert_eq!(
            closed(json!({"properties": {"a": {}}, "required": ["a", "b"]})),
            json!({"properties": {"a": {}, "b": true}, "required": ["a", "b"], "additionalProperties": false})
        );
    }

    #[test]
    fn encoded_references_and_anchors_lead_to_definitions() {
        let definition = json!({"$anchor": "name", "properties": {"a": {}}});
        let names = json!({"a": true, "b": true});
        for (reference, id) in
            [("#/$defs/List%3Ca%20b%3E", ""), ("#name", ""), ("https://x.org/y#/$defs/List%3Ca b>", "https://x.org/y")]
        {
            let given = json!({
                "$id": id, "allOf": [{"$ref": reference}, {"properties": {"b": {}}}],
                "$defs": {"List<a b>": definition},
            });
            let found = closed(given);
            assert_eq!(found["properties"], names, "{reference}");
            assert_eq!(found["$defs"]["penstock-open-0"], definition);
        }
    }

    #[test]
    fn schemas_that_mention_others_are_unchanged() {
        for schema in [
            json!({"type": "object"}),
            json!({"properties": {"a": {}}, "additionalProperties": true}),
            json!({"properties": {"a": {}}, "patternProperties": {"^x": {}}}),
            json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "additionalProperties": {}}]}),
            json!({"properties": {"a": {}}, "$ref": "https://example.org/x"}),
            json!({"allOf": [{"pattern": "a"}, {"minLength": 5}]}),
            json!(true),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
    }

    #[test]
    fn a_property_may_be_named_like_a_keyword() {
        let given = json!({"properties": {"allOf": {"enum": [{"properties": 1}]}}});
        assert_eq!(closed(given)["additionalProperties"], false);
        let given = json!({"properties": {"a": {}}, "not": {"required": ["a"]}, "oneOf": [{"required": ["a"]}]});
        assert_eq!(closed(given)["additionalProperties"], false);
    }
}
