//! Finds out which shapes of messages a template writes by rendering small conversations. The template's source would
//! not tell reliably.

use serde_json::{Value, json};

use super::input::ChatInputs;
use super::shape::SupportedShapes;

/// A text that no template writes by itself.
const NEEDLE: &str = "penstocktrial";

/// `render` returns `None` if the template refuses the conversation.
pub(super) fn supported_shapes(render: impl Fn(ChatInputs) -> Option<String>) -> SupportedShapes {
    let rendered =
        |messages| render(ChatInputs { messages, add_generation_prompt: Some(false), ..ChatInputs::default() });
    let user = |content: Value| json!({"role": "user", "content": content});
    let part = rendered(vec![user(json!([{"type": "text", "text": NEEDLE}]))]);
    let call = |arguments: Value| {
        let call = json!({"id": "call00000", "type": "function", "function": {"name": "f", "arguments": arguments}});
        let answer = json!({"role": "assistant", "content": "", "tool_calls": [call]});
        rendered(vec![user("?".into()), answer]).is_some_and(|text| text.contains(NEEDLE))
    };
    SupportedShapes {
        string_content: rendered(vec![user(NEEDLE.into())]).is_none_or(|text| text.contains(NEEDLE)),
        // A template for strings would write the list itself, as Python or as JSON.
        part_content: part
            .is_some_and(|text| text.contains(NEEDLE) && !text.contains("\"type\"") && !text.contains("'type'")),
        object_arguments: call(json!({NEEDLE: 1})) || !call(format!("{{\"{NEEDLE}\": 1}}").into()),
    }
}
