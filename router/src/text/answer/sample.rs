//! Calls as each format's models write them, for the tests.

use super::ToolFormat;

pub(super) const FORMATS: [ToolFormat; 8] = [
    ToolFormat::Hermes,
    ToolFormat::Llama,
    ToolFormat::MistralList,
    ToolFormat::MistralNamed,
    ToolFormat::Gemma,
    ToolFormat::DeepSeekFenced,
    ToolFormat::DeepSeek,
    ToolFormat::Generic,
];

/// A run of calls as the format's models write it.
pub(super) fn written(format: ToolFormat, calls: &[(&str, &str)]) -> String {
    let object = |key: &str, (name, arguments): &(&str, &str)| {
        format!("{{\"name\": {}, \"{key}\": {arguments}}}", serde_json::Value::from(*name))
    };
    let each = |write: &dyn Fn(&(&str, &str)) -> String, separator: &str| {
        calls.iter().map(write).collect::<Vec<_>>().join(separator)
    };
    match format {
        ToolFormat::Hermes => each(&|call| format!("<tool_call>\n{}\n</tool_call>", object("arguments", call)), "\n"),
        ToolFormat::Llama => each(&|call| object("parameters", call), "; "),
        ToolFormat::MistralList => {
            format!("[TOOL_CALLS] [{}]", each(&|call| object("arguments", call), ", "))
        }
        ToolFormat::MistralNamed => each(&|(name, arguments)| format!("[TOOL_CALLS]{name}[ARGS]{arguments}"), ""),
        ToolFormat::Gemma => each(&|call| format!("```tool_code\n{}\n```", object("parameters", call)), "\n"),
        ToolFormat::DeepSeekFenced => {
            let call = |(name, arguments): &(&str, &str)| {
                format!(
                    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"
                )
            };
            format!("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", each(&call, "\n"))
        }
        ToolFormat::DeepSeek => {
            let call = |(name, arguments): &(&str, &str)| {
                format!("<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>")
            };
            format!("<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>", each(&call, ""))
        }
        ToolFormat::Generic => each(&|call| object("arguments", call), "\n"),
    }
}
