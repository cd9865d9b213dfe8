//! What the text of an answer must match: OpenAI's `response_format`, TGI's `grammar`, and the fields of vLLM.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use utoipa::ToSchema;

use crate::api::field::named;
use crate::api::grammar::{self, GrammarField};
use crate::api::structural_tag;
use crate::generation::{Constraint, ValidationError};
use crate::sequence::Grammar;
use crate::text::Enforcement;

const KINDS: &str = "`json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag`";

/// Fields that constrain the answer. At most one may be sent, unless they mean the same.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(remote = "Self")]
pub(crate) struct ConstraintFields {
    /// Grammar that the answer must match.
    response_format: Option<GrammarField>,
    /// TGI's name for `response_format`.
    grammar: Option<GrammarField>,
    /// vLLM's form of `response_format`.
    structured_outputs: Option<StructuredOutputs>,
    /// vLLM's older name for `structured_outputs.json`.
    guided_json: Option<Value>,
    /// vLLM's older name for `structured_outputs.regex`.
    guided_regex: Option<String>,
    /// vLLM's older name for `structured_outputs.choice`.
    guided_choice: Option<Vec<String>>,
    /// vLLM's older name for `structured_outputs.grammar`.
    guided_grammar: Option<String>,
    /// vLLM's older name for `structured_outputs.whitespace_pattern`. Requires `guided_json`.
    guided_whitespace_pattern: Option<String>,
    /// Accepted without effect: there is one implementation.
    #[serde(rename = "guided_decoding_backend")]
    #[schema(value_type = Option<String>)]
    _guided_decoding_backend: Option<IgnoredAny>,
}

/// vLLM's constraint: exactly one of `json`, `regex`, `choice`, `grammar`, `json_object` and `structural_tag`.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct StructuredOutputs {
    /// A JSON schema, or a string that holds one.
    json: Option<Value>,
    /// A regular expression, which the whole answer matches.
    regex: Option<String>,
    /// The possible answers.
    choice: Option<Vec<String>>,
    /// A grammar in Lark's syntax, as llguidance reads it, or in GBNF (`root ::= …`).
    grammar: Option<String>,
    /// Any JSON object.
    json_object: Option<bool>,
    /// Text with tags, each of which is followed by JSON of its schema: `response_format` of this type, or a string that
    /// holds one.
    structural_tag: Option<Value>,
    /// A regular expression for the whitespace between the tokens of JSON. Requires `json` or `json_object`.
    whitespace_pattern: Option<String>,
    /// No whitespace between the tokens of JSON. Requires `json` or `json_object`.
    disable_any_whitespace: Option<bool>,
    /// Accepted without effect: there is one implementation.
    #[serde(rename = "disable_fallback")]
    #[schema(value_type = Option<bool>)]
    _disable_fallback: Option<IgnoredAny>,
    /// Accepted without effect: an object with `properties` has no others unless its schema mentions them.
    #[serde(rename = "disable_additional_properties")]
    #[schema(value_type = Option<bool>)]
    _disable_additional_properties: Option<IgnoredAny>,
}

impl<'de> Deserialize<'de> for ConstraintFields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Calls the derived function, which `remote` makes an inherent one.
        named(deserializer, |deserializer| Self::deserialize(deserializer))
    }
}

impl ConstraintFields {
    /// The field that constrains the answer, if one does.
    pub(super) fn name(&self) -> Option<&'static str> {
        let given = [
            ("response_format", self.response_format.as_ref().is_some_and(|field| field.0.is_some())),
            ("grammar", self.grammar.as_ref().is_some_and(|field| field.0.is_some())),
            ("structured_outputs", self.structured_outputs.is_some()),
            ("guided_json", self.guided_json.is_some()),
            ("guided_regex", self.guided_regex.is_some()),
            ("guided_choice", self.guided_choice.is_some()),
            ("guided_grammar", self.guided_grammar.is_some()),
        ];
        given.into_iter().find_map(|(name, is_given)| is_given.then_some(name))
    }

    /// The one grammar of all fields.
    pub(super) fn take(&mut self) -> Result<Option<Constraint>, ValidationError> {
        let of_field = |field: &mut Option<GrammarField>| Ok(field.take().and_then(|field| field.0));
        let whitespace = self.guided_whitespace_pattern.take();
        if whitespace.is_some() && self.guided_json.is_none() {
            return Err(problem("guided_whitespace_pattern", "it needs `guided_json`"));
        }
        let from_grammar = |grammar: Option<Grammar>| grammar.map(Into::into);
        let json = |schema| spaced(schema, whitespace.as_deref(), false);
        let grammars = [
            ("response_format", of_field(&mut self.response_format)),
            ("grammar", of_field(&mut self.grammar)),
            ("structured_outputs", self.structured_outputs.take().map(StructuredOutputs::constraint).transpose()),
            ("guided_json", self.guided_json.take().map(json).transpose()),
            ("guided_regex", Ok(self.guided_regex.take().map(Grammar::Regex).map(Into::into))),
            ("guided_choice", self.guided_choice.take().map(grammar::choice).transpose().map(from_grammar)),
            ("guided_grammar", self.guided_grammar.take().map(grammar::lark).transpose().map(from_grammar)),
        ];
        let mut found: Option<(&'static str, Constraint)> = None;
        for (field, constraint) in grammars {
            let Some(constraint) = constraint.map_err(|reason| problem(field, &reason))? else { continue };
            match &found {
                Some((one, first)) if first.grammar != constraint.grammar => {
                    return Err(ValidationError::Exclusive { one, other: field });
                }
                _ => found = found.or(Some((field, constraint))),
            }
        }
        Ok(found.map(|(_, constraint)| constraint))
    }
}

impl StructuredOutputs {
    fn constraint(self) -> Result<Constraint, String> {
        let is_compact = self.disable_any_whitespace == Some(true);
        let is_spaced = is_compact || self.whitespace_pattern.is_some();
        let json = self.json.or_else(|| (self.json_object == Some(true)).then(|| json!({"type": "object"})));
        match (json, self.regex, self.choice, self.grammar, self.structural_tag) {
            (Some(schema), None, None, None, None) => spaced(schema, self.whitespace_pattern.as_deref(), is_compact),
            (None, ..) if is_spaced => {
                Err("`whitespace_pattern` and `disable_any_whitespace` need `json` or `json_object`".to_owned())
            }
            (None, Some(regex), None, None, None) => Ok(Grammar::Regex(regex).into()),
            (None, None, Some(choices), None, None) => grammar::choice(choices).map(Into::into),
            (None, None, None, Some(text), None) => grammar::lark(text).map(Into::into),
            (None, None, None, None, Some(tag)) => structural_tag::grammar(tag),
            _ => Err(format!("send exactly one of {KINDS}")),
        }
    }
}

/// The grammar of a schema with other whitespace between JSON's tokens than the server allows by itself.
fn spaced(schema: Value, pattern: Option<&str>, is_compact: bool) -> Result<Constraint, String> {
    let mut constraint = grammar::schema(schema, Enforcement::Strict)?;
    let layout = match pattern {
        _ if is_compact => json!({"whitespace_flexible": false}),
        Some(pattern) => json!({"whitespace_pattern": pattern}),
        None => return Ok(constraint),
    };
    let Grammar::JsonSchema(schema) = &constraint.grammar else { return Ok(constraint) };
    let Ok(Value::Object(mut schema)) = serde_json::from_str(schema) else {
        return Err("whitespace can be chosen only for a schema that is an object".to_owned());
    };
    schema.insert("x-guidance".to_owned(), layout);
    constraint.grammar = Grammar::Lark(format!("start: %json {}", Value::Object(schema)));
    Ok(constraint)
}

fn problem(field: &str, reason: &str) -> ValidationError {
    ValidationError::Item { path: field.to_owned(), problem: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(fields: Value) -> Result<Option<Grammar>, ValidationError> {
        let mut fields: ConstraintFields = serde_json::from_value(fields).unwrap();
        let is_named = fields.name().is_some();
        let taken = fields.take();
        assert_eq!(is_named, !matches!(taken, Ok(None)));
        taken.map(|constraint| constraint.map(|constraint| constraint.grammar))
    }

    #[test]
    fn every_name_of_a_constraint_means_the_same() {
        let schema = json!({"type": "integer"});
        for (kind, value) in [
            ("json", schema.clone()),
            ("json", json!(schema.to_string())),
            ("regex", json!("[0-9]+")),
            ("choice", json!(["yes", "no"])),
            ("grammar", json!("start: \"a\"")),
            ("grammar", json!("root ::= \"a\"")),
        ] {
            let guided = taken(json!({format!("guided_{kind}"): value})).unwrap().unwrap();
            assert_eq!(taken(json!({"structured_outputs": {kind: value}})), Ok(Some(guided.clone())), "{kind}");
            let kind = if kind == "grammar" { "lark" } else { kind };
            let response_format = json!({"type": kind, "value": value});
            assert_eq!(taken(json!({"response_format": response_format})), Ok(Some(guided)), "{kind}");
        }
        let object = taken(json!({"structured_outputs": {"json_object": true}})).unwrap();
        assert_eq!(object, Some(Grammar::JsonSchema(r#"{"type":"object"}"#.to_owned())));
        assert_eq!(taken(json!({"guided_decoding_backend": "xgrammar", "guided_json": null})), Ok(None));
    }

    #[test]
    fn whitespace_of_json_can_be_chosen() {
        let spaced = |layout: &str| {
            Ok(Some(Grammar::Lark(format!(r#"start: %json {{"type":"integer","x-guidance":{layout}}}"#))))
        };
        let schema = json!({"type": "integer"});
        let compact = json!({"json": schema, "disable_any_whitespace": true});
        assert_eq!(taken(json!({"structured_outputs": compact})), spaced(r#"{"whitespace_flexible":false}"#));
        let given = json!({"guided_json": schema, "guided_whitespace_pattern": " ?"});
        assert_eq!(taken(given), spaced(r#"{"whitespace_pattern":" ?"}"#));
    }

    #[test]
    fn what_cannot_be_enforced_is_refused_with_its_field() {
        let outputs = |value| json!({"structured_outputs": value});
        for (fields, message) in [
            (outputs(json!({})), "structured_outputs: send exactly one of"),
            (outputs(json!({"json_object": false})), "structured_outputs: send exactly one of"),
            (outputs(json!({"regex": "a", "choice": ["b"]})), "structured_outputs: send exactly one of"),
            (outputs(json!({"json": {}, "json_object": true, "regex": "a"})), "structured_outputs: send exactly one"),
            (outputs(json!({"structural_tag": "{}"})), "structured_outputs: missing field `structures`"),
            (outputs(json!({"structural_tag": "{}", "regex": "a"})), "structured_outputs: send exactly one of"),
            (outputs(json!({"regex": "a", "whitespace_pattern": " "})), "structured_outputs: `whitespace_pattern`"),
            (outputs(json!({"grammar": "root ::= a"})), "structured_outputs: line 1: rule `a` is not defined"),
            (json!({"guided_json": "{"}), "guided_json: not JSON"),
            (json!({"guided_choice": []}), "guided_choice: a choice needs"),
            (json!({"guided_whitespace_pattern": " "}), "guided_whitespace_pattern: it needs"),
        ] {
            let mut given: ConstraintFields = serde_json::from_value(fields.clone()).unwrap();
            let error = given.take().unwrap_err().to_string();
            assert!(error.starts_with(message), "{fields}: {error}");
        }
    }

    #[test]
    fn two_different_constraints_are_refused() {
        let exclusive = taken(json!({"guided_regex": "a", "response_format": {"type": "json_object"}}));
        assert_eq!(exclusive, Err(ValidationError::Exclusive { one: "response_format", other: "guided_regex" }));
        let same = taken(json!({"guided_regex": "a", "structured_outputs": {"regex": "a"}}));
        assert_eq!(same, Ok(Some(Grammar::Regex("a".to_owned()))));
    }
}
