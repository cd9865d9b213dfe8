//! The tools of a request, and which of them the model may or must call.

use std::collections::HashSet;

use regex::RegexBuilder;
use serde_json::{Map, Value, json};

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// JSON schema of the arguments; `#/$defs/…` refers to definitions inside it. `None`: the function has no parameters.
    pub(crate) parameters: Option<Value>,
}

/// Which calls an answer may contain.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum ToolChoice {
    /// The model chooses between text and calls.
    #[default]
    Auto,
    /// Text only.
    None,
    /// At least one call.
    Required,
    /// Exactly one call of this function.
    Named(String),
}

impl ToolChoice {
    /// Whether the answer must be a call.
    pub(crate) fn is_forced(&self) -> bool {
        matches!(self, Self::Required | Self::Named(_))
    }

    /// Checks the tools and the choice among them.
    pub(super) fn check(&self, tools: &[Tool]) -> Result<(), ToolError> {
        if tools.is_empty() && *self == Self::Required {
            return Err(ToolError::NoTools);
        }
        if let Self::Named(name) = self
            && !tools.iter().any(|tool| tool.name == *name)
        {
            return Err(ToolError::Unknown { name: name.clone() });
        }
        if tools.iter().any(|tool| tool.name.is_empty()) {
            return Err(ToolError::NoName);
        }
        let mut names = HashSet::new();
        match tools.iter().find(|tool| !names.insert(&tool.name)) {
            Some(tool) => Err(ToolError::Duplicate { name: tool.name.clone() }),
            None => Ok(()),
        }
    }
}

/// Why the tools of a request cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ToolError {
    #[error("tool_choice requires a tool call, but the request has no tools")]
    NoTools,
    #[error("tool_choice names the function {name:?}, which is not one of the tools")]
    Unknown { name: String },
    #[error("a function's name cannot be empty")]
    NoName,
    #[error("the function name {name:?} is used twice")]
    Duplicate { name: String },
    #[error(
        "the function name {name:?} cannot be written in this model's tool calls: letters, digits and _-.:/ are allowed"
    )]
    Name { name: String },
    #[error("the parameters of the function {name:?} are not a JSON schema of an object")]
    Parameters { name: String },
}

impl Tool {
    /// The tool with those patterns that a grammar can express.
    pub(super) fn with_regular_patterns(&self) -> Self {
        let mut tool = self.clone();
        tool.parameters.as_mut().map(remove_irregular_patterns);
        tool
    }

    /// The schema of a call's arguments as JSON text, with options for the grammar engine.
    pub(super) fn arguments_schema(&self) -> Result<String, ToolError> {
        let invalid = || ToolError::Parameters { name: self.name.clone() };
        let mut schema = match &self.parameters {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(schema)) => schema.clone(),
            Some(_) => return Err(invalid()),
        };
        let is_object = match schema.get("type") {
            None => true,
            Some(Value::Array(types)) => types.iter().any(|of| of == "object"),
            Some(of) => of == "object",
        };
        if !is_object {
            return Err(invalid());
        }
        schema.insert("type".to_owned(), "object".into());
        // A tool cannot use properties that it does not declare, and a model that may invent some might never stop.
        let says_what_else = ["additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"]
            .iter()
            .chain(&["$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "minProperties"])
            .any(|&keyword| schema.contains_key(keyword));
        let knows = |name: &Value| {
            name.as_str().is_some_and(|name| schema.get("properties").is_some_and(|known| known.get(name).is_some()))
        };
        let knows_required =
            schema.get("required").and_then(Value::as_array).is_none_or(|names| names.iter().all(knows));
        if !says_what_else && knows_required {
            schema.insert("additionalProperties".to_owned(), false.into());
        }
        schema.insert("x-guidance".to_owned(), json_options());
        Ok(Value::Object(schema).to_string())
    }
}

/// Options of the grammar engine: one line, as templates write calls, because small models can loop on unrestricted
/// whitespace. COMPAT: keywords that the engine does not know have no effect, because agents cannot change the schemas of
/// their tools.
pub(super) fn json_options() -> Value {
    json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?", "lenient": true})
}

/// Removes patterns with look-around or references from the schema: the grammar engine refuses them.
fn remove_irregular_patterns(schema: &mut Value) {
    match schema {
        Value::Object(object) => {
            if object.get("pattern").and_then(Value::as_str).is_some_and(is_irregular) {
                object.remove("pattern");
            }
            // The values of these keywords are data.
            let is_data = |key: &str| matches!(key, "const" | "enum" | "default" | "examples");
            object.iter_mut().filter(|(key, _)| !is_data(key)).for_each(|(_, value)| remove_irregular_patterns(value));
        }
        Value::Array(values) => values.iter_mut().for_each(remove_irregular_patterns),
        _ => {}
    }
}

fn is_irregular(pattern: &str) -> bool {
    // Without room for a program, the pattern is only parsed.
    let parsed = RegexBuilder::new(pattern).size_limit(0).build();
    matches!(parsed, Err(regex::Error::Syntax(_)))
}
