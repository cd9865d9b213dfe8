//! Formats are detected by the marks that chat templates of each model family write.

use super::super::reasoning::{ReasoningFormat, Thinking};
use super::*;

#[test]
fn formats_are_known_by_their_templates() {
    let cases = [
        (r#"{%- if tools %}<tool_call>\n{\"name\": <function-name>, \"arguments\": <args>}"#, ToolFormat::Hermes),
        (r"{%- if tools %}{{ '<tool_call>\n<function=' + name }}", ToolFormat::Generic),
        (
            r#"{%- if tools is not none %}{{- 'Respond in the format {"name": function name, "parameters": dictionary of' }}"#,
            ToolFormat::Llama,
        ),
        (r#"{%- if builtin_tools %}{{- "<|python_tag|>" }}"#, ToolFormat::Llama),
        (r#"{{- "[TOOL_CALLS] [" }}{{ tool_call.function|tojson }}"#, ToolFormat::MistralList),
        (r#"{{- "[TOOL_CALLS]" + name + "[ARGS]" + arguments }}"#, ToolFormat::MistralNamed),
        (r"{{ '<start_of_turn>' + role + '\n' }}", ToolFormat::Gemma),
        (
            r"{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\n```json\n'",
            ToolFormat::DeepSeekFenced,
        ),
        (r"{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'}}", ToolFormat::DeepSeek),
        (r"{{ '<|im_start|>' + message['role'] }}", ToolFormat::Generic),
    ];
    for (template, format) in cases {
        assert_eq!(ToolFormat::detect(template, |_| true), format, "{template}");
    }
    assert_eq!(ToolFormat::detect("<|python_tag|>", |_| false), ToolFormat::Generic);
}

#[test]
fn the_format_of_each_fixture_is_detected() {
    let cases = [
        ("hermes_calls", ToolFormat::Hermes, None),
        ("reasoning_calls", ToolFormat::Hermes, Some("<think>")),
        ("dated_calls", ToolFormat::Llama, None),
        ("listed_calls", ToolFormat::MistralList, None),
        ("named_calls", ToolFormat::MistralNamed, Some("[THINK]")),
        ("model_role", ToolFormat::Gemma, None),
        ("fenced_calls", ToolFormat::DeepSeekFenced, Some("<think>")),
        ("separated_calls", ToolFormat::DeepSeek, Some("<think>")),
        ("channels", ToolFormat::Generic, None),
        ("documents", ToolFormat::Generic, Some("<|START_THINKING|>")),
        ("modes", ToolFormat::Generic, Some("<think>")),
        ("tags", ToolFormat::Generic, None),
    ];
    for (name, format, reasoning) in cases {
        let path = format!("{}/tests/fixtures/templates/family/{name}.jinja", env!("CARGO_MANIFEST_DIR"));
        let template = std::fs::read_to_string(path).unwrap();
        let detected = ReasoningFormat::detect(&template).map(|format| format.open);
        assert_eq!((ToolFormat::detect(&template, |_| true), detected), (format, reasoning), "{name}");
    }
}

#[test]
fn the_end_of_the_prompt_says_whether_thoughts_are_open() {
    let format = ReasoningFormat::detect("{{ content.split('</think>')[-1] }}").unwrap();
    assert_eq!(Thinking::after(Some(format), "assistant\n"), Thinking::Possible(format));
    assert_eq!(Thinking::after(Some(format), "assistant\n<think>\n"), Thinking::Started(format));
    assert_eq!(Thinking::after(Some(format), "assistant\n<think>\n\n</think>\n\n"), Thinking::Off);
    assert_eq!(Thinking::after(None, "<think>"), Thinking::Off);
    assert_eq!(ReasoningFormat::detect("{{ '<|channel|>analysis' }}"), None);
    assert_eq!(ReasoningFormat::detect("[THINK][/THINK]").unwrap().open, "[THINK]");
}
