//! Tools that a request names by a type with a date instead of a schema: the client executes some of them, Anthropic the others.

use serde_json::{Value, json};

/// A tool by its type.
pub(super) enum KnownTool {
    /// The client executes it.
    Client { description: String, schema: Value },
    /// Anthropic executes it.
    Hosted,
}

/// The size of a screen in pixels.
#[derive(Clone, Copy)]
pub(super) struct Display {
    pub(super) width: Option<u32>,
    pub(super) height: Option<u32>,
}

/// What executes a tool of this type, such as `bash_20250124`; `None` if the type is unknown.
pub(super) fn known(kind: &str, display: Display) -> Option<KnownTool> {
    if matches!(kind, "mcp_toolset" | "tool_search_tool_regex" | "tool_search_tool_bm25") {
        return Some(KnownTool::Hosted);
    }
    let (family, date) = kind.rsplit_once('_')?;
    let is_date = date.len() == 8 && date.bytes().all(|byte| byte.is_ascii_digit());
    if !is_date {
        return None;
    }
    let client = |description: &str, schema| KnownTool::Client { description: description.to_owned(), schema };
    Some(match family {
        "bash" => client("Runs commands in a bash session, whose state lasts from call to call.", bash()),
        // The dates have as many digits, so their order is that of their texts.
        "text_editor" => client("Views, creates and edits text files.", text_editor(date)),
        "memory" => client("Reads and changes the files of a memory that lasts, in the folder /memories.", memory()),
        "computer" => KnownTool::Client {
            description: match display {
                Display { width: Some(width), height: Some(height) } => {
                    format!(
                        "Uses mouse and keyboard of a computer, and takes screenshots of {width} x {height} pixels."
                    )
                }
                _ => "Uses mouse and keyboard of a computer, and takes screenshots.".to_owned(),
            },
            schema: computer(date),
        },
        "web_search"
        | "web_fetch"
        | "code_execution"
        | "tool_search_tool_regex"
        | "tool_search_tool_bm25"
        | "advisor" => KnownTool::Hosted,
        _ => return None,
    })
}

fn object(properties: Value, required: &[&str]) -> Value {
    json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false})
}

fn text(description: &str) -> Value {
    json!({"type": "string", "description": description})
}

fn integer(description: &str) -> Value {
    json!({"type": "integer", "description": description})
}

fn numbers(description: &str) -> Value {
    json!({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2, "description": description})
}

fn bash() -> Value {
    let properties = json!({
        "command": text("The command to run. Required unless `restart` is true."),
        "restart": {"type": "boolean", "description": "Start a new session instead of running a command."},
    });
    object(properties, &[])
}

/// `date`: of the tool's type.
fn text_editor(date: &str) -> Value {
    let mut commands = vec!["view", "create", "str_replace", "insert"];
    if date < "20250429" {
        commands.push("undo_edit");
    }
    let inserted = if date < "20250728" { "new_str" } else { "insert_text" };
    let mut properties = json!({
        "command": {"type": "string", "enum": commands},
        "path": text("Path of a file, or of a folder to view."),
        "view_range": numbers("Of `view`: first and last line, from 1; -1 means the end of the file."),
        "file_text": text("Of `create`: the file's content."),
        "old_str": text("Of `str_replace`: the text to replace, which occurs exactly once."),
        "new_str": text("Of `str_replace`: the text in its place."),
        "insert_line": integer("Of `insert`: the line after which the text is inserted; 0 means the beginning."),
    });
    properties[inserted] = if inserted == "new_str" {
        text("Of `str_replace`: the text in its place. Of `insert`: the text.")
    } else {
        text("Of `insert`: the text.")
    };
    object(properties, &["command", "path"])
}

fn memory() -> Value {
    let commands = ["view", "create", "str_replace", "insert", "delete", "rename"];
    let properties = json!({
        "command": {"type": "string", "enum": commands},
        "path": text("Path of a file or folder below /memories. Required except by `rename`."),
        "view_range": numbers("Of `view`: first and last line, from 1."),
        "file_text": text("Of `create`: the file's content."),
        "old_str": text("Of `str_replace`: the text to replace."),
        "new_str": text("Of `str_replace`: the text in its place."),
        "insert_line": integer("Of `insert`: the line after which the text is inserted; 0 means the beginning."),
        "insert_text": text("Of `insert`: the text."),
        "old_path": text("Of `rename`: the path so far."),
        "new_path": text("Of `rename`: the new path."),
    });
    object(properties, &["command"])
}

/// `date`: of the tool's type.
fn computer(date: &str) -> Value {
    let mut actions = vec!["key", "type", "mouse_move", "left_click", "left_click_drag", "right_click", "middle_click"];
    actions.extend(["double_click", "screenshot", "cursor_position"]);
    if date >= "20250124" {
        actions.extend(["left_mouse_down", "left_mouse_up", "triple_click", "scroll", "hold_key", "wait"]);
    }
    if date >= "20251124" {
        actions.push("zoom");
    }
    let mut properties = json!({
        "action": {"type": "string", "enum": actions},
        "coordinate": numbers("The position on the screen as x and y in pixels."),
        "text": text("The text to type, or the keys to press, such as ctrl+s."),
    });
    if date >= "20250124" {
        properties["start_coordinate"] = numbers("Of `left_click_drag`: where it starts.");
        properties["scroll_direction"] = json!({"type": "string", "enum": ["up", "down", "left", "right"]});
        properties["scroll_amount"] = integer("Of `scroll`: the number of clicks of the wheel.");
        properties["duration"] = json!({"type": "number", "description": "Of `hold_key` and `wait`: seconds."});
    }
    if date >= "20251124" {
        let description = "Of `zoom`: left, top, right and bottom in pixels.";
        properties["region"] = json!({"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 4,
                                      "description": description});
    }
    object(properties, &["action"])
}
