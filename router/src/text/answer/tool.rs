//! The tools of a request, and which of them the model may or must call.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use crate::text::schema::{Enforcement, make_enforceable};

/// A function that the model may call.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Tool {
    pub(crate) name: String,
    /// JSON schema of the arguments; `#/$defs/…` refers to definitions inside it. `None`: the function has no parameters.
    pub(crate) parameters: Option<Value>,
}

/// The tool calls that an answer may contain.
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

    /// Whether an answer may call this tool.
    pub(crate) fn allows(&self, tool: &Tool) -> bool {
        match self {
            Self::Named(name) => tool.name == *name,
            _ => true,
        }
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
    #[error("{problem}")]
    Schema { problem: String },
}

impl Tool {
    /// The tool with a schema that a grammar can express, and what of its schema is not enforced. COMPAT: keywords that cannot
    /// be enforced are left out, because agents cannot change the schemas of their tools.
    pub(super) fn enforceable(&self) -> Result<(Self, Vec<String>), ToolError> {
        let mut tool = self.clone();
        let Some(parameters) = &mut tool.parameters else { return Ok((tool, Vec::new())) };
        let named = |problem: String| format!("the parameters of the function {:?}: {problem}", self.name);
        let left_out = make_enforceable(parameters, Enforcement::Lenient)
            .map_err(|problem| ToolError::Schema { problem: named(problem) })?;
        Ok((tool, left_out.into_iter().map(named).collect()))
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
/// whitespace. COMPAT: keywords that the engine does not know have no effect, as in [`Tool::enforceable`].
pub(super) fn json_options() -> Value {
    json!({"whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?", "lenient": true})
}
