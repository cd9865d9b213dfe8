//! Tells arguments that are text from others, by the tool's schema: some formats write text without quotes.

use serde_json::Value;

/// The values that a schema allows, as far as formats without quotes must distinguish them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueKind {
    Text,
    /// Text or null.
    OptionalText,
    /// A value that may be something else: text only if it is not JSON.
    Any,
}

const MAX_DEPTH: usize = 16;

impl ValueKind {
    /// `root`: the schema to whose definitions references point.
    pub(super) fn of(schema: &Value, root: &Value) -> Self {
        match kinds(schema, root, MAX_DEPTH) {
            Kinds { text: true, null: false, scalar: false, object: false, list: false } => Self::Text,
            Kinds { text: true, null: true, scalar: false, object: false, list: false } => Self::OptionalText,
            _ => Self::Any,
        }
    }

    /// The kind of an argument of this name. `parameters`: the tool's schema.
    pub(super) fn of_argument(parameters: Option<&Value>, key: &str) -> Self {
        let Some(root) = parameters else { return Self::Any };
        field_schema(root, root, key).map_or(Self::Any, |of| Self::of(of, root))
    }

    /// The text of a value as JSON.
    pub(super) fn to_json(self, text: &str) -> String {
        let quoted = |text: &str| Value::from(text).to_string();
        let json = text.trim();
        match (self, json) {
            (Self::Text, _) => quoted(text),
            (Self::OptionalText | Self::Any, "null" | "None") => "null".to_owned(),
            (Self::OptionalText, _) => quoted(text),
            (Self::Any, "True") => "true".to_owned(),
            (Self::Any, "False") => "false".to_owned(),
            (Self::Any, _) if serde_json::from_str::<serde::de::IgnoredAny>(json).is_ok() => json.to_owned(),
            (Self::Any, _) => quoted(text),
        }
    }
}

/// The schema, or the definition to which it refers; `None` if that is not in the same document.
pub(super) fn resolved<'a>(mut schema: &'a Value, root: &'a Value) -> Option<&'a Value> {
    for _ in 0..MAX_DEPTH {
        match schema.get("$ref") {
            None => return Some(schema),
            Some(reference) => schema = root.pointer(reference.as_str()?.strip_prefix('#')?)?,
        }
    }
    None
}

/// The schema of an object's field; `None` if the schema does not tell.
pub(super) fn field_schema<'a>(schema: &'a Value, root: &'a Value, key: &str) -> Option<&'a Value> {
    let further = |schema: &'a Value| schema.get("additionalProperties").filter(|further| further.is_object());
    let declared = part_of(schema, root, MAX_DEPTH, &|schema| schema.get("properties")?.get(key));
    declared.or_else(|| part_of(schema, root, MAX_DEPTH, &further))
}

/// The schema of a list's items; `None` if the schema does not tell.
pub(super) fn item_schema<'a>(schema: &'a Value, root: &'a Value) -> Option<&'a Value> {
    part_of(schema, root, MAX_DEPTH, &|schema| schema.get("items"))
}

/// A part of the schema or of a schema that it combines.
fn part_of<'a>(
    schema: &'a Value,
    root: &'a Value,
    depth: usize,
    part: &dyn Fn(&'a Value) -> Option<&'a Value>,
) -> Option<&'a Value> {
    let schema = resolved(schema, root).filter(|_| depth > 0)?;
    let combined = ["anyOf", "oneOf", "allOf"].into_iter().filter_map(|name| schema.get(name)?.as_array()).flatten();
    part(schema).or_else(|| combined.into_iter().find_map(|schema| part_of(schema, root, depth - 1, part)))
}

/// What a value with several parts is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Container {
    Object,
    List,
}

/// The container that a schema allows. `looks_like_list` decides where it allows both, or is unknown.
pub(super) fn container(schema: Option<&Value>, root: &Value, looks_like_list: bool) -> Container {
    let kinds = schema.map_or(Kinds::ALL, |schema| kinds(schema, root, MAX_DEPTH));
    let is_list = if kinds.list == kinds.object { looks_like_list } else { kinds.list };
    if is_list { Container::List } else { Container::Object }
}

/// A value of nothing but this whitespace, as JSON.
pub(super) fn empty_value(schema: Option<&Value>, root: &Value, space: &str) -> String {
    match schema.map_or(Kinds::ALL, |schema| kinds(schema, root, MAX_DEPTH)) {
        Kinds { text: false, list: true, .. } => "[]".to_owned(),
        Kinds { text: false, object: true, .. } => "{}".to_owned(),
        Kinds { text: false, null: true, .. } => "null".to_owned(),
        _ => Value::from(space).to_string(),
    }
}

/// Whether a schema allows text.
pub(super) fn allows_text(schema: &Value, root: &Value) -> bool {
    kinds(schema, root, MAX_DEPTH).text
}

#[derive(Clone, Copy, Default)]
struct Kinds {
    text: bool,
    null: bool,
    /// Numbers and booleans.
    scalar: bool,
    object: bool,
    list: bool,
}

impl Kinds {
    const ALL: Self = Self { text: true, null: true, scalar: true, object: true, list: true };

    fn or(self, more: Self) -> Self {
        Self {
            text: self.text || more.text,
            null: self.null || more.null,
            scalar: self.scalar || more.scalar,
            object: self.object || more.object,
            list: self.list || more.list,
        }
    }
}

fn kinds(schema: &Value, root: &Value, depth: usize) -> Kinds {
    let Some(schema) = resolved(schema, root).filter(|_| depth > 0) else { return Kinds::ALL };
    let of_type = |name: &Value| match name.as_str() {
        Some("string") => Kinds { text: true, ..Kinds::default() },
        Some("null") => Kinds { null: true, ..Kinds::default() },
        Some("object") => Kinds { object: true, ..Kinds::default() },
        Some("array") => Kinds { list: true, ..Kinds::default() },
        _ => Kinds { scalar: true, ..Kinds::default() },
    };
    let of_value = |value: &Value| match value {
        Value::String(_) => Kinds { text: true, ..Kinds::default() },
        Value::Null => Kinds { null: true, ..Kinds::default() },
        Value::Object(_) => Kinds { object: true, ..Kinds::default() },
        Value::Array(_) => Kinds { list: true, ..Kinds::default() },
        Value::Number(_) | Value::Bool(_) => Kinds { scalar: true, ..Kinds::default() },
    };
    let any =
        |values: &Vec<Value>, of: &dyn Fn(&Value) -> Kinds| values.iter().map(of).fold(Kinds::default(), Kinds::or);
    if let Some(value) = schema.get("const") {
        return of_value(value);
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return any(values, &of_value);
    }
    match schema.get("type") {
        Some(Value::Array(types)) => return any(types, &of_type),
        Some(name) => return of_type(name),
        None => {}
    }
    let branches = ["anyOf", "oneOf"].into_iter().find_map(|name| schema.get(name)).and_then(Value::as_array);
    branches.map_or(Kinds::ALL, |branches| any(branches, &|branch| kinds(branch, root, depth - 1)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_schema_says_which_arguments_are_text() {
        let root = json!({
            "$defs": {"city": {"enum": ["a", "b"]}, "loop": {"$ref": "#/$defs/loop"}},
            "properties": {
                "plain": {"type": "string"},
                "optional": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "listed": {"type": ["string", "null"]},
                "referred": {"$ref": "#/$defs/city"},
                "mixed": {"type": ["string", "integer"]},
                "number": {"type": "number"},
                "endless": {"$ref": "#/$defs/loop"},
                "untyped": {},
            },
        });
        let kind = |key| ValueKind::of_argument(Some(&root), key);
        assert_eq!(["plain", "referred"].map(kind), [ValueKind::Text; 2]);
        assert_eq!(["optional", "listed"].map(kind), [ValueKind::OptionalText; 2]);
        assert_eq!(["mixed", "number", "endless", "untyped", "other"].map(kind), [ValueKind::Any; 5]);
    }

    #[test]
    fn values_without_quotes_become_json() {
        assert_eq!(ValueKind::Text.to_json("null"), "\"null\"");
        assert_eq!(ValueKind::OptionalText.to_json("null"), "null");
        assert_eq!(ValueKind::OptionalText.to_json("5"), "\"5\"");
        assert_eq!(
            [" 5\n", "True", "[1, {\"a\": null}]", "so what"].map(|text| ValueKind::Any.to_json(text)),
            ["5", "true", "[1, {\"a\": null}]", "\"so what\""]
        );
    }
}
