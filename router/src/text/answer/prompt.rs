//! What a model is told about tools when its template does not tell it.

use serde_json::Value;

use super::format::{Shape, ToolFormat, marks};
use super::item::Item;

/// The text to add to the last message. `None`: the template says everything.
///
/// `template`: its source. `tools`: as the client gave them. `instruction`: the client's own.
pub(crate) fn tool_prompt(
    format: ToolFormat,
    template: &str,
    tools: &[Value],
    instruction: Option<&str>,
) -> Option<String> {
    let instruction = instruction.filter(|text| !text.is_empty()).map(str::to_owned);
    if template.contains("tools") {
        // It shows the tools. How to call them it says too, unless it is in a way that is not known here.
        let own = || (format == ToolFormat::Generic).then(|| default_instruction(format));
        return instruction.or_else(own).map(|text| format!("\n---\n{text}"));
    }
    let text = instruction.unwrap_or_else(|| default_instruction(format));
    Some(format!("\n---\n{}\n{text}", Value::from(tools.to_vec())))
}

fn default_instruction(format: ToolFormat) -> String {
    format!(
        "You can call the functions described above. To call one, answer with nothing but the following, where NAME \
         is the function's name and ARGUMENTS a JSON object that fits its parameters:\n{}\nIf no function helps, answer \
         in plain words and without JSON.",
        example(format.shape())
    )
}

/// One call, as the grammar has it.
fn example(shape: &Shape) -> String {
    let mut text = String::new();
    for item in marks(shape.open).chain(shape.call_items()).chain(marks(shape.close)) {
        match item {
            Item::Mark(mark) if mark.starts_with("```") => {
                let before = if text.is_empty() { "" } else { "\n" };
                text.push_str(&format!("{before}{mark}\n"));
            }
            Item::Mark(mark @ (":" | ",")) => text.push_str(&format!("{mark} ")),
            Item::Mark(mark) | Item::Hint(mark) => text.push_str(mark),
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
    use super::super::reasoning::Thinking;
    use super::super::sample::FORMATS;
    use super::*;

    #[test]
    fn the_example_is_a_call_once_it_is_filled_in() {
        for format in FORMATS {
            let call = example(format.shape()).replace("NAME", "f").replace("ARGUMENTS", "{}");
            let answer = parse_whole(&call, Some(format), Thinking::Off);
            assert_eq!((answer.content.as_str(), answer.tool_calls.len()), ("", 1), "{format:?}: {call}");
        }
    }

    #[test]
    fn a_template_without_tools_gets_them_with_the_instruction() {
        let prompt = tool_prompt(ToolFormat::Generic, "{{ messages }}", &[json!({"name": "f"})], None).unwrap();
        insta::assert_snapshot!(prompt.trim_start(), @r#"
        ---
        [{"name":"f"}]
        You can call the functions described above. To call one, answer with nothing but the following, where NAME is the function's name and ARGUMENTS a JSON object that fits its parameters:
        {"name": "NAME", "arguments": ARGUMENTS}
        If no function helps, answer in plain words and without JSON.
        "#);
        let own = tool_prompt(ToolFormat::Gemma, "{{ messages }}", &[json!({"name": "f"})], Some("Call!"));
        assert_eq!(own.as_deref(), Some("\n---\n[{\"name\":\"f\"}]\nCall!"));
    }

    #[test]
    fn a_template_with_tools_gets_what_it_does_not_say() {
        let prompt = |format, instruction| tool_prompt(format, "{% if tools %}", &[json!({})], instruction);
        assert_eq!(prompt(ToolFormat::Hermes, None), None);
        assert_eq!(prompt(ToolFormat::Hermes, Some("")), None);
        assert_eq!(prompt(ToolFormat::Hermes, Some("Call!")).as_deref(), Some("\n---\nCall!"));
        assert!(prompt(ToolFormat::Generic, None).unwrap().starts_with("\n---\nYou can call"));
    }
}
