//! Grammars of arguments as elements.
//!
//! The declared fields of each object match their schemas, in the order in which the schema declares them; undeclared fields
//! are allowed only in an object whose schema declares none. The names of the end tags there need not match: the parser does
//! not read them.

use serde_json::{Value, json};

use super::argument::{MAX_DEPTH, Owned, branches, declared, glued, json_rule, text_branch};
use super::lark::{Lark, regex_literal};
use crate::text::answer::format::Elements;
use crate::text::answer::tool::{Tool, ToolError};
use crate::text::answer::value_kind::{allows_text, resolved};

/// The name in a tag that no schema declares.
const ANY_NAME: &str = "[A-Za-z0-9_.-]+";

impl Lark<'_> {
    /// Adds the rule `name`. Returns false if there are no arguments, and no rule.
    pub(super) fn element_arguments(
        &mut self,
        elements: &'static Elements,
        name: &str,
        tool: &Tool,
    ) -> Result<bool, ToolError> {
        tool.arguments_schema()?;
        let nothing = json!({});
        let root = tool.parameters.as_ref().unwrap_or(&nothing);
        let fields = ElementGrammar { lark: self, elements, name, root, known: Vec::new() }.fields(root);
        if !fields.is_empty() {
            self.rule(name, &fields);
        }
        Ok(!fields.is_empty())
    }
}

/// Writes the rules of one tool's arguments.
struct ElementGrammar<'a, 'b, 'c> {
    lark: &'a mut Lark<'b>,
    elements: &'static Elements,
    /// Starts the names of all rules.
    name: &'c str,
    /// The tool's schema.
    root: &'c Value,
    /// The schemas and tags of the elements that have a rule, which a schema may contain again.
    known: Vec<(&'c Value, String)>,
}

impl<'c> ElementGrammar<'_, '_, 'c> {
    fn fields(&mut self, object: &'c Value) -> String {
        let fields = declared(object, self.root).into_iter().map(|field| {
            let element = self.element(field.key, field.schema);
            format!("(SPACE? {element}){}", if field.is_required { "" } else { "?" })
        });
        fields.collect::<Vec<_>>().join(" ")
    }

    /// The rule of an element.
    fn element(&mut self, tag: &str, schema: &'c Value) -> String {
        let is_same = |(known, of): &(&Value, String)| std::ptr::eq(*known, schema) && of == tag;
        let index = self.known.iter().position(is_same).unwrap_or(self.known.len());
        let rule = format!("{}_{index}", self.name);
        if index == self.known.len() {
            self.known.push((schema, tag.to_owned()));
            let start = glued(&self.tag(&format!("<{tag}>")));
            let end = self.tag(&format!("</{tag}>"));
            let rest = self.rest(&rule, &end, schema, MAX_DEPTH);
            self.lark.rule(&rule, &format!("{start} {rest}"));
        }
        rule
    }

    fn before_tag(&self) -> Vec<Owned> {
        self.lark.pieces(self.elements.before_tag).iter().map(Owned::from).collect()
    }

    fn tag(&self, tag: &str) -> Vec<Owned> {
        let mut pieces = self.before_tag();
        match pieces.last_mut() {
            Some(Owned::Text(text)) => text.push_str(tag),
            _ => pieces.push(Owned::Text(tag.to_owned())),
        }
        pieces
    }

    /// What an element contains, and its end tag. `name`: starts the names of its terminals.
    fn rest(&mut self, name: &str, end: &[Owned], schema: &'c Value, depth: usize) -> String {
        let Some(schema) = resolved(schema, self.root).filter(|_| depth > 0) else { return self.any(name, end) };
        if schema.get("enum").is_some() || schema.get("const").is_some() {
            return self.text(name, end, schema);
        }
        let mut alternatives = Vec::new();
        // Text and the words for other values cannot be told apart.
        let is_text = allows_text(schema, self.root);
        match (branches(schema), schema.get("type")) {
            (Some(branches), _) => {
                for (number, branch) in branches.iter().enumerate() {
                    let of = resolved(branch, self.root).and_then(|branch| branch.get("type"));
                    if !is_text || of.is_some_and(|of| of == "object" || of == "array") {
                        alternatives.push(self.rest(&format!("{name}_{number}"), end, branch, depth - 1));
                    }
                }
            }
            (None, Some(Value::Array(types))) => {
                for of in types.iter().filter_map(Value::as_str) {
                    if !is_text || of == "object" || of == "array" {
                        alternatives.push(self.rest_of_type(&format!("{name}_{of}"), end, schema, of));
                    }
                }
            }
            (None, Some(of)) => return self.rest_of_type(name, end, schema, of.as_str().unwrap_or_default()),
            (None, None) => return self.any(name, end),
        }
        if is_text {
            let text = text_branch(schema, self.root, depth);
            alternatives.push(self.text(name, end, &text));
        }
        format!("({})", alternatives.join(" | "))
    }

    fn rest_of_type(&mut self, name: &str, end: &[Owned], schema: &'c Value, of: &str) -> String {
        let close = glued(end);
        match of {
            "string" => self.text(name, end, schema),
            "array" => {
                const ANY: &Value = &Value::Null;
                let item = self.element(self.elements.item, schema.get("items").unwrap_or(ANY));
                let limit = |name| schema.get(name).and_then(Value::as_u64);
                let max = limit("maxItems").map(|max| max.to_string()).unwrap_or_default();
                format!("(SPACE? {item}){{{},{max}}} SPACE? {close}", limit("minItems").unwrap_or(0))
            }
            "object" if schema.get("properties").is_some() => format!("{} SPACE? {close}", self.fields(schema)),
            "object" => {
                self.add_any_element();
                format!("any_element* {close}")
            }
            "number" | "integer" | "boolean" | "null" => {
                let mut schema = schema.clone();
                schema["type"] = of.into();
                self.lark.rule(&format!("{name}_json"), &json_rule(&schema, self.root));
                format!("{name}_json {close}")
            }
            _ => self.any(name, end),
        }
    }

    fn text(&mut self, name: &str, end: &[Owned], schema: &Value) -> String {
        self.lark.raw_text(&format!("{name}_text"), schema, "", end, Some(self.elements.before_tag))
    }

    /// A value of any type, and an element's end tag.
    fn any(&mut self, name: &str, end: &[Owned]) -> String {
        let text = self.text(&format!("{name}_any"), end, &json!({}));
        self.add_any_element();
        format!("({text} | any_element+ {})", glued(end))
    }

    /// Adds the rule `any_element`.
    fn add_any_element(&mut self) {
        if self.lark.has_rule("any_element") {
            return;
        }
        let (token, marker) = match &self.before_tag()[..] {
            [Owned::Text(text)] => (String::new(), regex_literal(&regex::escape(text))),
            pieces => (format!("{} ", glued(pieces)), String::new()),
        };
        self.lark.rule("ANY_START", &format!("/{marker}<{ANY_NAME}>/"));
        self.lark.rule("ANY_END", &format!("/{marker}<\\/{ANY_NAME}>/"));
        let text = if marker.is_empty() {
            format!("TEXT? {token}ANY_END")
        } else {
            let text = format!("/(?s:.*){marker}<\\/{ANY_NAME}>/ & ~/(?s:.*){marker}(?s:.*){marker}(?s:.*)/");
            self.lark.rule("ANY_TEXT", &text);
            "ANY_TEXT".to_owned()
        };
        self.lark.rule("any_element", &format!("{token}ANY_START ({text} | any_element+ {token}ANY_END)"));
    }
}
