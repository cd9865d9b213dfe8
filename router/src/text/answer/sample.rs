//! Samples of tool calls in each format, for tests.

use super::ToolCallFormat;

pub(super) const FORMATS: [ToolCallFormat; 8] = [
    ToolCallFormat::Hermes,
    ToolCallFormat::Llama,
    ToolCallFormat::MistralList,
    ToolCallFormat::MistralNamed,
    ToolCallFormat::Gemma,
    ToolCallFormat::DeepSeekFenced,
    ToolCallFormat::DeepSeek,
    ToolCallFormat::Generic,
];

/// A run of calls in this format.
pub(super) fn written(format: ToolCallFormat, calls: &[(&str, &str)]) -> String {
    let object = |key: &str, (name, arguments): &(&str, &str)| {
        format!("{{\"name\": {}, \"{key}\": {arguments}}}", serde_json::Value::from(*name))
    };
    let each = |write: &dyn Fn(&(&str, &str)) -> String, separator: &str| {
        calls.iter().map(write).collect::<Vec<_>>().join(separator)
    };
    match format {
        ToolCallFormat::Hermes => {
            each(&|call| format!("<tool_call>\n{}\n</tool_call>", object("arguments", call)), "\n")
        }
        ToolCallFormat::Llama => each(&|call| object("parameters", call), "; "),
        ToolCallFormat::MistralList => {
            format!("[TOOL_CALLS] [{}]", each(&|call| object("arguments", call), ", "))
        }
        ToolCallFormat::MistralNamed => each(&|(name, arguments)| format!("[TOOL_CALLS]{name}[ARGS]{arguments}"), ""),
        ToolCallFormat::Gemma => each(&|call| format!("```tool_code\n{}\n```", object("parameters", call)), "\n"),
        ToolCallFormat::DeepSeekFenced => {
            let call = |(name, arguments): &(&str, &str)| {
                format!(
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
                )
            };
            format!("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", each(&call, "\n"))
        }
        ToolCallFormat::DeepSeek => {
            let call = |(name, arguments): &(&str, &str)| {
                format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
            };
            format!("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", each(&call, ""))
        }
        ToolCallFormat::Generic => each(&|call| object("arguments", call), "\n"),
    }
}
