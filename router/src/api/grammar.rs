//! Grammars in TGI's shape `{"type", "value"}` and in OpenAI's `response_format`; every route accepts both.

use std::borrow::Cow;

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use super::{closed_schema, exact, gbnf, structural_tag};
use crate::generation::Constraint;
use crate::sequence::Grammar;
use crate::text::{Enforcement, make_enforceable};

const KINDS: &str = "`text`, `json`, `json_object`, `json_schema`, `structural_tag`, `regex`, `choice`, `lark`, `ebnf`";

/// A grammar field; `None` for `{"type": "text"}`, which is no constraint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GrammarField(pub(crate) Option<Constraint>);

impl<'de> Deserialize<'de> for GrammarField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(expecting = "an object with `type`")]
        struct Given {
            #[serde(rename = "type")]
            kind: String,
            value: Option<Value>,
            #[serde(flatten)]
            schemas: Schemas,
            #[serde(flatten)]
            others: Map<String, Value>,
        }
        let Given { kind, value, schemas, others } = Given::deserialize(deserializer)?;
        let grammar = match kind.as_str() {
            // Its fields stand beside the type.
            "structural_tag" => structural_tag::grammar(value.unwrap_or(Value::Object(others))).map(Some),
            kind => grammar(kind, value, schemas),
        };
        grammar.map(Self).map_err(|problem| D::Error::custom(format!("grammar: {problem}")))
    }
}

/// The places for a schema beside the type.
#[derive(Deserialize)]
struct Schemas {
    /// OpenAI's.
    json_schema: Option<NamedSchema>,
    /// Schema of `json_object`, as llama.cpp, Together and Fireworks take it.
    schema: Option<Value>,
    strict: Option<bool>,
}

/// OpenAI's named schema. `description` has no effect.
#[derive(Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
    strict: Option<bool>,
}

impl Schemas {
    /// The one schema, and whether what of it cannot be enforced is refused: as TGI's value unless `strict` is false, elsewhere only
    /// if `strict` is true.
    fn one(self, kind: &str, value: Option<Value>) -> Result<Option<Constraint>, String> {
        let (value, value_strict) = match value {
            Some(Value::Object(mut named)) if kind == "json_schema" => {
                (named.remove("schema"), named.get("strict").and_then(Value::as_bool))
            }
            Some(_) if kind == "json_schema" => (None, None),
            value => (value, None),
        };
        let (named, named_strict) = self.json_schema.map_or((None, None), |named| (named.schema, named.strict));
        let mut given = [("value", value), ("json_schema", named), ("schema", self.schema)]
            .into_iter()
            .filter_map(|(field, schema)| Some((field, schema.filter(|schema| !schema.is_null())?)));
        let Some((first, schema)) = given.next() else { return Ok(None) };
        if let Some((other, _)) = given.find(|(_, other)| *other != schema) {
            return Err(format!("`{first}` and `{other}` are different schemas, send one"));
        }
        let is_strict = value_strict.or(named_strict).or(self.strict).unwrap_or(first == "value");
        let enforcement = if is_strict { Enforcement::Strict } else { Enforcement::Lenient };
        self::schema(schema, enforcement).map(Some)
    }

    /// Refuses a schema beside a type that has none.
    fn none(&self, kind: &str) -> Result<(), String> {
        match &self.schema {
            Some(_) => Err(format!("`schema` has no meaning beside type `{kind}`; send type `json_schema`")),
            None => Ok(()),
        }
    }
}

fn grammar(kind: &str, value: Option<Value>, schemas: Schemas) -> Result<Option<Constraint>, String> {
    let missing = || format!("`value` is missing for type `{kind}`");
    if !matches!(kind, "json" | "json_object" | "json_schema") {
        schemas.none(kind)?;
    }
    let grammar = match kind {
        "text" => return Ok(None),
        "json" => return Ok(Some(schemas.one(kind, value)?.ok_or_else(missing)?)),
        "json_object" => match schemas.one(kind, value)? {
            None => return schema(json!({"type": "object"}), Enforcement::Strict).map(Some),
            constraint => return Ok(constraint),
        },
        "json_schema" => match schemas.one(kind, value)? {
            None => return Err("type `json_schema` needs a `schema` in `json_schema`".to_owned()),
            constraint => return Ok(constraint),
        },
        "regex" => Grammar::Regex(text(kind, value.ok_or_else(missing)?)?),
        "lark" | "ebnf" => lark(text(kind, value.ok_or_else(missing)?)?)?,
        "choice" => {
            let choices = serde_json::from_value(value.ok_or_else(missing)?);
            choice(choices.map_err(|_| "`value` must be a list of strings for type `choice`".to_owned())?)?
        }
        _ => return Err(format!("type `{kind}` is unknown, the types are {KINDS}")),
    };
    Ok(Some(grammar.into()))
}

/// The grammar of a schema, or of a string that holds one. Objects with `properties` are closed.
pub(super) fn schema(value: Value, enforcement: Enforcement) -> Result<Constraint, String> {
    let mut value = read_schema(value)?;
    let left_out = make_enforceable(&mut value, enforcement).map_err(unusable)?;
    match value {
        Value::Object(_) | Value::Bool(_) => {
            Ok(Constraint { grammar: Grammar::JsonSchema(value.to_string()), left_out })
        }
        _ => Err("a JSON schema is an object".to_owned()),
    }
}

/// As the grammar engine says it.
fn unusable(problem: String) -> String {
    format!("the JSON schema cannot be used: {problem}")
}

/// The schema, or the one in a string. Objects with `properties` are closed.
fn read_schema(value: Value) -> Result<Value, String> {
    let mut value = match value {
        Value::String(text) => {
            exact::check(text.as_bytes()).map_err(unusable)?;
            serde_json::from_str(&text).map_err(|error| format!("not JSON: {error}"))?
        }
        value => value,
    };
    closed_schema::close(&mut value);
    Ok(value)
}

fn text(kind: &str, value: Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text),
        _ => Err(format!("`value` must be a string for type `{kind}`")),
    }
}

/// A grammar in Lark's syntax, as llguidance reads it, or in GBNF.
pub(super) fn lark(text: String) -> Result<Grammar, String> {
    Ok(Grammar::Lark(if gbnf::is_gbnf(&text) { gbnf::to_lark(&text)? } else { text }))
}

/// The grammar of one of these texts.
pub(super) fn choice(choices: Vec<String>) -> Result<Grammar, String> {
    if choices.is_empty() || choices.iter().any(String::is_empty) {
        return Err("a choice needs at least one string, and none that is empty".to_owned());
    }
    // Lark writes strings as JSON does.
    let choices: Vec<String> = choices.into_iter().map(|choice| Value::String(choice).to_string()).collect();
    Ok(Grammar::Lark(format!("start: {}", choices.join(" | "))))
}

impl PartialSchema for GrammarField {
    fn schema() -> RefOr<Schema> {
        let kinds = |kinds: &[&str]| ObjectBuilder::new().schema_type(Type::String).enum_values(Some(kinds.to_vec()));
        let of = |names: &[&str]| ObjectBuilder::new().property("type", kinds(names)).required("type");
        let strict = || {
            let meaning = "Whether keywords that cannot be enforced are refused. Otherwise they are left out, and named in a header.";
            ObjectBuilder::new().schema_type(Type::Boolean).description(Some(meaning))
        };
        let named = || {
            ObjectBuilder::new()
                .property("name", ObjectBuilder::new().schema_type(Type::String))
                .property("description", ObjectBuilder::new().schema_type(Type::String))
                .property("schema", json_schema())
                .property("strict", strict())
                .required("schema")
        };
        // A schema may be in each of these places, if it is the same.
        let anywhere = |kind: &str| {
            of(&[kind]).property("json_schema", named()).property("schema", json_schema()).property("strict", strict())
        };
        let text = || ObjectBuilder::new().schema_type(Type::String);
        let choices = text().min_length(Some(1)).to_array_builder().min_items(Some(1));
        let structure = ObjectBuilder::new()
            .property("begin", text())
            .property("schema", json_schema())
            .property("end", text())
            .required("begin")
            .required("schema")
            .required("end");
        let tags = of(&["structural_tag"])
            .property("structures", structure.to_array_builder().min_items(Some(1)))
            .property("triggers", text().min_length(Some(1)).to_array_builder())
            .required("structures")
            .required("triggers");
        OneOfBuilder::new()
            .item(of(&["text"]))
            .item(of(&["json"]).property("value", json_schema()).property("strict", strict()).required("value"))
            .item(anywhere("json_object").property("value", json_schema()))
            .item(anywhere("json_schema").required("json_schema"))
            .item(anywhere("json_schema").required("schema"))
            .item(anywhere("json_schema").property("value", named()).required("value"))
            .item(of(&["regex", "lark", "ebnf"]).property("value", text()).required("value"))
            .item(of(&["choice"]).property("value", choices).required("value"))
            .item(tags)
            .item(of(&["structural_tag"]).property("format", ObjectBuilder::new().schema_type(Type::Object)).required("format"))
            .item(of(&["structural_tag"]).property("value", ObjectBuilder::new().schema_type(Type::Object)).required("value"))
            .description(Some("Grammar that the answer must match, in TGI's shape or OpenAI's."))
            .examples([
                json!({"type": "json", "value": {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}}),
                json!({"type": "json_schema", "json_schema": {"name": "age", "schema": {"type": "integer"}}}),
                json!({"type": "regex", "value": "[0-9]{4}"}),
                json!({"type": "choice", "value": ["yes", "no"]}),
            ])
            .into()
    }
}

/// A schema, or a string that holds one.
fn json_schema() -> OneOfBuilder {
    let typed = |kind: Type| ObjectBuilder::new().schema_type(kind);
    OneOfBuilder::new().item(typed(Type::Object)).item(typed(Type::Boolean)).item(typed(Type::String))
}

impl ToSchema for GrammarField {
    fn name() -> Cow<'static, str> {
        "Grammar".into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn constraint(value: Value) -> Result<Option<Constraint>, String> {
        serde_json::from_value::<GrammarField>(value).map(|field| field.0).map_err(|error| error.to_string())
    }

    fn parse(value: Value) -> Result<Option<Grammar>, String> {
        constraint(value).map(|constraint| constraint.map(|constraint| constraint.grammar))
    }

    #[test]
    fn both_dialects_mean_the_same_schema() {
        let expected = Some(Grammar::JsonSchema(r#"{"type":"integer"}"#.to_owned()));
        let schema = json!({"type": "integer"});
        for given in [
            json!({"type": "json", "value": schema}),
            json!({"type": "json", "value": schema.to_string()}),
            json!({"type": "json_object", "value": schema}),
            json!({"type": "json_schema", "value": {"name": "n", "schema": schema}}),
            json!({"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": true}}),
            json!({"type": "json_object", "schema": schema}),
            json!({"type": "json_object", "schema": schema.to_string()}),
            json!({"type": "json_object", "json_schema": {"schema": schema}}),
            json!({"type": "json_schema", "schema": schema}),
            json!({"type": "json_schema", "schema": schema, "json_schema": {"schema": schema}}),
        ] {
            assert_eq!(parse(given.clone()).unwrap(), expected, "{given}");
        }
        assert_eq!(
            parse(json!({"type": "json_object"})).unwrap(),
            Some(Grammar::JsonSchema(r#"{"type":"object"}"#.into()))
        );
        assert_eq!(parse(json!({"type": "text"})).unwrap(), None);
    }

    #[test]
    fn what_cannot_be_enforced_is_refused_where_the_client_asks_for_it() {
        let schema = json!({"type": "array", "uniqueItems": true});
        let refused =
            "grammar: the JSON schema cannot be used: `uniqueItems` at the root cannot be enforced; leave it out";
        let left_out = vec!["`uniqueItems` at the root is not enforced".to_owned()];
        let named = |strict: Value| json!({"schema": schema, "strict": strict});
        for (given, is_refused) in [
            (json!({"type": "json", "value": schema}), true),
            (json!({"type": "json_schema", "value": named(Value::Null)}), true),
            (json!({"type": "json_schema", "json_schema": named(true.into())}), true),
            (json!({"type": "json_schema", "schema": schema, "strict": true}), true),
            (json!({"type": "json_schema", "json_schema": named(false.into())}), false),
            (json!({"type": "json_schema", "json_schema": named(Value::Null)}), false),
            (json!({"type": "json_object", "schema": schema}), false),
            (json!({"type": "json_schema", "value": named(false.into())}), false),
        ] {
            let parsed = constraint(given.clone()).map(|constraint| constraint.unwrap().left_out);
            assert_eq!(parsed, if is_refused { Err(refused.to_owned()) } else { Ok(left_out.clone()) }, "{given}");
        }
    }

    #[test]
    fn choices_are_quoted() {
        let grammar = parse(json!({"type": "choice", "value": ["a\"b", "c"]})).unwrap();
        assert_eq!(grammar, Some(Grammar::Lark(r#"start: "a\"b" | "c""#.to_owned())));
    }

    #[test]
    fn an_invalid_grammar_is_refused_with_its_reason() {
        for (given, reason) in [
            (json!(5), "expected an object with `type`"),
            (json!({"type": "xml", "value": ""}), "unknown"),
            (json!({"type": "regex"}), "missing"),
            (json!({"type": "regex", "value": 5}), "must be a string"),
            (json!({"type": "json", "value": "{"}), "not JSON"),
            (json!({"type": "json", "value": [1]}), "is an object"),
            (json!({"type": "json_schema"}), "needs a `schema`"),
            (json!({"type": "choice", "value": []}), "at least one"),
            (json!({"type": "text", "schema": {}}), "`schema` has no meaning beside type `text`"),
            (json!({"type": "json_object", "schema": true, "value": {}}), "`value` and `schema` are different schemas"),
            (json!({"type": "json", "value": {"const": 9007199254740993_i64}}), "`const` 9007199254740993 cannot be"),
            (
                json!({"type": "json", "value": "{\"const\": 9007199254740993.0}"}),
                "`const` 9007199254740993.0 cannot be",
            ),
        ] {
            let error = parse(given.clone()).unwrap_err();
            assert!(error.contains(reason), "{given}: {error}");
        }
    }
}
