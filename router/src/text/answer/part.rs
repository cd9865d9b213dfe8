//! The parts of an answer, and what they add up to.

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Content(String),
    /// Text of the thoughts, without their marks.
    Reasoning(String),
    /// A call begins. Its arguments follow, before anything else does.
    ToolCallStart {
        index: usize,
        name: String,
    },
    /// The next piece of the arguments: JSON as the model wrote it.
    ToolCallArguments {
        index: usize,
        fragment: String,
    },
}

/// What was held back until the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Rest {
    pub(crate) parts: Vec<Part>,
    /// The answer ended within a call's arguments.
    pub(crate) is_cut: bool,
}

/// An answer's parts, added up.
#[cfg(test)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) content: String,
    pub(crate) reasoning: String,
    pub(crate) tool_calls: Vec<ToolCall>,
    /// The last call's arguments are not complete.
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
