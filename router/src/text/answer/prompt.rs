//! What a model is told about tools when its template does not tell it.

use serde_json::Value;

use super::format::ToolFormat;

/// The text to add to the last message. `None`: the template says everything.
///
/// `template`: its source. `tools`: as the client gave them. `instruction`: the client's own.
pub(crate) fn tool_prompt(
    format: ToolFormat,
    template: &str,
    tools: &[Value],
    instruction: Option<&str>,
) -> Option<String> {
    let instruction = instruction.filter(|text| !text.is_empty());
    if template.contains("tools") {
        let default = (format == ToolFormat::Generic).then(|| default_instruction(format));
        return instruction.map(str::to_owned).or(default).map(|text| format!("\n---\n{text}"));
    }
    let tools = Value::from(tools.to_vec());
    let text = instruction.map_or_else(|| default_instruction(format), str::to_owned);
    Some(format!("\n---\n{tools}\n{text}"))
}

fn default_instruction(format: ToolFormat) -> String {
    let (key, example) = match format {
        ToolFormat::Gemma => ("parameters", "```tool_code\n{\"name\": NAME, \"parameters\": PARAMETERS}\n```"),
        _ => ("arguments", "{\"name\": NAME, \"arguments\": ARGUMENTS}"),
    };
    format!(
        "You can call the functions described above. To call one, answer with nothing but this, NAME being the \
         function's name and {} a JSON object that fits its schema:\n{example}\nFor several calls write one after the \
         other, each on a new line. If no function helps, answer in plain words and without JSON.",
        key.to_uppercase()
    )
}
