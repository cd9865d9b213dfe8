//! Tools as clients offer them, and which of them they want called.

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::text::{Tool, ToolChoice};

/// A tool as the model must keep it, and as the template shows it.
#[derive(Debug)]
pub(crate) struct ToolField {
    pub(super) tool: Tool,
    pub(super) value: Value,
}

impl<'de> Deserialize<'de> for ToolField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Given {
            #[serde(rename = "type")]
            kind: Option<String>,
            function: Function,
        }
        #[derive(Deserialize)]
        struct Function {
            name: String,
            parameters: Option<Value>,
        }
        let mut value = Value::deserialize(deserializer)?;
        if let Some(function) = value.get_mut("function").and_then(Value::as_object_mut)
            && !function.contains_key("parameters")
            && let Some(schema) = function.remove("arguments")
        {
            // COMPAT: TGI's other name for it.
            function.insert("parameters".to_owned(), schema);
        }
        let given = Given::deserialize(&value).map_err(|error| D::Error::custom(format!("tools: {error}")))?;
        if let Some(kind) = given.kind.filter(|kind| kind != "function") {
            return Err(D::Error::custom(format!("tools: type `{kind}` is not supported, only `function` is")));
        }
        let Function { name, parameters } = given.function;
        Ok(Self { tool: Tool { name, parameters }, value })
    }
}

/// `auto`, `none`, `required`, a function's name, or an object that names one.
#[derive(Debug)]
pub(crate) struct ToolChoiceField(pub(super) ToolChoice);

impl<'de> Deserialize<'de> for ToolChoiceField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "tool_choice: `auto`, `none`, `required`, a function's name, or an object with one"
        )]
        enum Given {
            Text(String),
            Named { function: FunctionName },
        }
        #[derive(Deserialize)]
        struct FunctionName {
            name: String,
        }
        Ok(Self(match Given::deserialize(deserializer)? {
            Given::Named { function } => ToolChoice::Named(function.name),
            Given::Text(text) => match text.as_str() {
                "auto" => ToolChoice::Auto,
                "none" => ToolChoice::None,
                "required" => ToolChoice::Required,
                _ => ToolChoice::Named(text),
            },
        }))
    }
}

/// What a chat may call. Not empty, unless its choice cannot be met.
#[derive(Debug)]
pub(crate) struct ToolSet {
    pub(crate) tools: Vec<Tool>,
    pub(crate) values: Vec<Value>,
    pub(crate) choice: ToolChoice,
    pub(crate) parallel: bool,
    /// What the model is to be told instead of ours.
    pub(crate) prompt: Option<String>,
}
