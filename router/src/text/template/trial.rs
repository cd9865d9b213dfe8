//! Finds out what a template can write by rendering small conversations: its text would only say how it tries to.

use serde_json::{Value, json};

use super::ChatInputs;
use super::compiled::Compiled;
use super::content::Habits;

const NEEDLE: &str = "penstocktrial";

pub(super) fn habits(template: &Compiled) -> Habits {
    let user = |content: Value| vec![json!({"role": "user", "content": content})];
    let written = |messages| write(template, messages);
    let part = written(user(json!([{"type": "text", "text": NEEDLE}])));
    let call = |arguments: Value| {
        let call = json!({"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}});
        let answer = json!({"role": "assistant", "content": "", "tool_calls": [call]});
        written([user("?".into()), vec![answer]].concat()).is_some_and(|text| text.contains(NEEDLE))
    };
    Habits {
        writes_strings: written(user(NEEDLE.into())).is_none_or(|text| text.contains(NEEDLE)),
        // A template for strings would write the list itself, as Python or as JSON.
        writes_parts: part
            .is_some_and(|text| text.contains(NEEDLE) && !text.contains("\"type\"") && !text.contains("'type'")),
        writes_argument_objects: call(json!({NEEDLE: 1})) || !call(format!("{{\"{NEEDLE}\": 1}}").into()),
    }
}

/// `None` if the template refuses.
fn write(template: &Compiled, messages: Vec<Value>) -> Option<String> {
    template.render(ChatInputs { messages, add_generation_prompt: Some(false), ..ChatInputs::default() }).ok()
}
