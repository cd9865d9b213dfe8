//! The parts of an answer.

/// The next part of an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Visible text.
    Content(String),
    /// Text of the reasoning, without its markers.
    Reasoning(String),
    /// Starts a tool call. The next parts are its arguments. `id`: of the call, if the model has written it.
    ToolCallStart { index: usize, name: String, id: Option<String> },
    /// The next fragment of the arguments as JSON, which is the model's own if it writes JSON.
    ToolCallArguments { index: usize, fragment: String },
}

/// The parts that were held back until the end of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rest {
    pub(crate) parts: Vec<Part>,
    /// Whether the answer ends inside the arguments of a call.
    pub(crate) is_cut: bool,
}

/// The concatenated parts of an answer.
#[cfg(test)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) content: String,
    pub(crate) reasoning: String,
    pub(crate) tool_calls: Vec<ToolCall>,
    /// Whether the arguments of the last call are incomplete.
    pub(crate) is_cut: bool,
}

#[cfg(test)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ToolCall {
    pub(crate) name: String,
    pub(crate) arguments: String,
}

#[cfg(test)]
impl Answer {
    pub(crate) fn extend(&mut self, parts: impl IntoIterator<Item = Part>) {
        for part in parts {
            match part {
                Part::Content(text) => self.content.push_str(&text),
                Part::Reasoning(text) => self.reasoning.push_str(&text),
                Part::ToolCallStart { name, .. } => {
                    self.tool_calls.push(ToolCall { name, arguments: String::new() });
                }
                Part::ToolCallArguments { index, fragment } => {
                    if let Some(call) = self.tool_calls.get_mut(index) {
                        call.arguments.push_str(&fragment);
                    }
                }
            }
        }
    }

    pub(crate) fn end(&mut self, rest: Rest) {
        self.extend(rest.parts);
        self.is_cut = rest.is_cut;
    }
}
