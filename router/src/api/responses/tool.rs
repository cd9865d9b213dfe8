//! The tools that the model may call, and the client's choice among them.

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::item::problem;
use crate::generation::{ToolSet, ValidationError};
use crate::text::{Tool, ToolChoice};

/// A function. Tools that OpenAI executes are left out if there is also a function, and refused otherwise.
#[derive(Clone, Debug, Deserialize, ToSchema)]
#[schema(as = ResponseTool, example = json!({"type": "function", "name": "get_weather", "description": "The weather at a place.", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}))]
pub(super) struct ToolParam {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    description: Option<String>,
    /// JSON schema of the arguments, enforced for every call.
    parameters: Option<Value>,
}

/// `auto`, `none`, `required`, an object that names a function, or one that allows some of the tools.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "`auto`, `none`, `required`, or an object that names a function or allowed tools")]
#[schema(as = ResponseToolChoice)]
pub(super) enum ToolChoiceParam {
    Mode(Mode),
    Object(ToolChoiceObject),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ResponseToolMode)]
pub(super) enum Mode {
    Auto,
    None,
    Required,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = ResponseToolChoiceObject)]
pub(super) enum ToolChoiceObject {
    Function { name: String },
    AllowedTools { mode: Mode, tools: Vec<AllowedTool> },
}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseAllowedTool)]
pub(super) struct AllowedTool {
    name: String,
}

impl From<Mode> for ToolChoice {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::Auto => Self::Auto,
            Mode::None => Self::None,
            Mode::Required => Self::Required,
        }
    }
}

/// The functions among the tools.
pub(super) fn functions(tools: Vec<ToolParam>) -> Result<Vec<ToolParam>, ValidationError> {
    if let Some(index) = tools.iter().position(|tool| tool.kind == "custom") {
        let path = format!("tools[{index}].type");
        return Err(problem(&path, "`custom` is not supported, only `function` is"));
    }
    let (functions, hosted): (Vec<_>, Vec<_>) = tools.into_iter().partition(|tool| tool.kind == "function");
    match hosted.first().filter(|_| functions.is_empty()) {
        Some(tool) => {
            let why = format!("`{}` is not supported, only `function` is: this server executes no tools", tool.kind);
            Err(problem("tools[0].type", &why))
        }
        None => Ok(functions),
    }
}

/// `None` for a conversation in which the model is shown no tools. `tools` are functions.
pub(super) fn tool_set(
    tools: &[ToolParam],
    choice: Option<ToolChoiceParam>,
    parallel: bool,
) -> Result<Option<ToolSet>, ValidationError> {
    let read = tools.iter().enumerate().map(|(index, tool)| tool.read(index)).collect::<Result<Vec<_>, _>>()?;
    let (mut tools, values): (Vec<_>, Vec<_>) = read.into_iter().unzip();
    let choice = match choice {
        None => ToolChoice::Auto,
        Some(ToolChoiceParam::Mode(mode)) => mode.into(),
        Some(ToolChoiceParam::Object(ToolChoiceObject::Function { name })) => ToolChoice::Named(name),
        Some(ToolChoiceParam::Object(ToolChoiceObject::AllowedTools { mode, tools: allowed })) => {
            if let Some(unknown) = allowed.iter().find(|allowed| tools.iter().all(|tool| tool.name != allowed.name)) {
                return Err(problem("tool_choice.tools", &format!("`{}` is not one of the tools", unknown.name)));
            }
            // The template shows all tools, so that the prefix cache is hit.
            tools.retain(|tool| allowed.iter().any(|allowed| allowed.name == tool.name));
            mode.into()
        }
    };
    Ok(ToolSet::new(tools, values, choice, parallel))
}

impl ToolParam {
    /// The tool as its calls are constrained, and as templates show it.
    fn read(&self, index: usize) -> Result<(Tool, Value), ValidationError> {
        let Some(name) = self.name.clone() else {
            return Err(problem(&format!("tools[{index}]"), "missing field `name`"));
        };
        let mut function = Map::from_iter([("name".to_owned(), name.clone().into())]);
        if let Some(description) = &self.description {
            function.insert("description".to_owned(), description.clone().into());
        }
        if let Some(parameters) = self.parameters.as_ref().filter(|parameters| !parameters.is_null()) {
            function.insert("parameters".to_owned(), parameters.clone());
        }
        let value = json!({"type": "function", "function": function});
        Ok((Tool { name, parameters: self.parameters.clone() }, value))
    }

    /// The function as responses repeat it.
    pub(super) fn echo(&self) -> Value {
        let Self { name, description, parameters, .. } = self;
        json!({"type": "function", "name": name, "description": description, "parameters": parameters, "strict": true})
    }
}
