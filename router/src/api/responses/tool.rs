//! The tools that the model may call, and the client's choice among them.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::problem::problem;
use crate::generation::{ToolSet, ValidationError};
use crate::text::{Tool, ToolChoice};

/// A function, or a namespace of functions. Tools that OpenAI executes are left out if there is also a function, and
/// refused otherwise.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseTool, no_recursion, example = json!({"type": "function", "name": "get_weather", "description": "The weather at a place.", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}))]
pub(super) struct ToolParam {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    description: Option<String>,
    /// Of a function: JSON schema of the arguments, enforced for every call.
    parameters: Option<Value>,
    /// Of a namespace: its functions.
    tools: Option<Vec<ToolParam>>,
}

/// A function that the client executes.
#[derive(Debug)]
pub(super) struct Function {
    namespace: Option<String>,
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
}

/// Namespace and name of the functions in namespaces, by the names that the model is shown.
#[derive(Debug, Default)]
pub(crate) struct Namespaces(HashMap<String, (String, String)>);

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
    Function { name: String, namespace: Option<String> },
    AllowedTools { mode: Mode, tools: Vec<AllowedTool> },
}

#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseAllowedTool)]
pub(super) struct AllowedTool {
    name: String,
    namespace: Option<String>,
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

/// The name that the model is shown: formats of calls allow only few characters.
pub(super) fn shown_name(namespace: Option<&str>, name: &str) -> String {
    namespace.map_or_else(|| name.to_owned(), |namespace| format!("{namespace}__{name}"))
}

/// The functions among the tools, also those in namespaces.
pub(super) fn functions(tools: Vec<ToolParam>) -> Result<Vec<Function>, ValidationError> {
    let mut functions = Vec::new();
    let mut hosted = None;
    for (index, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{index}]");
        match (tool.kind.as_str(), tool.tools) {
            ("namespace", members) => {
                let namespace = tool.name.ok_or_else(|| problem(&path, "missing field `name`"))?;
                for (index, member) in members.into_iter().flatten().enumerate() {
                    let path = format!("{path}.tools[{index}]");
                    if member.kind != "function" {
                        return Err(unsupported(&path, &member.kind));
                    }
                    functions.push(member.into_function(Some(namespace.clone()), &path)?);
                }
            }
            ("function", _) => functions.push(ToolParam { tools: None, ..tool }.into_function(None, &path)?),
            ("custom", _) => return Err(unsupported(&path, "custom")),
            _ => hosted = hosted.or(Some((path, tool.kind))),
        }
    }
    match hosted.filter(|_| functions.is_empty()) {
        Some((path, kind)) => Err(unsupported(&path, &kind)),
        None => Ok(functions),
    }
}

fn unsupported(path: &str, kind: &str) -> ValidationError {
    let why = format!("`{kind}` is not supported, only `function` is: this server executes no tools");
    problem(&format!("{path}.type"), &why)
}

/// `None` for a conversation in which the model is shown no tools.
pub(super) fn tool_set(
    functions: &[Function],
    choice: Option<ToolChoiceParam>,
    parallel: bool,
) -> Result<Option<ToolSet>, ValidationError> {
    let (mut tools, values): (Vec<_>, Vec<_>) = functions.iter().map(Function::read).unzip();
    let choice = match choice {
        None => ToolChoice::Auto,
        Some(ToolChoiceParam::Mode(mode)) => mode.into(),
        Some(ToolChoiceParam::Object(ToolChoiceObject::Function { name, namespace })) => {
            ToolChoice::Named(shown_name(namespace.as_deref(), &name))
        }
        Some(ToolChoiceParam::Object(ToolChoiceObject::AllowedTools { mode, tools: allowed })) => {
            let allowed: Vec<_> =
                allowed.iter().map(|allowed| shown_name(allowed.namespace.as_deref(), &allowed.name)).collect();
            if let Some(unknown) = allowed.iter().find(|allowed| tools.iter().all(|tool| tool.name != **allowed)) {
                return Err(problem("tool_choice.tools", &format!("`{unknown}` is not one of the tools")));
            }
            // The template shows all tools, so that the prefix cache is hit.
            tools.retain(|tool| allowed.contains(&tool.name));
            mode.into()
        }
    };
    Ok(ToolSet::new(tools, values, choice, parallel))
}

impl ToolParam {
    fn into_function(self, namespace: Option<String>, path: &str) -> Result<Function, ValidationError> {
        let Self { name, description, parameters, .. } = self;
        let name = name.ok_or_else(|| problem(path, "missing field `name`"))?;
        Ok(Function { namespace, name, description, parameters })
    }
}

impl Function {
    fn shown_name(&self) -> String {
        shown_name(self.namespace.as_deref(), &self.name)
    }

    /// The tool as its calls are constrained, and as templates show it.
    fn read(&self) -> (Tool, Value) {
        let name = self.shown_name();
        let mut function = Map::from_iter([("name".to_owned(), name.clone().into())]);
        if let Some(description) = &self.description {
            function.insert("description".to_owned(), description.clone().into());
        }
        if let Some(parameters) = self.parameters.as_ref().filter(|parameters| !parameters.is_null()) {
            function.insert("parameters".to_owned(), parameters.clone());
        }
        (Tool { name, parameters: self.parameters.clone() }, json!({"type": "function", "function": function}))
    }

    /// The function as responses repeat it.
    pub(super) fn echo(&self) -> Value {
        let Self { description, parameters, .. } = self;
        let name = self.shown_name();
        json!({"type": "function", "name": name, "description": description, "parameters": parameters, "strict": true})
    }
}

impl Namespaces {
    pub(super) fn of(functions: &[Function]) -> Self {
        let in_namespace = |function: &Function| {
            let namespace = function.namespace.clone()?;
            Some((function.shown_name(), (namespace, function.name.clone())))
        };
        Self(functions.iter().filter_map(in_namespace).collect())
    }

    /// Namespace and name of a function that the model calls.
    pub(crate) fn split(&self, shown: &str) -> (Option<String>, String) {
        match self.0.get(shown) {
            Some((namespace, name)) => (Some(namespace.clone()), name.clone()),
            None => (None, shown.to_owned()),
        }
    }
}
