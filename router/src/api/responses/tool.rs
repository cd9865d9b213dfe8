//! The tools that the model may call, and the client's choice among them.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use utoipa::ToSchema;

use super::problem::problem;
use super::{custom, lark};
use crate::generation::{ToolSet, ValidationError};
use crate::telemetry::Warnings;
use crate::text::{Tool, ToolChoice};

/// A function, a custom tool, or a namespace of them. Tools that OpenAI executes are left out if there is also a function, and
/// refused otherwise.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ResponseTool, example = json!({"type": "function", "name": "get_weather", "description": "The weather at a place.", "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}}))]
pub(super) struct ToolParam {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    description: Option<String>,
    /// JSON schema of a function's arguments, enforced for every call.
    parameters: Option<Value>,
    /// Format of a custom tool's input: `text`, or a `grammar`.
    format: Option<CustomFormat>,
    /// Functions and custom tools of a namespace.
    #[schema(no_recursion)]
    tools: Option<Vec<ToolParam>>,
}

/// The form of a custom tool's input.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
#[schema(as = ResponseCustomFormat)]
pub(super) enum CustomFormat {
    Text,
    Grammar { syntax: Syntax, definition: String },
}

impl CustomFormat {
    /// A regular expression of the whole input, if its form is limited. The error says why there is none.
    fn pattern(&self) -> Result<Option<String>, String> {
        let pattern = match self {
            Self::Text => return Ok(None),
            Self::Grammar { syntax: Syntax::Regex, definition } => definition.clone(),
            Self::Grammar { syntax: Syntax::Lark, definition } => lark::pattern(definition)?,
        };
        match regex::Regex::new(&pattern) {
            Ok(_) => Ok(Some(pattern)),
            Err(_) => Err("it needs more than a regular expression can say".to_owned()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = ResponseCustomSyntax)]
pub(super) enum Syntax {
    Lark,
    Regex,
}

/// A function or a custom tool, which the client executes.
#[derive(Debug)]
pub(super) struct Function {
    namespace: Option<String>,
    name: String,
    description: Option<String>,
    parameters: Option<Value>,
    /// Format of a custom tool's input.
    custom: Option<CustomFormat>,
}

/// The tools by the names that the model is shown.
#[derive(Debug, Default)]
pub(crate) struct CalledTools(HashMap<String, CalledTool>);

/// A tool as its calls name it.
#[derive(Clone, Debug)]
pub(crate) struct CalledTool {
    pub(crate) namespace: Option<String>,
    pub(crate) name: String,
    /// Whether its input is free-form.
    pub(crate) is_custom: bool,
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
    Function { name: String, namespace: Option<String> },
    Custom { name: String, namespace: Option<String> },
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

/// The functions and custom tools among the tools, also those in namespaces. Warns of tools that are left out, and of grammars
/// that are not enforced.
pub(super) fn functions(tools: Vec<ToolParam>, warnings: &mut Warnings) -> Result<Vec<Function>, ValidationError> {
    let mut functions = Vec::new();
    let mut hosted = Vec::new();
    for (index, tool) in tools.into_iter().enumerate() {
        let path = format!("tools[{index}]");
        match (tool.kind.as_str(), tool.tools) {
            ("namespace", members) => {
                let namespace = tool.name.ok_or_else(|| problem(&path, "missing field `name`"))?;
                for (index, member) in members.into_iter().flatten().enumerate() {
                    let path = format!("{path}.tools[{index}]");
                    if !matches!(member.kind.as_str(), "function" | "custom") {
                        return Err(unsupported(&path, &member.kind));
                    }
                    functions.push(member.into_function(Some(namespace.clone()), &path, warnings)?);
                }
            }
            ("function" | "custom", _) => {
                functions.push(ToolParam { tools: None, ..tool }.into_function(None, &path, warnings)?);
            }
            _ => hosted.push((path, tool.kind)),
        }
    }
    if let Some((path, kind)) = hosted.first().filter(|_| functions.is_empty()) {
        return Err(unsupported(path, kind));
    }
    for (path, kind) in hosted {
        warnings.push(format!("{path}.type: `{kind}` is left out: this server executes no tools"));
    }
    Ok(functions)
}

fn unsupported(path: &str, kind: &str) -> ValidationError {
    let why = format!("`{kind}` is not supported, only `function` and `custom` are: this server executes no tools");
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
        Some(ToolChoiceParam::Object(
            ToolChoiceObject::Function { name, namespace } | ToolChoiceObject::Custom { name, namespace },
        )) => ToolChoice::Named(shown_name(namespace.as_deref(), &name)),
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
    fn into_function(
        self,
        namespace: Option<String>,
        path: &str,
        warnings: &mut Warnings,
    ) -> Result<Function, ValidationError> {
        let Self { kind, name, description, parameters, format, .. } = self;
        let name = name.ok_or_else(|| problem(path, "missing field `name`"))?;
        if kind == "function" {
            return Ok(Function { namespace, name, description, parameters, custom: None });
        }
        let format = format.unwrap_or(CustomFormat::Text);
        let pattern = format.pattern().unwrap_or_else(|reason| {
            warnings.push(format!("{path}.format: the model is shown the grammar, which is not enforced: {reason}"));
            None
        });
        let parameters = Some(custom::schema(pattern.as_deref()));
        Ok(Function { namespace, name, description, parameters, custom: Some(format) })
    }
}

impl Function {
    fn shown_name(&self) -> String {
        shown_name(self.namespace.as_deref(), &self.name)
    }

    /// What the model reads of the tool. It cannot see a grammar that constrains it.
    fn shown_description(&self) -> Option<String> {
        let Some(CustomFormat::Grammar { syntax, definition }) = &self.custom else { return self.description.clone() };
        let syntax = if *syntax == Syntax::Lark { "Lark grammar" } else { "regular expression" };
        let grammar = format!("The input matches this {syntax}:\n{definition}");
        Some(self.description.iter().cloned().chain([grammar]).collect::<Vec<_>>().join("\n\n"))
    }

    /// The tool as its calls are constrained, and as templates show it.
    fn read(&self) -> (Tool, Value) {
        let name = self.shown_name();
        let mut function = Map::from_iter([("name".to_owned(), name.clone().into())]);
        if let Some(description) = self.shown_description() {
            function.insert("description".to_owned(), description.into());
        }
        if let Some(parameters) = self.parameters.as_ref().filter(|parameters| !parameters.is_null()) {
            function.insert("parameters".to_owned(), parameters.clone());
        }
        (Tool { name, parameters: self.parameters.clone() }, json!({"type": "function", "function": function}))
    }

    /// The function as responses repeat it.
    pub(super) fn echo(&self) -> Value {
        let Self { description, parameters, custom, .. } = self;
        let name = self.shown_name();
        if let Some(format) = custom {
            return json!({"type": "custom", "name": name, "description": description, "format": format});
        }
        json!({"type": "function", "name": name, "description": description, "parameters": parameters, "strict": true})
    }
}

impl CalledTools {
    pub(super) fn of(functions: &[Function]) -> Self {
        let called = |function: &Function| {
            let Function { namespace, name, custom, .. } = function;
            let called = CalledTool { namespace: namespace.clone(), name: name.clone(), is_custom: custom.is_some() };
            (function.shown_name(), called)
        };
        Self(functions.iter().map(called).collect())
    }

    /// The tool that the model calls by this name.
    pub(crate) fn called(&self, shown: &str) -> CalledTool {
        let unknown = || CalledTool { namespace: None, name: shown.to_owned(), is_custom: false };
        self.0.get(shown).cloned().unwrap_or_else(unknown)
    }
}
