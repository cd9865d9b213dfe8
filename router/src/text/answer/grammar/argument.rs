//! Grammars of arguments that are not a JSON object.
//!
//! Each declared argument matches its schema, in the order in which the schema declares them; undeclared arguments are not
//! allowed. What a schema says about the object as a whole (`anyOf`, `minProperties`, …) is not enforced here.

use serde_json::{Map, Value, json};

use super::Piece;
use super::lark::{Lark, literal, regex_literal};
use crate::text::answer::format::{Literals, Tags, Types};
use crate::text::answer::tool::{Tool, ToolError, json_options};
use crate::text::answer::value_kind::{ValueKind, allows_text, resolved};

/// A schema refers to other schemas at most this deep; below, any value is allowed.
pub(super) const MAX_DEPTH: usize = 6;

/// One declared argument.
pub(super) struct Argument<'a> {
    pub(super) key: &'a str,
    pub(super) schema: &'a Value,
    pub(super) is_required: bool,
}

pub(super) fn declared<'a>(object: &'a Value, root: &'a Value) -> Vec<Argument<'a>> {
    let Some(object) = resolved(object, root) else { return Vec::new() };
    let required = object.get("required").and_then(Value::as_array);
    let is_required = |key: &str| required.is_some_and(|names| names.iter().any(|name| name == key));
    let properties = object.get("properties").and_then(Value::as_object).into_iter().flatten();
    properties.map(|(key, schema)| Argument { key, schema, is_required: is_required(key) }).collect()
}

/// The schema with the definitions to which it may refer, as the body of a rule.
pub(super) fn json_rule(schema: &Value, root: &Value) -> String {
    let mut schema = match schema {
        Value::Object(schema) => schema.clone(),
        _ => Map::new(),
    };
    for name in ["$defs", "definitions"] {
        if let Some(definitions) = root.get(name) {
            schema.entry(name).or_insert_with(|| definitions.clone());
        }
    }
    schema.insert("x-guidance".to_owned(), json_options());
    format!("%json {}", Value::Object(schema))
}

/// The part of the schema that a value between markers of these types matches, and whether that value is text without
/// quotes. `None` if there is none.
fn narrowed(schema: &Value, root: &Value, types: Types) -> Option<(Value, bool)> {
    let kind = ValueKind::of(schema, root);
    let of_types = |names: &[&str]| of_types(schema, root, names, MAX_DEPTH).map(|schema| (schema, false));
    match types {
        Types::BySchema if kind == ValueKind::Any => Some((schema.clone(), false)),
        Types::BySchema | Types::Text => {
            allows_text(schema, root).then(|| (text_branch(schema, root, MAX_DEPTH), true))
        }
        Types::NotText if kind == ValueKind::OptionalText => of_types(&["null"]),
        Types::NotText => (kind == ValueKind::Any).then(|| (schema.clone(), false)),
        Types::Number => of_types(&["number", "integer"]),
        Types::Boolean => of_types(&["boolean"]),
        Types::Null => of_types(&["null"]),
        Types::Object => of_types(&["object"]),
        Types::Array => of_types(&["array"]),
    }
}

pub(super) fn branches(schema: &Value) -> Option<&Vec<Value>> {
    ["anyOf", "oneOf"].into_iter().find_map(|name| schema.get(name)).and_then(Value::as_array)
}

/// The schema of the texts that a schema allows.
pub(super) fn text_branch(schema: &Value, root: &Value, depth: usize) -> Value {
    let Some(schema) = resolved(schema, root).filter(|_| depth > 0) else { return json!({}) };
    let branch = branches(schema).and_then(|branches| branches.iter().find(|branch| allows_text(branch, root)));
    branch.map_or_else(|| schema.clone(), |branch| text_branch(branch, root, depth - 1))
}

/// The schema of the values of these types that a schema allows.
fn of_types(schema: &Value, root: &Value, names: &[&str], depth: usize) -> Option<Value> {
    let schema = resolved(schema, root).filter(|_| depth > 0)?;
    if let Some(branches) = branches(schema) {
        return branches.iter().find_map(|branch| of_types(branch, root, names, depth - 1));
    }
    let types: Vec<&str> = match schema.get("type") {
        Some(Value::Array(types)) => types.iter().filter_map(Value::as_str).collect(),
        Some(name) => name.as_str().into_iter().collect(),
        None => names.to_vec(),
    };
    let name = types.into_iter().find(|name| names.contains(name))?;
    let mut schema = schema.as_object().cloned().unwrap_or_default();
    schema.insert("type".to_owned(), name.into());
    if let Some(values) = schema.get_mut("enum").and_then(Value::as_array_mut) {
        let is_of = |value: &Value| match name {
            "null" => value.is_null(),
            "boolean" => value.is_boolean(),
            "object" => value.is_object(),
            "array" => value.is_array(),
            _ => value.is_number(),
        };
        values.retain(is_of);
        if values.is_empty() {
            return None;
        }
    }
    Some(schema.into())
}

/// The texts of a schema that lists them. COMPAT: null is written as a word.
fn allowed_texts(schema: &Value) -> Option<Vec<String>> {
    let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    match (schema.get("const"), schema.get("enum").and_then(Value::as_array)) {
        (Some(value), _) => Some(vec![text(value)]),
        (None, Some(values)) => Some(values.iter().map(text).collect()),
        (None, None) => None,
    }
}

impl Lark<'_> {
    /// Adds the rule `name`. Returns false if there are no arguments, and no rule.
    pub(super) fn tagged_arguments(&mut self, tags: &'static Tags, name: &str, tool: &Tool) -> Result<bool, ToolError> {
        tool.arguments_schema()?;
        let nothing = json!({});
        let root = tool.parameters.as_ref().unwrap_or(&nothing);
        let mut sequence = Vec::new();
        for (number, argument) in declared(root, root).iter().enumerate() {
            let rule = format!("{name}_{number}");
            let body = self.tagged_argument(tags, &rule, argument, root);
            self.rule(&rule, &body);
            sequence.push(format!("(SPACE? {rule}){}", if argument.is_required { "" } else { "?" }));
        }
        if !sequence.is_empty() {
            self.rule(name, &sequence.join(" "));
        }
        Ok(!sequence.is_empty())
    }

    fn tagged_argument(&mut self, tags: &'static Tags, name: &str, argument: &Argument<'_>, root: &Value) -> String {
        let line_end = if tags.own_lines { "\n" } else { "" };
        let mut alternatives = Vec::new();
        for (number, (after_key, types)) in tags.after_key.iter().enumerate() {
            let narrowed = narrowed(argument.schema, root, *types);
            let Some((schema, is_text)) = narrowed else { continue };
            let mut head = self.pieces(tags.before_key).iter().map(Owned::from).collect::<Vec<_>>();
            head.push(Owned::Text(argument.key.to_owned()));
            head.extend(self.pieces(after_key).iter().map(Owned::from));
            let before_value: Vec<_> = self.pieces(tags.before_value).iter().map(Owned::from).collect();
            let mut head = glued(&head);
            if !tags.before_value.is_empty() {
                head.push_str(" SPACE? ");
                head.push_str(&glued(&before_value));
            }
            let value = if is_text {
                let end: Vec<_> = self.pieces(tags.after_value).iter().map(Owned::from).collect();
                self.raw_text(&format!("{name}_{number}"), &schema, line_end, &end, None)
            } else {
                let value = format!("{name}_{number}");
                self.rule(&value, &json_rule(&schema, root));
                format!("SPACE? {value} SPACE? {}", self.marker(tags.after_value))
            };
            let line = if is_text && tags.own_lines { " \"\\n\"" } else { "" };
            alternatives.push(format!("{head}{line} {value}"));
        }
        alternatives.join(" | ")
    }

    /// Text without quotes, then `line_end` and `end`. `excluded`: what the text cannot contain, if not only `end`; `end`
    /// contains it once.
    pub(super) fn raw_text(
        &mut self,
        name: &str,
        schema: &Value,
        line_end: &str,
        end: &[Owned],
        excluded: Option<&str>,
    ) -> String {
        let (first, rest) = match end {
            [Owned::Text(text), rest @ ..] => (text.as_str(), rest),
            rest => ("", rest),
        };
        let end = format!("{line_end}{first}");
        let terminal = name.to_uppercase();
        let after = if rest.is_empty() { String::new() } else { format!(" {}", glued(rest)) };
        if let Some(texts) = allowed_texts(schema) {
            let texts: Vec<_> = texts.iter().map(|text| literal(&format!("{text}{end}"))).collect();
            self.rule(&terminal, &texts.join(" | "));
            return format!("{terminal}{after}");
        }
        let limit = |name| schema.get(name).and_then(Value::as_u64);
        let (min, max) = (limit("minLength").unwrap_or(0), limit("maxLength"));
        let max = max.map(|max| max.to_string()).unwrap_or_default();
        let length = if min == 0 && max.is_empty() { "(?s:.*)".to_owned() } else { format!("(?s:.{{{min},{max}}})") };
        let pattern_of = |text: &str| regex_literal(&regex::escape(text));
        let ending = pattern_of(&end);
        let mut patterns = vec![format!("/{length}{ending}/")];
        if let Some(pattern) = schema.get("pattern").and_then(Value::as_str) {
            let (head, pattern) = pattern.strip_prefix('^').map_or(("(?s:.*)", pattern), |pattern| ("", pattern));
            let (pattern, tail) = pattern.strip_suffix('$').map_or((pattern, "(?s:.*)"), |pattern| (pattern, ""));
            patterns.push(format!("/{head}(?:{}){tail}{ending}/", regex_literal(pattern)));
        }
        match excluded.map(pattern_of) {
            Some(excluded) if !first.is_empty() => {
                patterns.push(format!("~/(?s:.*){excluded}(?s:.*){excluded}(?s:.*)/"))
            }
            // The first occurrence of the marker ends the text.
            _ if rest.is_empty() => patterns.push(format!("~/(?s:.*){}(?s:.+)/", pattern_of(first))),
            _ => {}
        }
        self.rule(&terminal, &patterns.join(" & "));
        let optional = if end.is_empty() && min == 0 { "?" } else { "" };
        format!("{terminal}{optional}{after}")
    }

    /// Adds the rule `name`: keys with values, and the bracket that closes them.
    pub(super) fn literal_arguments(
        &mut self,
        literals: &'static Literals,
        name: &str,
        tool: &Tool,
    ) -> Result<(), ToolError> {
        tool.arguments_schema()?;
        let nothing = json!({});
        let root = tool.parameters.as_ref().unwrap_or(&nothing);
        let fields = self.fields(literals, name, literals.after_key, root, root, MAX_DEPTH);
        self.rule(name, &format!("{fields} {}", literal(&literals.close.to_string())));
        Ok(())
    }

    /// Declared fields in their order, separated by commas.
    fn fields(
        &mut self,
        literals: &'static Literals,
        name: &str,
        after_key: char,
        object: &Value,
        root: &Value,
        depth: usize,
    ) -> String {
        let arguments = declared(object, root);
        let mut first = String::new();
        let mut next = String::new();
        // From the last field to the first: what may follow if a field has been written, and if none has.
        for (number, argument) in arguments.iter().enumerate().rev() {
            let rule = format!("{name}_{number}");
            let value = self.literal_value(literals, &rule, argument.schema, root, depth);
            let field = format!("{} {value}", literal(&format!("{}{after_key}", argument.key)));
            let with = format!("{field} {next}");
            let after = format!("(\",\" SPACE? {field}){} {next}", if argument.is_required { "" } else { "?" });
            (first, next) = match (argument.is_required, first.is_empty()) {
                (true, _) => (with, after),
                (false, true) => (format!("({with})?"), after),
                (false, false) => (format!("({with} | {first})"), after),
            };
            self.rule(&format!("{rule}_next"), next.trim());
            next = format!("{rule}_next");
            self.rule(&format!("{rule}_first"), first.trim());
            first = format!("{rule}_first");
        }
        first
    }

    fn literal_value(
        &mut self,
        literals: &'static Literals,
        name: &str,
        schema: &Value,
        root: &Value,
        depth: usize,
    ) -> String {
        let Some(marker) = literals.quote else { return self.python_value(name, schema, root) };
        let Some(schema) = resolved(schema, root).filter(|_| depth > 0) else { return self.any_literal(marker) };
        let quote = self.marker(marker);
        if let Some(values) = schema.get("enum").and_then(Value::as_array) {
            let values: Vec<_> = values
                .iter()
                .map(|value| match value.as_str() {
                    Some(text) => format!("{quote} {} {quote}", literal(text)),
                    None => literal(&value.to_string()),
                })
                .collect();
            return format!("({})", values.join(" | "));
        }
        if let Some(branches) = branches(schema) {
            let values: Vec<_> = branches
                .iter()
                .enumerate()
                .map(|(number, branch)| {
                    self.literal_value(literals, &format!("{name}_{number}"), branch, root, depth - 1)
                })
                .collect();
            return format!("({})", values.join(" | "));
        }
        match schema.get("type").and_then(Value::as_str) {
            Some("string") => {
                let end: Vec<_> = self.pieces(marker).iter().map(Owned::from).collect();
                let text = self.raw_text(name, schema, "", &end, None);
                format!("{quote} {text}")
            }
            Some("array") => {
                let any = json!({});
                let items = schema.get("items").unwrap_or(&any);
                let item = self.literal_value(literals, &format!("{name}_item"), items, root, depth - 1);
                format!("\"[\" ({item} (\",\" SPACE? {item})*)? \"]\"")
            }
            Some("object") if schema.get("properties").is_some() => {
                let fields = self.fields(literals, name, ':', schema, root, depth - 1);
                format!("\"{{\" {fields} \"}}\"")
            }
            Some("number" | "integer" | "boolean" | "null") => {
                self.rule(&format!("{name}_json"), &json_rule(schema, root));
                format!("{name}_json")
            }
            _ => self.any_literal(marker),
        }
    }

    /// A value of any type between `marker`s as quotes.
    fn any_literal(&mut self, marker: &'static str) -> String {
        if !self.has_rule("any_literal") {
            let text = self.until("any_text", marker);
            let quote = self.marker(marker);
            self.rule("any_key", "/[A-Za-z0-9_.-]+:/");
            self.rule("any_scalar", "%json {\"type\": [\"number\", \"boolean\", \"null\"]}");
            let list = "\"[\" (any_literal (\",\" SPACE? any_literal)*)? \"]\"";
            let object = "\"{\" (any_key any_literal (\",\" SPACE? any_key any_literal)*)? \"}\"";
            self.rule("any_literal", &format!("{quote} {text} | any_scalar | {list} | {object}"));
        }
        "any_literal".to_owned()
    }

    /// JSON with Python's names of constants.
    fn python_value(&mut self, name: &str, schema: &Value, root: &Value) -> String {
        match resolved(schema, root).and_then(|schema| schema.get("type")).and_then(Value::as_str) {
            Some("boolean") => "(\"True\" | \"False\")".to_owned(),
            Some("null") => "\"None\"".to_owned(),
            _ => {
                self.rule(&format!("{name}_json"), &json_rule(schema, root));
                format!("{name}_json")
            }
        }
    }
}

/// A piece of a marker, or a key.
pub(super) enum Owned {
    Text(String),
    Token(u32),
}

impl From<&Piece> for Owned {
    fn from(piece: &Piece) -> Self {
        match piece {
            Piece::Text(text) => Self::Text((*text).to_owned()),
            Piece::Token(id) => Self::Token(*id),
        }
    }
}

/// The pieces as the body of a rule, with adjacent texts as one literal.
pub(super) fn glued(pieces: &[Owned]) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut text = String::new();
    for piece in pieces {
        match piece {
            Owned::Text(more) => text.push_str(more),
            Owned::Token(id) => {
                if !text.is_empty() {
                    parts.push(literal(&std::mem::take(&mut text)));
                }
                parts.push(format!("<[{id}]>"));
            }
        }
    }
    if !text.is_empty() {
        parts.push(literal(&text));
    }
    parts.join(" ")
}
