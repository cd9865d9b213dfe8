//! Formats are detected by the markers that chat templates of each model family write.

use super::super::reasoning::{ReasoningFormat, ReasoningState};
use super::*;

#[test]
fn formats_are_detected_by_the_markers_in_a_template() {
    let cases = [
        (r#"{%- if tools %}<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}"#, ToolCallFormat::Hermes),
        (r"{%- if tools %}{{ '<tool_call>\n<function=' + name }}", ToolCallFormat::Generic),
        (
            r#"{%- if tools is not none %}{{- 'Respond in the format {"name": function name, "parameters": dictionary of' }}"#,
            ToolCallFormat::Llama,
        ),
        (r#"{%- if builtin_tools %}{{- "<|python_tag|>" }}"#, ToolCallFormat::Llama),
        (r#"{{- "[TOOL_CALLS] [" }}{{ tool_call.function|tojson }}"#, ToolCallFormat::MistralList),
        (r#"{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}"#, ToolCallFormat::MistralNamed),
        (r"{{ '<start_of_turn>' + role + '\n' }}", ToolCallFormat::Gemma),
        (
            r"{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\n```json\n'",
            ToolCallFormat::DeepSeekFenced,
        ),
        (r"{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}", ToolCallFormat::DeepSeek),
        (r"{{ '<|im_start|>' + message['role'] }}", ToolCallFormat::Generic),
    ];
    for (template, format) in cases {
        assert_eq!(ToolCallFormat::detect(template, |_| true), format, "{template}");
    }
    assert_eq!(ToolCallFormat::detect("<|python_tag|>", |_| false), ToolCallFormat::Generic);
}

#[test]
fn the_format_of_each_fixture_is_detected() {
    let cases = [
        ("hermes_calls", ToolCallFormat::Hermes, None),
        ("reasoning_calls", ToolCallFormat::Hermes, Some("<think>")),
        ("dated_calls", ToolCallFormat::Llama, None),
        ("listed_calls", ToolCallFormat::MistralList, None),
        ("named_calls", ToolCallFormat::MistralNamed, Some("[THINK]")),
        ("model_role", ToolCallFormat::Gemma, None),
        ("fenced_calls", ToolCallFormat::DeepSeekFenced, Some("<think>")),
        ("separated_calls", ToolCallFormat::DeepSeek, Some("<think>")),
        ("channels", ToolCallFormat::Generic, None),
        ("documents", ToolCallFormat::Generic, Some("<|START_THINKING|>")),
        ("modes", ToolCallFormat::Generic, Some("<think>")),
        ("tags", ToolCallFormat::Generic, None),
    ];
    for (name, format, reasoning) in cases {
        let path = format!("{}/tests/fixtures/templates/family/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
        let template = std::fs::read_to_string(path).unwrap();
        let detected = ReasoningFormat::detect(&template).map(|format| format.open);
        assert_eq!((ToolCallFormat::detect(&template, |_| true), detected), (format, reasoning), "{name}");
    }
}

#[test]
fn the_end_of_the_prompt_shows_whether_reasoning_is_open() {
    let format = ReasoningFormat::detect("{{ content.split('</think>')[-1] }}").unwrap();
    assert_eq!(ReasoningState::after(Some(format), "assistant\n"), ReasoningState::Possible(format));
    assert_eq!(ReasoningState::after(Some(format), "assistant\n<think>\n"), ReasoningState::Started(format));
    assert_eq!(ReasoningState::after(Some(format), "assistant\n<think>\n\n</think>\n\n"), ReasoningState::Off);
    assert_eq!(ReasoningState::after(None, "<think>"), ReasoningState::Off);
    assert_eq!(ReasoningFormat::detect("{{ '<|channel|>analysis' }}"), None);
    assert_eq!(ReasoningFormat::detect("[THINK][/THINK]").unwrap().open, "[THINK]");
}
