use serde_json::json;

use super::*;

fn lenient(mut schema: Value) -> (Value, Vec<String>) {
    let left_out = make_enforceable(&mut schema, Enforcement::Lenient).unwrap();
    (schema, left_out)
}

fn strict(mut schema: Value) -> Result<Value, String> {
    make_enforceable(&mut schema, Enforcement::Strict).map(|_| schema)
}

#[test]
fn annotations_have_no_effect() {
    let given = json!({
        "$schema": "https://example.org/unknown",
        "title": "a", "deprecated": true, "x-order": 1, "$dynamicAnchor": "node",
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary", "contentEncoding": "base64", "contentMediaType": "image/png"},
            "secret": {"type": "string", "format": "password", "writeOnly": true},
            "when": {"type": "string", "format": "date-time"},
            "list": {"type": "array", "uniqueItems": false, "contains": {}, "minContains": 0},
            "map": {"type": "object", "propertyNames": {"type": "string"}, "unevaluatedProperties": true},
            "if": {"type": "integer", "if": {"minimum": 5}, "not": false, "dependentRequired": {"a": []}},
        },
    });
    let expected = json!({
        "title": "a", "x-order": 1,
        "type": "object",
        "properties": {
            "file": {"type": "string"},
            "secret": {"type": "string", "writeOnly": true},
            "when": {"type": "string", "format": "date-time"},
            "list": {"type": "array", "minItems": 0},
            "map": {"type": "object"},
            "if": {"type": "integer"},
        },
    });
    assert_eq!(strict(given), Ok(expected));
}

#[test]
fn properties_without_a_type_mean_an_object() {
    let properties = json!({"a": {"properties": {}}});
    let typed = json!({"a": {"properties": {}, "type": "object"}});
    assert_eq!(strict(json!({"properties": properties})), Ok(json!({"properties": typed, "type": "object"})));
    // Another schema says which types there are.
    for schema in [
        json!({"properties": {}, "type": ["object", "null"]}),
        json!({"properties": {}, "anyOf": [{"type": "object"}, {"type": "null"}]}),
        json!({"allOf": [{"properties": {}}, {"type": ["object", "null"]}]}),
    ] {
        assert_eq!(strict(schema.clone()), Ok(schema));
    }
}

#[test]
fn what_another_keyword_says_is_enforced() {
    let names = json!({"$ref": "#/$defs/e"});
    for (given, expected) in [
        (json!({"not": {}}), json!(false)),
        (json!({"enum": [1, 2, 3], "not": {"enum": [1, 3]}}), json!({"enum": [2]})),
        (json!({"contains": true, "maxContains": 5}), json!({"minItems": 1, "maxItems": 5})),
        (json!({"maxItems": 1, "uniqueItems": true}), json!({"maxItems": 1})),
        (
            json!({"properties": {"a": true}, "unevaluatedProperties": false, "type": "object"}),
            json!({"properties": {"a": true}, "type": "object", "additionalProperties": false}),
        ),
        (
            json!({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}}),
            json!({
                "additionalProperties": false, "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            }),
        ),
        (
            json!({"type": "object", "propertyNames": names, "$defs": {"e": {"type": "string", "enum": ["x"]}}}),
            json!({
                "type": "object", "$defs": {"e": {"type": "string", "enum": ["x"]}}, "properties": {"x": true},
                "additionalProperties": false,
            }),
        ),
        (
            json!({"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}}),
            json!({"additionalProperties": false, "patternProperties": {"^a": {"type": "integer"}}}),
        ),
        (
            json!({"propertyNames": {"type": "string", "minLength": 2}}),
            json!({"patternProperties": {"^(?s:.{2,})$": true}, "additionalProperties": false}),
        ),
    ] {
        assert_eq!(strict(given.clone()), Ok(expected), "{given}");
    }
}

#[test]
fn what_narrows_and_cannot_be_enforced_is_refused_or_listed_with_its_place() {
    for (keywords, named) in [
        (json!({"not": {"type": "null"}}), "`not`"),
        (json!({"contains": {"const": 1}}), "`contains`"),
        (json!({"uniqueItems": true}), "`uniqueItems`"),
        (json!({"if": {"const": 1}, "then": false}), "`if`"),
        (json!({"propertyNames": {"format": "uuid"}}), "`propertyNames`"),
        (json!({"dependentRequired": {"a": ["b"]}}), "`dependentRequired`"),
        (json!({"dependencies": {"a": {"minProperties": 2}}}), "`dependencies`"),
        (json!({"unevaluatedItems": false, "allOf": [true]}), "`unevaluatedItems`"),
        (json!({"$dynamicRef": "#node"}), "`$dynamicRef`"),
        (json!({"pattern": "^(?!a)"}), "`pattern` \"^(?!a)\""),
        (json!({"pattern": "\\bword"}), "`pattern` \"\\\\bword\""),
        (json!({"pattern": "a^"}), "`pattern` \"a^\""),
        (json!({"patternProperties": {"^(?!a)": {}}}), "`patternProperties` \"^(?!a)\""),
        (json!({"patternProperties": {"a{1000000}": {}}}), "`patternProperties` \"a{1000000}\""),
        (json!({"required": null}), "`required` null"),
        (json!({"required": true}), "`required` true"),
        (json!({"type": "file"}), "`type` \"file\""),
        (json!({"type": ["string", "date"]}), "`type` [\"string\",\"date\"]"),
        (json!({"pattern": "(a)\\1"}), "`pattern`"),
        (json!({"pattern": "a{1000000}"}), "`pattern`"),
        (json!({"pattern": "(b|(ab{10001,}))"}), "`pattern`"),
        (
            json!({"properties": {"a": true, "b": true}, "type": "object", "maxProperties": 1, "minProperties": 1}),
            "`minProperties`",
        ),
    ] {
        let schema = json!({"type": "object", "properties": {"a/b": {"items": keywords}}});
        let place = "at `/properties/a~1b/items`";
        let error = strict(schema.clone()).unwrap_err();
        assert!(
            error.starts_with(named) && error.ends_with(&format!(" {place} cannot be enforced; leave it out")),
            "{error}"
        );
        let (enforced, left_out) = lenient(schema);
        assert!(left_out[0].starts_with(named) && left_out[0].contains(place), "{left_out:?}");
        let (again, none) = lenient(enforced.clone());
        assert_eq!((again, none), (enforced, Vec::new()));
    }
}

#[test]
fn patterns_with_outer_anchors_are_kept() {
    for pattern in ["^$|^(?:[A-Z]{4})*(?:=|==)?$", "(^a|b)$", "x", "^\\p{L}+$", "^a{10000}$", "^[^@]+@[a-z.]+$"] {
        let schema = json!({"pattern": pattern});
        assert_eq!(strict(schema.clone()), Ok(schema));
    }
}

#[test]
fn overlapping_branches_may_match_at_once() {
    let tagged = |tag: &str| json!({"type": "object", "properties": {"kind": {"const": tag}}, "required": ["kind"]});
    let disjoint = json!({"oneOf": [tagged("a"), tagged("b"), {"type": "string"}]});
    assert_eq!(lenient(disjoint.clone()).1, Vec::<String>::new());
    let overlapping = json!({"oneOf": [{"type": "integer"}, {"type": "number"}]});
    let (schema, left_out) = lenient(overlapping.clone());
    assert_eq!(schema, json!({"anyOf": overlapping["oneOf"]}));
    assert_eq!(left_out, ["`oneOf`, whose branches may overlap, at the root is not enforced"]);
    assert_eq!(strict(overlapping.clone()), Ok(overlapping));
}

#[test]
fn a_reference_to_itself_is_refused() {
    for schema in [
        json!({"$ref": "#"}),
        json!({"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    ] {
        assert!(strict(schema).unwrap_err().contains("leads back to itself"));
    }
    let tree = json!({"type": "object", "properties": {"child": {"$ref": "#"}}});
    assert_eq!(strict(tree.clone()), Ok(tree));
}

#[test]
fn definitions_in_any_place_are_rewritten() {
    let given = json!({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {"format": "path"}}}});
    let expected = json!({"$ref": "#/components/schemas/a", "components": {"schemas": {"a": {}}}});
    assert_eq!(strict(given), Ok(expected));
}

#[test]
fn numbers_that_the_engine_would_change_are_refused() {
    const SMALLEST: i64 = i64::MIN;
    for (schema, keyword) in [
        (json!({"const": 9_007_199_254_740_993_i64}), "const"),
        (json!({"const": SMALLEST}), "const"),
        (json!({"const": {"a": [u64::MAX]}}), "const"),
        (json!({"enum": ["a", -9_007_199_254_740_993_i64]}), "enum"),
        (json!({"type": "integer", "minimum": 1_234_567_890_123_456_789_i64}), "minimum"),
        (json!({"maximum": -9_007_199_254_740_993_i64}), "maximum"),
        (json!({"type": "integer", "exclusiveMinimum": 9_007_199_254_740_992_i64}), "exclusiveMinimum"),
        (
            json!({"type": "integer", "minimum": 9_007_199_254_740_992_i64, "exclusiveMinimum": true}),
            "exclusiveMinimum",
        ),
        (json!({"multipleOf": 4_294_967_296_i64}), "multipleOf"),
        (json!({"multipleOf": 9_007_199_254_740_993_i64}), "multipleOf"),
        (json!({"multipleOf": 0.000_000_000_123_456_789}), "multipleOf"),
        (json!({"type": "integer", "minimum": u64::MAX}), "minimum"),
        (json!({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}), "multipleOf"),
        (json!({"multipleOf": 65537, "$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 65539}}}), "multipleOf"),
    ] {
        for enforcement in [Enforcement::Strict, Enforcement::Lenient] {
            let error = make_enforceable(&mut schema.clone(), enforcement).unwrap_err();
            assert!(
                error.starts_with(&format!("`{keyword}` ")) && error.ends_with(" at the root"),
                "{schema}: {error}"
            );
        }
    }
}

#[test]
fn numbers_that_the_engine_keeps_are_unchanged() {
    for schema in [
        json!({"const": 9_007_199_254_740_992_i64, "enum": [9_007_199_254_740_994_i64, -9_007_199_254_740_992_i64, 0.1, 1e22, i64::MAX]}),
        json!({"type": "integer", "minimum": 9_007_199_254_740_994_i64, "maximum": i64::MAX}),
        json!({"type": "integer", "exclusiveMinimum": -5, "exclusiveMaximum": 5.5}),
        json!({"type": "number", "minimum": -0.125, "exclusiveMaximum": 9_007_199_254_740_992_i64, "multipleOf": 0.01}),
        json!({"multipleOf": 65536}),
        json!({"allOf": [{"multipleOf": 0.5}, {"multipleOf": 1000}]}),
    ] {
        assert_eq!(strict(schema.clone()), Ok(schema));
    }
}

#[test]
fn bounds_beyond_64_bits_are_the_nearest_ones_and_are_listed() {
    let smallest = -9_223_372_036_854_774_784_i64;
    for (given, expected, note) in [
        (
            json!({"type": "integer", "minimum": i64::MIN}),
            json!({"type": "integer", "minimum": smallest}),
            "`minimum` is enforced as -9223372036854774784 at the root",
        ),
        (
            json!({"type": "integer", "maximum": u64::MAX}),
            json!({"type": "integer", "maximum": i64::MAX}),
            "`maximum` is enforced as 9223372036854775807 at the root",
        ),
        (
            json!({"type": "number", "minimum": -f32::MAX}),
            json!({"type": "number", "minimum": smallest}),
            "`minimum` is enforced as -9223372036854774784 at the root",
        ),
        (
            json!({"type": "integer", "exclusiveMaximum": u64::MAX}),
            json!({"type": "integer", "maximum": i64::MAX}),
            "`maximum` is enforced as 9223372036854775807 at the root",
        ),
        (
            json!({"type": "integer", "minimum": 2_000_000_000_000_000_000_i64}),
            json!({"type": "integer", "minimum": 2_000_000_000_000_000_000_i64, "maximum": i64::MAX}),
            "`minimum` is enforced with a `maximum` of 9223372036854775807 at the root",
        ),
    ] {
        let mut schema = given.clone();
        assert_eq!(make_enforceable(&mut schema, Enforcement::Strict), Ok(vec![note.to_owned()]), "{given}");
        assert_eq!(schema, expected);
    }
    let int64 = json!({"type": "integer", "minimum": -9_223_372_036_854_775_808_i64, "maximum": i64::MAX});
    assert_eq!(lenient(int64).0, json!({"type": "integer", "minimum": smallest, "maximum": i64::MAX}));
}

#[test]
fn multiples_are_written_as_the_engine_reads_them() {
    for given in [0.07, 0.01, 0.1, 0.3, 0.000_1, 1.1, 2.5, 100.0, 0.29, 1e-9] {
        let schema = strict(json!({"multipleOf": given})).unwrap();
        let mut value = schema["multipleOf"].as_f64().unwrap();
        let mut places = 0;
        while value.fract() != 0.0 {
            value *= 10.0;
            places += 1;
        }
        assert_eq!(format!("{value}e-{places}").parse::<f64>().unwrap(), given);
    }
}

#[test]
fn the_number_of_optional_properties_has_a_bound() {
    let of = |num: usize, num_required: usize| {
        let names: Vec<_> = (0..num).map(|index| format!("p{index}")).collect();
        let properties: Object = names.iter().map(|name| (name.clone(), json!({"type": "integer"}))).collect();
        json!({"type": "object", "properties": properties, "required": names[..num_required]})
    };
    assert!(strict(of(1400, 1000)).is_ok());
    let error = strict(of(1401, 1000)).unwrap_err();
    assert!(error.starts_with("`properties` lists 401 that are not required, at most 400 are allowed"), "{error}");
}

#[test]
fn values_that_a_keyword_cannot_have_are_refused_with_their_place() {
    for (keywords, expected) in [
        (json!({"minimum": "3"}), "`minimum` at `/items` is \"3\", but must be a number"),
        (json!({"multipleOf": 0}), "`multipleOf` at `/items` is 0, but must be a number other than 0"),
        (json!({"minLength": -1}), "`minLength` at `/items` is -1, but must be a whole number, 0 or more"),
        (json!({"properties": []}), "`properties` at `/items` is [], but must be an object of schemas"),
        (json!({"items": 5}), "`items` at `/items` is 5, but must be a schema, or a list of schemas"),
        (json!({"required": "a"}), "`required` at `/items` is \"a\", but must be a list of names"),
        (
            json!({"additionalProperties": "false"}),
            "`additionalProperties` at `/items` is \"false\", but must be a schema",
        ),
    ] {
        for enforcement in [Enforcement::Strict, Enforcement::Lenient] {
            let error = make_enforceable(&mut json!({"items": keywords}), enforcement).unwrap_err();
            assert_eq!(error, expected);
        }
    }
}

#[test]
fn values_are_written_as_they_are_meant() {
    for (given, expected) in [
        (json!({"type": "OBJECT"}), json!({"type": "object"})),
        (json!({"type": ["String", "NULL"]}), json!({"type": ["string", "null"]})),
        (json!({"minLength": 1.0, "maxItems": 2.0}), json!({"minLength": 1, "maxItems": 2})),
        (json!(true), json!({})),
        (json!({"x-guidance": {"lenient": true}, "type": "null"}), json!({"type": "null"})),
        (json!({"$id": "my schema", "type": "null"}), json!({"type": "null"})),
        (json!({"pattern": "^[\\w-.]{2}$"}), json!({"pattern": "^[\\w\\-.]{2}$"})),
    ] {
        assert_eq!(strict(given), Ok(expected));
    }
    // A reference by name needs it.
    let named = json!({"$id": "https://x.org/y", "properties": {"a": {"$ref": "https://x.org/y"}}, "type": "object"});
    assert_eq!(strict(named.clone()), Ok(named));
}

#[test]
fn leading_look_aheads_are_enforced() {
    let given = json!({"type": "string", "pattern": "^(?=[^a]*a)(?=b)[a-z]{8,}$"});
    let expected = json!({
        "type": "string", "pattern": "^[a-z]{8,}$", "allOf": [{"pattern": "^(?:[^a]*a)"}, {"pattern": "^(?:b)"}],
    });
    assert_eq!(strict(given), Ok(expected));
}

#[test]
fn patterns_of_names_are_disjoint_or_left_out() {
    let disjoint = json!({"patternProperties": {"^x-": {}, "^[0-9]+$": {}, "^y": {}}, "additionalProperties": false});
    assert_eq!(lenient(disjoint.clone()), (disjoint, Vec::new()));
    let overlapping = json!({"patternProperties": {"^a": {"type": "null"}, "a$": {}}, "additionalProperties": false});
    let (schema, left_out) = lenient(overlapping);
    assert_eq!(schema, json!({"patternProperties": {"^a": {"type": "null"}}}));
    assert_eq!(
        left_out,
        ["`patternProperties` \"a$\", which may match names that \"^a\" matches, at the root is not enforced"]
    );
}

#[test]
fn a_reference_to_a_schema_that_contains_itself_stands_alone() {
    let node =
        |child: Value| json!({"$defs": {"n": {"type": "object", "properties": {"c": child}}}, "$ref": "#/$defs/n"});
    let alone = node(json!({"$ref": "#/$defs/n", "description": "d"}));
    let same = node(json!({"$ref": "#/$defs/n", "description": "d", "type": "object", "nullable": true}));
    assert_eq!(strict(same), Ok(alone.clone()));
    let narrowed = node(json!({"$ref": "#/$defs/n", "description": "d", "minProperties": 1}));
    let what = "`minProperties`, beside a `$ref` to a schema that contains itself, at `/$defs/n/properties/c`";
    assert_eq!(strict(narrowed.clone()), Err(format!("{what} cannot be enforced; leave it out")));
    assert_eq!(lenient(narrowed), (alone, vec![format!("{what} is not enforced")]));
}

#[test]
fn branches_with_different_values_are_a_union() {
    let different = json!({"oneOf": [{"enum": [1, 2]}, {"enum": [3.5, "a"]}]});
    assert_eq!(strict(different.clone()), Ok(json!({"anyOf": different["oneOf"]})));
    let same = json!({"oneOf": [{"const": 1}, {"const": 1.0}]});
    assert_eq!(lenient(same).1, ["`oneOf`, whose branches may overlap, at the root is not enforced"]);
}

#[test]
fn fractions_have_bounds_that_the_engine_can_write() {
    let float = json!({"type": "number", "minimum": -f32::MAX, "maximum": f32::MAX});
    let expected = json!({
        "type": "number", "minimum": -9_223_372_036_854_774_784_i64, "maximum": 9_223_372_036_854_774_784_i64,
    });
    assert_eq!(strict(float), Ok(expected));
}

#[test]
fn objects_that_begin_alike_have_a_bound() {
    let branch = |index: usize, tag_first: bool| {
        let mut properties = Object::new();
        let tag = json!({"const": index});
        let optional = (0..20).map(|index| (format!("p{index}"), json!({"type": "integer"})));
        let tag = [("t".to_owned(), tag)];
        if tag_first {
            properties.extend(tag.into_iter().chain(optional))
        } else {
            properties.extend(optional.chain(tag))
        }
        json!({"type": "object", "properties": properties, "required": ["t"]})
    };
    let union = |num: usize, tag_first: bool| {
        let mut branches: Vec<_> = (0..num).map(|index| branch(index, tag_first)).collect();
        branches.push(json!({"type": "null"}));
        json!({"type": "object", "properties": {"a": {"anyOf": branches}}})
    };
    // 61 items each; the engine counts 2,440 of 40.
    assert!(strict(union(32, false)).is_ok());
    let error = strict(union(33, false)).unwrap_err();
    assert!(
        error.starts_with("`anyOf` has objects that cannot be told apart") && error.ends_with("at `/properties/a`")
    );
    assert!(strict(union(200, true)).is_ok());
}
