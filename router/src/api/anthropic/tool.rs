//! The tools that the model may call, and the client's choice among them.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use crate::generation::{ToolSet, ValidationError};
use crate::text::{Tool, ToolChoice};

/// The type of tools that the client executes.
const CUSTOM: &str = "custom";

/// A function that the client executes. Further fields have no effect.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicTool, example = json!({"name": "get_weather", "description": "The weather at a place.", "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}))]
pub(super) struct ToolParam {
    name: String,
    description: Option<String>,
    /// JSON schema of the input, enforced for every call.
    #[schema(value_type = Object)]
    input_schema: Option<Value>,
    /// Only `custom`: this server executes no tools.
    #[serde(rename = "type")]
    #[schema(default = "custom")]
    kind: Option<String>,
}

/// How the model may use the tools.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = AnthropicToolChoice)]
pub(super) enum ToolChoiceParam {
    /// Text or calls.
    Auto { disable_parallel_tool_use: Option<bool> },
    /// At least one call.
    Any { disable_parallel_tool_use: Option<bool> },
    /// A call of this tool.
    Tool { name: String, disable_parallel_tool_use: Option<bool> },
    /// Text only.
    None,
}

impl ToolChoiceParam {
    /// The choice, and whether one answer may have several calls.
    fn read(self) -> (ToolChoice, bool) {
        let (choice, disables_parallel) = match self {
            Self::Auto { disable_parallel_tool_use } => (ToolChoice::Auto, disable_parallel_tool_use),
            Self::Any { disable_parallel_tool_use } => (ToolChoice::Required, disable_parallel_tool_use),
            Self::Tool { name, disable_parallel_tool_use } => (ToolChoice::Named(name), disable_parallel_tool_use),
            Self::None => (ToolChoice::None, None),
        };
        (choice, !disables_parallel.unwrap_or(false))
    }
}

/// `None` for a conversation in which the model is shown no tools.
pub(super) fn tool_set(
    tools: Option<Vec<ToolParam>>,
    choice: Option<ToolChoiceParam>,
) -> Result<Option<ToolSet>, ValidationError> {
    let tools = tools.into_iter().flatten().enumerate().map(|(index, tool)| tool.read(index));
    let (tools, values): (Vec<_>, Vec<_>) = tools.collect::<Result<Vec<_>, _>>()?.into_iter().unzip();
    let (choice, parallel) = choice.map_or((ToolChoice::Auto, true), ToolChoiceParam::read);
    Ok(ToolSet::new(tools, values, choice, parallel))
}

impl ToolParam {
    /// The tool as its calls are constrained, and as templates show it.
    fn read(self, index: usize) -> Result<(Tool, Value), ValidationError> {
        let refused = |field: &str, problem: String| {
            Err(ValidationError::Item { path: format!("tools[{index}]{field}"), problem })
        };
        if let Some(kind) = self.kind.filter(|kind| kind != CUSTOM) {
            return refused(
                ".type",
                format!("`{kind}` is not supported, only `{CUSTOM}` is: this server executes no tools"),
            );
        }
        let Some(schema) = self.input_schema else {
            return refused("", "missing field `input_schema`".to_owned());
        };
        let mut function = Map::from_iter([("name".to_owned(), self.name.clone().into())]);
        if let Some(description) = self.description {
            function.insert("description".to_owned(), description.into());
        }
        function.insert("parameters".to_owned(), schema.clone());
        let value = json!({"type": "function", "function": function});
        Ok((Tool { name: self.name, parameters: Some(schema) }, value))
    }
}
