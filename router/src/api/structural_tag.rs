//! `structural_tag` of vLLM and XGrammar: free text, in which each tag is followed by JSON of its schema and by its end. What
//! begins like a trigger must be one of the tags.

use std::fmt::Write;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::closed_schema;
use crate::generation::Constraint;
use crate::sequence::Grammar;
use crate::text::{Enforcement, make_enforceable};

/// Triggers, and tags.
const MAX_PARTS: usize = 128;
/// As in grammars of a schema alone: whitespace has an end.
const WHITESPACE: &str = r" |\n {0,32}";

/// XGrammar's older form.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Structures {
    structures: Vec<Structure>,
    triggers: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Structure {
    begin: String,
    schema: Value,
    end: String,
}

/// XGrammar's newer form, of which one type means the same.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct TriggeredTags {
    triggers: Vec<String>,
    tags: Vec<Tag>,
    #[serde(default)]
    at_least_one: bool,
    #[serde(default)]
    stop_after_first: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tag {
    #[serde(rename = "type")]
    _kind: Option<String>,
    begin: String,
    content: Content,
    end: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    #[serde(rename = "type")]
    kind: String,
    json_schema: Option<Value>,
}

/// The grammar of a structural tag, or of a string that holds one.
pub(super) fn grammar(value: Value) -> Result<Constraint, String> {
    let mut value: Map<String, Value> = match value {
        Value::String(text) => serde_json::from_str(&text).map_err(|error| format!("not a JSON object: {error}"))?,
        value => read(value)?,
    };
    value.remove("type");
    let Structures { structures, triggers } = match value.remove("format") {
        Some(format) if value.is_empty() => structures(read(format)?)?,
        Some(_) => return Err("`format` has no other fields beside it".to_owned()),
        None => read(Value::Object(value))?,
    };
    for (kind, given) in [("triggers", triggers.len()), ("tags", structures.len())] {
        if given > MAX_PARTS {
            return Err(format!("it has {given} {kind}, at most {MAX_PARTS} are allowed"));
        }
    }
    let begins_with = |text: &str| triggers.iter().find(|trigger| text.starts_with(trigger.as_str()));
    for trigger in &triggers {
        if trigger.is_empty() {
            return Err("a trigger is empty".to_owned());
        }
        if let Some(other) = triggers.iter().find(|other| *other != trigger && trigger.starts_with(other.as_str())) {
            return Err(format!("the trigger `{other}` is the beginning of the trigger `{trigger}`"));
        }
    }
    if structures.is_empty() {
        return Err("it needs at least one structure".to_owned());
    }
    if let Some(Structure { begin, .. }) = structures.iter().find(|structure| begins_with(&structure.begin).is_none()) {
        return Err(format!("no trigger is the beginning of `{begin}`"));
    }
    lark(&triggers, structures)
}

fn read<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_path_to_error::deserialize(value).map_err(|error| error.to_string())
}

/// The same in the older form.
fn structures(mut format: Map<String, Value>) -> Result<Structures, String> {
    let kind = format.remove("type").unwrap_or_default();
    if kind != "triggered_tags" {
        return Err(format!("format: type {kind} is not supported, but `triggered_tags`"));
    }
    let TriggeredTags { triggers, tags, at_least_one, stop_after_first } = read(Value::Object(format))?;
    for (name, is_set) in [("at_least_one", at_least_one), ("stop_after_first", stop_after_first)] {
        if is_set {
            return Err(format!("format.{name} is not supported unless false"));
        }
    }
    let structure = |Tag { begin, content, end, .. }| match (content.kind.as_str(), content.json_schema) {
        ("json_schema", Some(schema)) => Ok(Structure { begin, schema, end }),
        ("json_schema", None) => Err(format!("the content of `{begin}` has no `json_schema`")),
        (kind, _) => Err(format!("content of type `{kind}` is not supported, but `json_schema`")),
    };
    Ok(Structures { structures: tags.into_iter().map(structure).collect::<Result<_, _>>()?, triggers })
}

/// Each structure begins with one of the triggers.
fn lark(triggers: &[String], structures: Vec<Structure>) -> Result<Constraint, String> {
    let mut left_out = Vec::new();
    let mut rules = String::new();
    let mut tags = Vec::new();
    // A lazy rule ends as soon as the trigger is complete.
    for (number, trigger) in triggers.iter().enumerate() {
        let _ = writeln!(rules, "trigger_{number}[lazy]: TEXT {}", literal(trigger));
    }
    for (number, Structure { begin, schema, end }) in structures.into_iter().enumerate() {
        let starts = |trigger: &&String| begin.starts_with(trigger.as_str());
        let (index, trigger) =
            triggers.iter().enumerate().find(|(_, trigger)| starts(trigger)).expect("invariant: begins with a trigger");
        let rest = literal(&begin[trigger.len()..]);
        let _ = writeln!(rules, "json_{number}: %json {}", json(schema, &mut left_out)?);
        tags.push(format!("trigger_{index} {rest} json_{number} {}", literal(&end)));
    }
    let any_trigger: Vec<_> = triggers.iter().map(|trigger| regex::escape(trigger).replace('/', r"\/")).collect();
    let _ = writeln!(rules, "TEXT: /(?s:.*)/\nREST: /(?s:.*)/ & ~/(?s:.*)({})(?s:.*)/", any_trigger.join("|"));
    let grammar = Grammar::Lark(format!("start: ({})* REST\n{rules}", tags.join(" | ")));
    Ok(Constraint { grammar, left_out })
}

/// Lark writes strings as JSON does.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

fn json(mut schema: Value, left_out: &mut Vec<String>) -> Result<Value, String> {
    closed_schema::close(&mut schema);
    left_out.extend(make_enforceable(&mut schema, Enforcement::Strict)?);
    let mut schema = match schema {
        Value::Object(schema) => schema,
        Value::Bool(true) => Map::new(),
        _ => return Err("a JSON schema is an object".to_owned()),
    };
    schema.insert("x-guidance".to_owned(), serde_json::json!({"whitespace_pattern": WHITESPACE}));
    Ok(schema.into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn both_forms_mean_the_same() {
        let older = json!({
            "type": "structural_tag",
            "structures": [
                {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
                {"begin": "[", "schema": true, "end": "]"},
            ],
            "triggers": ["<f=", "["],
        });
        let tag = |begin, schema, end| json!({"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end});
        let tags = [tag("<f=a>", json!({"type": "integer"}), "</f>"), tag("[", json!(true), "]")];
        let format = json!({"type": "triggered_tags", "triggers": ["<f=", "["], "tags": tags, "at_least_one": false});
        let newer = json!({"type": "structural_tag", "format": format});
        let Grammar::Lark(lark) = grammar(older.clone()).unwrap().grammar else { panic!("not Lark") };
        insta::assert_snapshot!(lark, @r#"
        start: (trigger_0 "a>" json_0 "</f>" | trigger_1 "" json_1 "]")* REST
        trigger_0[lazy]: TEXT "<f="
        trigger_1[lazy]: TEXT "["
        json_0: %json {"type":"integer","x-guidance":{"whitespace_pattern":" |\\n {0,32}"}}
        json_1: %json {"x-guidance":{"whitespace_pattern":" |\\n {0,32}"}}
        TEXT: /(?s:.*)/
        REST: /(?s:.*)/ & ~/(?s:.*)(<f=|\[)(?s:.*)/
        "#);
        assert_eq!(grammar(newer), Ok(Grammar::Lark(lark.clone()).into()));
        assert_eq!(grammar(json!(older.to_string())), Ok(Grammar::Lark(lark).into()));
    }

    #[test]
    fn what_cannot_be_enforced_is_refused() {
        let of = |structures: Value, triggers: Value| json!({"structures": structures, "triggers": triggers});
        let one = json!([{"begin": "<a>", "schema": {}, "end": ""}]);
        for (given, message) in [
            (json!(5), "invalid type: integer `5`"),
            (json!("{"), "not a JSON object"),
            (json!({}), "missing field `structures`"),
            (of(json!([{"begin": 5}]), json!([])), "structures[0].begin: invalid type"),
            (of(json!([]), json!(["<"])), "it needs at least one structure"),
            (of(one.clone(), json!([])), "no trigger is the beginning of `<a>`"),
            (of(one.clone(), json!(["", "<"])), "a trigger is empty"),
            (of(one.clone(), json!(["<", "<b"])), "the trigger `<` is the beginning of the trigger `<b`"),
            (of(json!([{"begin": "<", "schema": 5, "end": ""}]), json!(["<"])), "a JSON schema is an object"),
            (json!({"format": {"type": "any_text"}}), "format: type \"any_text\" is not supported"),
            (
                json!({"format": {"type": "triggered_tags", "triggers": [], "tags": [], "at_least_one": true}}),
                "format.at_least_one is not supported",
            ),
            (json!({"format": {"type": "triggered_tags", "triggers": [], "tags": [{}]}}), "tags[0]: missing field"),
            (json!({"format": {}, "triggers": []}), "`format` has no other fields"),
        ] {
            let error = grammar(given.clone()).unwrap_err();
            assert!(error.starts_with(message), "{given}: {error}");
        }
    }

    #[test]
    fn triggers_and_tags_have_a_bound() {
        let of = |num_tags: usize, num_triggers: usize| {
            let tag = |index| json!({"begin": format!("<{index}>"), "schema": true, "end": ""});
            let triggers: Vec<_> = (0..num_triggers).map(|index| format!("<{index}>")).collect();
            let structures: Vec<_> = (0..num_tags).map(|index| tag(index % num_triggers)).collect();
            grammar(json!({"structures": structures, "triggers": triggers}))
        };
        assert!(of(MAX_PARTS, MAX_PARTS).is_ok());
        assert_eq!(of(MAX_PARTS + 1, 1), Err("it has 129 tags, at most 128 are allowed".to_owned()));
        assert_eq!(of(1, MAX_PARTS + 1), Err("it has 129 triggers, at most 128 are allowed".to_owned()));
    }
}
