//! COMPAT: in TGI an object with `properties` has no other properties, whatever JSON Schema says; small models would keep
//! inventing more. Here that holds unless the schema mentions additional properties.

use serde_json::{Map, Value};

/// With these keywords several schemas apply to one object; closing one would exclude the properties of the others.
const MERGING: [&str; 6] = ["allOf", "if", "not", "dependentSchemas", "unevaluatedProperties", "$dynamicRef"];

/// Closes every object that has `properties` and does not mention others. A schema with a merging keyword is unchanged.
pub(super) fn close(schema: &mut Value) {
    let mut merges = false;
    visit(schema, &mut |object| {
        let has_properties = object.contains_key("properties");
        merges |= MERGING.iter().any(|key| object.contains_key(*key));
        merges |= has_properties && ["$ref", "anyOf", "oneOf"].iter().any(|key| object.contains_key(*key));
    });
    if merges {
        return;
    }
    visit(schema, &mut |object| {
        let mentions_others = ["additionalProperties", "patternProperties"].iter().any(|key| object.contains_key(*key));
        if object.contains_key("properties") && !mentions_others {
            object.insert("additionalProperties".to_owned(), false.into());
        }
    });
}

/// Visits the schema and all its subschemas. The JSON parser bounds their depth.
fn visit(schema: &mut Value, each: &mut dyn FnMut(&mut Map<String, Value>)) {
    let Some(object) = schema.as_object_mut() else { return };
    each(object);
    for (key, value) in object {
        match (key.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                named.values_mut().for_each(|schema| visit(schema, each));
            }
            ("prefixItems" | "anyOf" | "oneOf" | "items", Value::Array(schemas)) => {
                schemas.iter_mut().for_each(|schema| visit(schema, each));
            }
            ("items" | "additionalProperties", schema) => visit(schema, each),
            _ => {}
        }
    }
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
    fn schemas_that_mention_others_or_merge_are_unchanged() {
        for schema in [
            json!({"type": "object"}),
            json!({"properties": {"a": {}}, "additionalProperties": true}),
            json!({"properties": {"a": {}}, "patternProperties": {"^x": {}}}),
            json!({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}),
            json!({"$ref": "#/$defs/d", "properties": {"a": {}}, "$defs": {"d": {"properties": {"b": {}}}}}),
            json!({"properties": {"a": {}}, "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}),
            json!(true),
        ] {
            assert_eq!(closed(schema.clone()), schema);
        }
    }

    #[test]
    fn a_property_may_be_named_like_a_keyword() {
        let given = json!({"properties": {"allOf": {"enum": [{"properties": 1}]}}});
        assert_eq!(closed(given)["additionalProperties"], false);
    }
}
