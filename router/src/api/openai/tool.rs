//! The tools of a chat, and the client's choice among them.

use std::borrow::Cow;

use serde::de::Error;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::api::field::named;
use crate::text::{Tool, ToolChoice};

/// A tool as its calls are constrained, and as the template shows it.
#[derive(Debug)]
pub(crate) struct ToolField {
    pub(super) tool: Tool,
    pub(super) value: Value,
}

/// The fields that the server reads; the template sees all fields.
#[derive(Deserialize, ToSchema)]
#[schema(as = Tool, example = json!({"type": "function", "function": {"name": "get_weather", "description": "The weather at a place.", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}}))]
struct GivenTool {
    /// Always `function`.
    #[serde(rename = "type")]
    #[schema(value_type = Option<String>)]
    _kind: Option<String>,
    function: Function,
}

#[derive(Deserialize, ToSchema)]
struct Function {
    name: String,
    /// JSON schema of the arguments, enforced for every call. TGI's name `arguments` is accepted, too.
    parameters: Option<Value>,
}

impl PartialSchema for ToolField {
    fn schema() -> RefOr<Schema> {
        GivenTool::schema()
    }
}

impl ToSchema for ToolField {
    fn name() -> Cow<'static, str> {
        "Tool".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        GivenTool::schemas(schemas);
    }
}

impl<'de> Deserialize<'de> for ToolField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut value = Value::deserialize(deserializer)?;
        if let Some(function) = value.get_mut("function").and_then(Value::as_object_mut)
            && !function.contains_key("parameters")
            && let Some(schema) = function.remove("arguments")
        {
            // COMPAT: TGI's name of the field.
            function.insert("parameters".to_owned(), schema);
        }
        let is_function = |kind: &str| kind == "function";
        if let Some(kind) = value.get("type").and_then(Value::as_str).filter(|kind| !is_function(kind)) {
            return Err(D::Error::custom(format!("type: `{kind}` is not supported, only `function` is")));
        }
        let given = named(&value, |value| GivenTool::deserialize(value)).map_err(D::Error::custom)?;
        let Function { name, parameters } = given.function;
        Ok(Self { tool: Tool { name, parameters }, value })
    }
}

/// `auto`, `none`, `required`, a function's name, an object that names one, or a list of allowed tools.
#[derive(Debug)]
pub(crate) struct ToolChoiceField {
    pub(super) choice: ToolChoice,
    /// Names of the tools that may be called; `None`: all.
    pub(super) allowed: Option<Vec<String>>,
}

#[derive(Deserialize, ToSchema)]
#[serde(
    untagged,
    expecting = "tool_choice: `auto`, `none`, `required`, a function's name, an object with one, or `allowed_tools` with \
                 the mode `auto` or `required`"
)]
enum GivenChoice {
    Text(String),
    Named { function: FunctionName },
    Allowed { allowed_tools: AllowedTools },
}

/// The tools that may be called. The model is shown all tools.
#[derive(Deserialize, ToSchema)]
struct AllowedTools {
    mode: AllowedMode,
    tools: Vec<AllowedTool>,
}

#[derive(Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
enum AllowedMode {
    Auto,
    Required,
}

#[derive(Deserialize, ToSchema)]
struct AllowedTool {
    function: FunctionName,
}

#[derive(Deserialize, ToSchema)]
struct FunctionName {
    name: String,
}

impl PartialSchema for ToolChoiceField {
    fn schema() -> RefOr<Schema> {
        GivenChoice::schema()
    }
}

impl ToSchema for ToolChoiceField {
    fn name() -> Cow<'static, str> {
        "ToolChoice".into()
    }

    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        GivenChoice::schemas(schemas);
    }
}

impl<'de> Deserialize<'de> for ToolChoiceField {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let choice = match GivenChoice::deserialize(deserializer)? {
            GivenChoice::Allowed { allowed_tools: AllowedTools { mode, tools } } => {
                let choice = match mode {
                    AllowedMode::Auto => ToolChoice::Auto,
                    AllowedMode::Required => ToolChoice::Required,
                };
                if tools.is_empty() {
                    return Err(D::Error::custom("tool_choice: `allowed_tools` allows no tool; send `none` instead"));
                }
                let allowed = tools.into_iter().map(|tool| tool.function.name).collect();
                return Ok(Self { choice, allowed: Some(allowed) });
            }
            GivenChoice::Named { function } => ToolChoice::Named(function.name),
            GivenChoice::Text(text) => match text.as_str() {
                "auto" => ToolChoice::Auto,
                "none" => ToolChoice::None,
                "required" => ToolChoice::Required,
                _ => ToolChoice::Named(text),
            },
        };
        Ok(Self { choice, allowed: None })
    }
}
