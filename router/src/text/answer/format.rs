//! The formats in which models write tool calls, as data.

use super::item::Item;

/// How the model was trained to write its calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ToolFormat {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>` (Hermes, Qwen 2.5 and 3).
    Hermes,
    /// `{"name": …, "parameters": …}` (Llama 3.1 and later).
    Llama,
    /// `[TOOL_CALLS][{"name": …, "arguments": …}]` (Mistral).
    MistralList,
    /// `[TOOL_CALLS]name[ARGS]{…}` (Mistral from its eleventh tokenizer on).
    MistralNamed,
    /// `{"name": …, "parameters": …}` in a code block marked `tool_code` (Gemma 2 and 3, by its prompt).
    Gemma,
    /// Name and fenced arguments between tokens of their own (DeepSeek V3 and R1).
    DeepSeekFenced,
    /// Name and arguments between tokens of their own (DeepSeek V3.1).
    DeepSeek,
    /// `{"name": …, "arguments": …}`, by its prompt: for models without tool training.
    Generic,
}

/// A run of calls: `open`, calls with `separator` between them, `close`. JSON whitespace may stand between any two items.
pub(super) struct Shape {
    /// May stand before a run.
    pub(super) hint: Option<&'static str>,
    pub(super) open: &'static [&'static str],
    pub(super) call: Call,
    pub(super) separator: &'static [&'static str],
    pub(super) close: &'static [&'static str],
}

pub(super) struct Call {
    pub(super) before: &'static [&'static str],
    pub(super) body: Body,
    pub(super) after: &'static [&'static str],
}

pub(super) enum Body {
    /// An object of the name and the arguments, under this key.
    Object { arguments_key: &'static str },
    /// The bare name, then these, then the arguments.
    Named { before_arguments: &'static [&'static str] },
}

const ARGUMENTS: Body = Body::Object { arguments_key: "\"arguments\"" };
const PARAMETERS: Body = Body::Object { arguments_key: "\"parameters\"" };

static HERMES: Shape = Shape {
    hint: None,
    open: &[],
    call: Call { before: &["<tool_call>"], body: ARGUMENTS, after: &["</tool_call>"] },
    separator: &[],
    close: &[],
};
static LLAMA: Shape = Shape {
    hint: Some("<|python_tag|>"),
    open: &[],
    call: Call { before: &[], body: PARAMETERS, after: &[] },
    separator: &[";"],
    close: &[],
};
static MISTRAL_LIST: Shape = Shape {
    hint: None,
    open: &["[TOOL_CALLS]", "["],
    call: Call { before: &[], body: ARGUMENTS, after: &[] },
    separator: &[","],
    close: &["]"],
};
static MISTRAL_NAMED: Shape = Shape {
    hint: None,
    open: &[],
    call: Call { before: &["[TOOL_CALLS]"], body: Body::Named { before_arguments: &["[ARGS]"] }, after: &[] },
    separator: &[],
    close: &[],
};
static GEMMA: Shape = Shape {
    hint: None,
    open: &[],
    call: Call { before: &["```tool_code"], body: PARAMETERS, after: &["```"] },
    separator: &[],
    close: &[],
};
static DEEPSEEK_FENCED: Shape = Shape {
    hint: None,
    open: &["<｜tool▁calls▁begin｜>"],
    call: Call {
        before: &["<｜tool▁call▁begin｜>", "function", "<｜tool▁sep｜>"],
        body: Body::Named { before_arguments: &["```json"] },
        after: &["```", "<｜tool▁call▁end｜>"],
    },
    separator: &[],
    close: &["<｜tool▁calls▁end｜>"],
};
static DEEPSEEK: Shape = Shape {
    hint: None,
    open: &["<｜tool▁calls▁begin｜>"],
    call: Call {
        before: &["<｜tool▁call▁begin｜>"],
        body: Body::Named { before_arguments: &["<｜tool▁sep｜>"] },
        after: &["<｜tool▁call▁end｜>"],
    },
    separator: &[],
    close: &["<｜tool▁calls▁end｜>"],
};
static GENERIC: Shape = Shape {
    hint: None,
    open: &[],
    call: Call { before: &[], body: ARGUMENTS, after: &[] },
    separator: &[],
    close: &[],
};

impl ToolFormat {
    /// From the chat template's source, which writes earlier calls as the model writes its own, or says how.
    /// `is_token`: whether a text is one token of the vocabulary.
    pub(crate) fn detect(template: &str, is_token: impl Fn(&str) -> bool) -> Self {
        let has = |mark: &str| template.contains(mark);
        if has("<｜tool▁calls▁begin｜>") {
            return if has("```json") { Self::DeepSeekFenced } else { Self::DeepSeek };
        }
        if has("[TOOL_CALLS]") {
            return if has("[ARGS]") { Self::MistralNamed } else { Self::MistralList };
        }
        // Qwen's coder models write XML between the same tags.
        if has("<tool_call>") && !has("<function=") {
            return Self::Hermes;
        }
        if has("\"parameters\": dictionary") || (has("<|python_tag|>") && is_token("<|python_tag|>")) {
            return Self::Llama;
        }
        if has("<start_of_turn>") { Self::Gemma } else { Self::Generic }
    }

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
    /// One call, its arguments in the middle.
    pub(super) fn call_items(&self) -> Vec<Item> {
        let mut items: Vec<_> = marks(self.call.before).collect();
        match self.call.body {
            Body::Object { arguments_key } => {
                items.extend(["{", "\"name\"", ":"].map(Item::Mark));
                items.push(Item::QuotedName);
                items.extend([",", arguments_key, ":"].map(Item::Mark));
                items.push(Item::Arguments);
                items.push(Item::Mark("}"));
            }
            Body::Named { before_arguments } => {
                items.push(Item::BareName);
                items.extend(marks(before_arguments));
                items.push(Item::Arguments);
            }
        }
        items.extend(marks(self.call.after));
        items
    }

    /// What begins a run anywhere in a text. `None`: only a text that starts with a call is one.
    pub(super) fn trigger(&self) -> Option<&'static str> {
        self.hint.or(self.open.first().copied()).or(self.call.before.first().copied())
    }

    /// A run may begin with its first call's brace.
    pub(super) fn is_bare(&self) -> bool {
        self.open.is_empty() && self.call.before.is_empty() && matches!(self.call.body, Body::Object { .. })
    }

    /// Everything that is not a name or arguments, nor JSON.
    pub(super) fn marks(&self) -> impl Iterator<Item = &'static str> {
        let in_body = match self.call.body {
            Body::Object { .. } => &[],
            Body::Named { before_arguments } => before_arguments,
        };
        let lists = [self.open, self.call.before, in_body, self.call.after, self.close];
        self.hint.into_iter().chain(lists.into_iter().flatten().copied())
    }
}

pub(super) fn marks(texts: &'static [&'static str]) -> impl Iterator<Item = Item> {
    texts.iter().map(|text| Item::Mark(text))
}

#[cfg(test)]
#[path = "format_tests.rs"]
mod tests;
