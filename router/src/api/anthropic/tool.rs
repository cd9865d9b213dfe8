//! The tools that the model may call, and the client's choice among them.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::known_tool::{Display, KnownTool, known};
use crate::generation::{ToolSet, ValidationError};
use crate::telemetry::Warnings;
use crate::text::{Tool, ToolChoice};

/// The type of tools that the request describes.
const CUSTOM: &str = "custom";

/// A function that the client executes. Further fields have no effect.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicTool, example = json!({"name": "get_weather", "description": "The weather at a place.", "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}))]
pub(super) struct ToolParam {
    /// Required except of tools that are left out.
    name: Option<String>,
    description: Option<String>,
    /// JSON schema of the input, enforced for every call. Required of `custom` tools only.
    #[schema(value_type = Object)]
    input_schema: Option<Value>,
    /// `custom`, or with a date a tool that the client executes (`bash_`, `text_editor_`, `memory_`, `computer_`): the
    /// model is shown its documented input. Tools that Anthropic executes (`web_search_`, `code_execution_`, …) are left out if
    /// there is also another tool, and refused otherwise.
    #[serde(rename = "type")]
    #[schema(default = "custom")]
    kind: Option<String>,
    /// Width of the screen of a `computer` tool.
    display_width_px: Option<u32>,
    /// Height of the screen of a `computer` tool.
    display_height_px: Option<u32>,
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

/// The tools that the model is shown; `None` for a conversation in which it is shown none. Warns of tools that are left out.
pub(super) fn tool_set(
    tools: Option<Vec<ToolParam>>,
    choice: Option<ToolChoiceParam>,
    warnings: &mut Warnings,
) -> Result<Option<ToolSet>, ValidationError> {
    let (mut shown, mut values) = (Vec::new(), Vec::new());
    let mut hosted = Vec::new();
    for (index, tool) in tools.into_iter().flatten().enumerate() {
        match tool.read(index)? {
            Read::Shown(tool, value) => {
                shown.push(tool);
                values.push(value);
            }
            Read::Hosted(kind) => hosted.push((index, kind)),
        }
    }
    if let Some((index, kind)) = hosted.first().filter(|_| shown.is_empty()) {
        return Err(refused(*index, ".type", format!("`{kind}` is not supported: {HOSTED}")));
    }
    for (index, kind) in hosted {
        warnings.push(format!("tools[{index}].type: `{kind}` is left out: {HOSTED}"));
    }
    let (choice, parallel) = choice.map_or((ToolChoice::Auto, true), ToolChoiceParam::read);
    Ok(ToolSet::new(shown, values, choice, parallel))
}

const HOSTED: &str = "Anthropic executes it, and this server executes no tools";

/// A tool of the request.
enum Read {
    /// As its calls are constrained, and as templates show it.
    Shown(Tool, Value),
    /// A tool of this type, which Anthropic executes.
    Hosted(String),
}

fn refused(index: usize, field: &str, problem: String) -> ValidationError {
    ValidationError::Item { path: format!("tools[{index}]{field}"), problem }
}

impl ToolParam {
    fn read(self, index: usize) -> Result<Read, ValidationError> {
        let display = Display { width: self.display_width_px, height: self.display_height_px };
        let (description, schema) = match self.kind.filter(|kind| kind != CUSTOM) {
            None => (self.description, self.input_schema),
            Some(kind) => match known(&kind, display) {
                Some(KnownTool::Client { description, schema }) => (Some(description), Some(schema)),
                Some(KnownTool::Hosted) => return Ok(Read::Hosted(kind)),
                None => {
                    let instead = "send it with the type `custom` and an `input_schema`";
                    return Err(refused(index, ".type", format!("`{kind}` is not a known tool; {instead}")));
                }
            },
        };
        let name = self.name.ok_or_else(|| refused(index, "", "missing field `name`".to_owned()))?;
        let schema = schema.ok_or_else(|| refused(index, "", "missing field `input_schema`".to_owned()))?;
        let mut function = Map::from_iter([("name".to_owned(), name.clone().into())]);
        if let Some(description) = description {
            function.insert("description".to_owned(), description.into());
        }
        function.insert("parameters".to_owned(), schema.clone());
        Ok(Read::Shown(Tool { name, parameters: Some(schema) }, json!({"type": "function", "function": function})))
    }
}
