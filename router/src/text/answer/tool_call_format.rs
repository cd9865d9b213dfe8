//! The formats in which models write tool calls, as data.

use super::call_item::Item;

/// The format in which a model was trained, or is prompted, to write tool calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolCallFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen 2.5 and 3).
    Hermes,
    /// `{"name": …, "parameters": …}` (Llama 3.1 and later).
    Llama,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]` (Mistral).
    MistralList,
    /// `[TOOL_CALLS]name[ARGS]{…}` (Mistral with tokenizer version 11 or later).
    MistralNamed,
    /// `{"name": …, "parameters": …}` in a `tool_code` block (Gemma 2 and 3, as prompted).
    Gemma,
    /// Name and fenced arguments, separated by special tokens (DeepSeek V3 and R1).
    DeepSeekFenced,
    /// Name and arguments, separated by special tokens (DeepSeek V3.1).
    DeepSeek,
    /// `{"name": …, "arguments": …}`, as prompted: for models without a known format.
    Generic,
}

/// A run of calls: `open`, calls separated by `separator`, `close`. JSON whitespace is allowed between any two items.
pub(super) struct Shape {
    /// An optional marker before a run.
    pub(super) hint: Option<&'static str>,
    pub(super) open: &'static [&'static str],
    pub(super) call: Call,
    pub(super) separator: &'static [&'static str],
    pub(super) close: &'static [&'static str],
}

/// One call: `before`, `body`, `after`.
pub(super) struct Call {
    pub(super) before: &'static [&'static str],
    pub(super) body: Body,
    pub(super) after: &'static [&'static str],
}

/// The name and the arguments of a call.
pub(super) enum Body {
    /// A JSON object of `"name"` and the arguments, which have this key.
    Object { arguments_key: &'static str },
    /// The name without quotes, these markers, the arguments.
    Named { before_arguments: &'static [&'static str] },
}

const ARGUMENTS: Body = Body::Object { arguments_key: "\"arguments\"" };
const PARAMETERS: Body = Body::Object { arguments_key: "\"parameters\"" };

const BARE_CALL: Call = Call { before: &[], body: ARGUMENTS, after: &[] };

/// Calls with nothing before, between and after them.
const BARE: Shape = Shape { hint: None, open: &[], call: BARE_CALL, separator: &[], close: &[] };

static GENERIC: Shape = BARE;
static HERMES: Shape = Shape { call: Call { before: &["<tool_call>"], after: &["</tool_call>"], ..BARE_CALL }, ..BARE };
static LLAMA: Shape =
    Shape { hint: Some("<|python_tag|>"), call: Call { body: PARAMETERS, ..BARE_CALL }, separator: &[";"], ..BARE };
static MISTRAL_LIST: Shape = Shape { open: &["[TOOL_CALLS]", "["], separator: &[","], close: &["]"], ..BARE };
static MISTRAL_NAMED: Shape = Shape {
    call: Call { before: &["[TOOL_CALLS]"], body: Body::Named { before_arguments: &["[ARGS]"] }, after: &[] },
    ..BARE
};
static GEMMA: Shape = Shape { call: Call { before: &["```tool_code"], body: PARAMETERS, after: &["```"] }, ..BARE };
static DEEPSEEK: Shape = Shape {
    open: &["<｜tool▁calls▁begin｜>"],
    call: Call {
        before: &["<｜tool▁call▁begin｜>"],
        body: Body::Named { before_arguments: &["<｜tool▁sep｜>"] },
        after: &["<｜tool▁call▁end｜>"],
    },
    close: &["<｜tool▁calls▁end｜>"],
    ..BARE
};
static DEEPSEEK_FENCED: Shape = Shape {
    open: &["<｜tool▁calls▁begin｜>"],
    call: Call {
        before: &["<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"],
        body: Body::Named { before_arguments: &["```json"] },
        after: &["```", "<｜tool▁call▁end｜>"],
    },
    close: &["<｜tool▁calls▁end｜>"],
    ..BARE
};

impl ToolCallFormat {
    /// Detects the format from the source of the chat template, which writes earlier calls, or an instruction, in this
    /// format. `is_token`: whether a text is a single token of the vocabulary.
    pub(crate) fn detect(template: &str, is_token: impl Fn(&str) -> bool) -> Self {
        let has = |marker: &str| template.contains(marker);
        if has("<｜tool▁calls▁begin｜>") {
            return if has("```json") { Self::DeepSeekFenced } else { Self::DeepSeek };
        }
        if has("[TOOL_CALLS]") {
            return if has("[ARGS]") { Self::MistralNamed } else { Self::MistralList };
        }
        // Qwen's coder models write XML between the same markers.
        if has("<tool_call>") && !has("<function=") {
            return Self::Hermes;
        }
        if has("\"parameters\": dictionary") || (has("<|python_tag|>") && is_token("<|python_tag|>")) {
            return Self::Llama;
        }
        if has("<start_of_turn>") { Self::Gemma } else { Self::Generic }
    }

    /// The syntax of the format.
    pub(super) fn shape(self) -> &'static Shape {
        match self {
            Self::Hermes => &HERMES,
            Self::Llama => &LLAMA,
            Self::MistralList => &MISTRAL_LIST,
            Self::MistralNamed => &MISTRAL_NAMED,
            Self::Gemma => &GEMMA,
            Self::DeepSeekFenced => &DEEPSEEK_FENCED,
            Self::DeepSeek => &DEEPSEEK,
            Self::Generic => &GENERIC,
        }
    }
}

impl Shape {
    /// The items of one call.
    pub(super) fn call_items(&self) -> Vec<Item> {
        let mut items: Vec<_> = markers(self.call.before).collect();
        match self.call.body {
            Body::Object { arguments_key } => {
                items.extend(["{", "\"name\"", ":"].map(Item::Marker));
                items.push(Item::QuotedName);
                items.extend([",", arguments_key, ":"].map(Item::Marker));
                items.push(Item::Arguments);
                items.push(Item::Marker("}"));
            }
            Body::Named { before_arguments } => {
                items.push(Item::BareName);
                items.extend(markers(before_arguments));
                items.push(Item::Arguments);
            }
        }
        items.extend(markers(self.call.after));
        items
    }

    /// The marker that starts a run anywhere in a text. `None`: a run starts only at the start of the text.
    pub(super) fn trigger(&self) -> Option<&'static str> {
        self.hint.or(self.open.first().copied()).or(self.call.before.first().copied())
    }

    /// Whether a run starts with the brace of its first call.
    pub(super) fn is_bare(&self) -> bool {
        self.open.is_empty() && self.call.before.is_empty() && matches!(self.call.body, Body::Object { .. })
    }

    /// All markers, without JSON's punctuation around name and arguments.
    pub(super) fn markers(&self) -> impl Iterator<Item = &'static str> {
        let in_body = match self.call.body {
            Body::Object { .. } => &[],
            Body::Named { before_arguments } => before_arguments,
        };
        let lists = [self.open, self.call.before, in_body, self.call.after, self.close];
        self.hint.into_iter().chain(lists.into_iter().flatten().copied())
    }
}

/// One item for each marker.
pub(super) fn markers(texts: &'static [&'static str]) -> impl Iterator<Item = Item> {
    texts.iter().map(|text| Item::Marker(text))
}

#[cfg(test)]
#[path = "tool_call_format_tests.rs"]
mod tests;
