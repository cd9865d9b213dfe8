//! The text that tells a model about tools where its chat template does not.

use serde_json::Value;

use super::call_item::Item;
use super::tool_call_format::{Shape, ToolCallFormat, markers};

/// The text to append to the last message; `None` if the template writes the tools and how to call them.
///
/// `template`: the source of the chat template. `tools`: as the client sent them. `instruction`: the client's own.
pub(crate) fn tool_prompt(
    format: ToolCallFormat,
    template: &str,
    tools: &[Value],
    instruction: Option<&str>,
) -> Option<String> {
    let instruction = instruction.filter(|text| !text.is_empty()).map(str::to_owned);
    if template.contains("tools") {
        // The template writes the tools. It also says how to call them, unless its format is unknown here.
        let own = || (format == ToolCallFormat::Generic).then(|| default_instruction(format));
        return instruction.or_else(own).map(|text| format!("\n---\n{text}"));
    }
    let text = instruction.unwrap_or_else(|| default_instruction(format));
    Some(format!("\n---\n{}\n{text}", Value::from(tools.to_vec())))
}

fn default_instruction(format: ToolCallFormat) -> String {
    format!(
        "You can call the functions described above. To call one, answer with nothing but the following, where NAME \
         is the function's name and ARGUMENTS a JSON object that fits its parameters:\n{}\nIf no function helps, answer \
         in plain words and without JSON.",
        example(format.shape())
    )
}

/// An example of one call, as the grammar allows it.
fn example(shape: &Shape) -> String {
    let mut text = String::new();
    for item in markers(shape.open).chain(shape.call_items()).chain(markers(shape.close)) {
        match item {
            Item::Marker(marker) if marker.starts_with("```") => {
                let before = if text.is_empty() { "" } else { "\n" };
                text.push_str(&format!("{before}{marker}\n"));
            }
            Item::Marker(marker @ (":" | ",")) => text.push_str(&format!("{marker} ")),
            Item::Marker(marker) | Item::Hint(marker) => text.push_str(marker),
            Item::QuotedName => text.push_str("\"NAME\""),
            Item::BareName => text.push_str("NAME"),
            Item::Arguments => text.push_str("ARGUMENTS"),
        }
    }
    text.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::parser::parse_whole;
    use super::super::reasoning::ReasoningState;
    use super::super::sample::FORMATS;
    use super::*;

    #[test]
    fn the_filled_in_example_is_a_call() {
        for format in FORMATS {
            let call = example(format.shape()).replace("NAME", "f").replace("ARGUMENTS", "{}");
            let answer = parse_whole(&call, Some(format), ReasoningState::Off);
            assert_eq!((answer.content.as_str(), answer.tool_calls.len()), ("", 1), "{format:?}: {call}");
        }
    }

    #[test]
    fn a_template_without_tools_gets_tools_and_instruction() {
        let prompt = tool_prompt(ToolCallFormat::Generic, "{{ messages }}", &[json!({"name": "f"})], None).unwrap();
        insta::assert_snapshot!(prompt.trim_start(), @r#"
        ---
        [{"name":"f"}]
        You can call the functions described above. To call one, answer with nothing but the following, where NAME is the function's name and ARGUMENTS a JSON object that fits its parameters:
        {"name": "NAME", "arguments": ARGUMENTS}
        If no function helps, answer in plain words and without JSON.
        "#);
        let own = tool_prompt(ToolCallFormat::Gemma, "{{ messages }}", &[json!({"name": "f"})], Some("Call!"));
        assert_eq!(own.as_deref(), Some("\n---\n[{\"name\":\"f\"}]\nCall!"));
    }

    #[test]
    fn a_template_with_tools_gets_the_instruction_that_it_lacks() {
        let prompt = |format, instruction| tool_prompt(format, "{% if tools %}", &[json!({})], instruction);
        assert_eq!(prompt(ToolCallFormat::Hermes, None), None);
        assert_eq!(prompt(ToolCallFormat::Hermes, Some("")), None);
        assert_eq!(prompt(ToolCallFormat::Hermes, Some("Call!")).as_deref(), Some("\n---\nCall!"));
        assert!(prompt(ToolCallFormat::Generic, None).unwrap().starts_with("\n---\nYou can call"));
    }
}
