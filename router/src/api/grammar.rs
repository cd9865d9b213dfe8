//! Grammars in TGI's shape `{"type", "value"}` and in OpenAI's `response_format`; every route accepts both.

use std::borrow::Cow;

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use super::{closed_schema, gbnf, structural_tag};
use crate::sequence::Grammar;

const KINDS: &str = "`text`, `json`, `json_object`, `json_schema`, `structural_tag`, `regex`, `choice`, `lark`, `ebnf`";

/// A grammar field; `None` for `{"type": "text"}`, which is no constraint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GrammarField(pub(crate) Option<Grammar>);

impl<'de> Deserialize<'de> for GrammarField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(expecting = "an object with `type`")]
        struct Given {
            #[serde(rename = "type")]
            kind: String,
            value: Option<Value>,
            json_schema: Option<NamedSchema>,
            #[serde(flatten)]
            others: Map<String, Value>,
        }
        let Given { kind, value, json_schema, others } = Given::deserialize(deserializer)?;
        let grammar = match kind.as_str() {
            // Its fields stand beside the type.
            "structural_tag" => structural_tag::grammar(value.unwrap_or(Value::Object(others))).map(Some),
            kind => grammar(kind, value, json_schema),
        };
        grammar.map(Self).map_err(|problem| D::Error::custom(format!("grammar: {problem}")))
    }
}

/// OpenAI's named schema. `strict` and `description` have no effect: every schema is enforced strictly.
#[derive(Deserialize)]
struct NamedSchema {
    schema: Option<Value>,
}

fn grammar(kind: &str, value: Option<Value>, json_schema: Option<NamedSchema>) -> Result<Option<Grammar>, String> {
    let missing = || format!("`value` is missing for type `{kind}`");
    let grammar = match kind {
        "text" => return Ok(None),
        "json" => schema(value.ok_or_else(missing)?)?,
        "json_object" => schema(value.unwrap_or_else(|| json!({"type": "object"})))?,
        "json_schema" => {
            let given = match json_schema {
                Some(named) => named.schema,
                None => value.map(|mut named| named["schema"].take()).filter(|schema| !schema.is_null()),
            };
            schema(given.ok_or("type `json_schema` needs a `schema` in `json_schema`")?)?
        }
        "regex" => Grammar::Regex(text(kind, value.ok_or_else(missing)?)?),
        "lark" | "ebnf" => lark(text(kind, value.ok_or_else(missing)?)?)?,
        "choice" => {
            let choices = serde_json::from_value(value.ok_or_else(missing)?);
            choice(choices.map_err(|_| "`value` must be a list of strings for type `choice`".to_owned())?)?
        }
        _ => return Err(format!("type `{kind}` is unknown, the types are {KINDS}")),
    };
    Ok(Some(grammar))
}

/// The grammar of a schema, or of a string that holds one. Objects with `properties` are closed.
pub(super) fn schema(value: Value) -> Result<Grammar, String> {
    let mut value = match value {
        Value::String(text) => serde_json::from_str(&text).map_err(|error| format!("not JSON: {error}"))?,
        value => value,
    };
    closed_schema::close(&mut value);
    match value {
        Value::Object(_) | Value::Bool(_) => Ok(Grammar::JsonSchema(value.to_string())),
        _ => Err("a JSON schema is an object".to_owned()),
    }
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
        let named = || {
            ObjectBuilder::new()
                .property("name", ObjectBuilder::new().schema_type(Type::String))
                .property("schema", json_schema())
                .required("schema")
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
            .item(of(&["json"]).property("value", json_schema()).required("value"))
            .item(of(&["json_object"]).property("value", json_schema()))
            .item(of(&["json_schema"]).property("json_schema", named()).required("json_schema"))
            .item(of(&["json_schema"]).property("value", named()).required("value"))
            .item(of(&["regex", "lark", "ebnf"]).property("value", text()).required("value"))
            .item(of(&["choice"]).property("value", choices).required("value"))
            .item(tags)
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

    fn parse(value: Value) -> Result<Option<Grammar>, String> {
        serde_json::from_value::<GrammarField>(value).map(|field| field.0).map_err(|error| error.to_string())
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
        ] {
            let error = parse(given.clone()).unwrap_err();
            assert!(error.contains(reason), "{given}: {error}");
        }
    }
}
