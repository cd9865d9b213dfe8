//! The text that tells a model about tools if its chat template shows none.

use serde_json::Value;

const INSTRUCTION: &str = "You can call the functions described above. To call one, answer with nothing but the \
     following, where NAME is the function's name and ARGUMENTS a JSON object that fits its parameters:\n\
     {\"name\": \"NAME\", \"arguments\": ARGUMENTS}\nIf no function helps, answer in plain words and without JSON.";

/// The text to append to the last message; `None` if there is nothing to add.
///
/// `template_shows_tools`: whether the template writes the tools. `tools`: as the client sent them. `instruction`: the
/// client's own, which replaces ours; an empty one means none.
pub(super) fn tool_prompt(template_shows_tools: bool, tools: &[Value], instruction: Option<&str>) -> Option<String> {
    match instruction {
        Some("") => None,
        _ if template_shows_tools => instruction.map(|text| format!("\n---\n{text}")),
        _ => Some(format!("\n---\n{}\n{}", Value::from(tools.to_vec()), instruction.unwrap_or(INSTRUCTION))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_template_without_tools_gets_tools_and_instruction() {
        let prompt = |instruction| tool_prompt(false, &[json!({"name": "f"})], instruction);
        insta::assert_snapshot!(prompt(None).unwrap().trim_start(), @r#"
        ---
        [{"name":"f"}]
        You can call the functions described above. To call one, answer with nothing but the following, where NAME is the function's name and ARGUMENTS a JSON object that fits its parameters:
        {"name": "NAME", "arguments": ARGUMENTS}
        If no function helps, answer in plain words and without JSON.
        "#);
        assert_eq!(prompt(Some("Call!")).as_deref(), Some("\n---\n[{\"name\":\"f\"}]\nCall!"));
        assert_eq!(prompt(Some("")), None);
    }

    #[test]
    fn a_template_with_tools_gets_only_what_the_client_says() {
        let prompt = |instruction| tool_prompt(true, &[json!({})], instruction);
        assert_eq!(prompt(None), None);
        assert_eq!(prompt(Some("")), None);
        assert_eq!(prompt(Some("Call!")).as_deref(), Some("\n---\nCall!"));
    }
}
