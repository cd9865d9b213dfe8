//! The marks between which models think before they answer.

/// How the model marks its thoughts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReasoningFormat {
    pub(super) open: &'static str,
    pub(super) close: &'static str,
}

const FORMATS: [ReasoningFormat; 3] = [
    ReasoningFormat { open: "<think>", close: "</think>" },
    ReasoningFormat { open: "[THINK]", close: "[/THINK]" },
    ReasoningFormat { open: "<|START_THINKING|>", close: "<|END_THINKING|>" },
];

/// Where an answer stands with its thoughts when it begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Thinking {
    /// There are none, or the prompt has closed them.
    Off,
    /// The answer may begin with them.
    Possible(ReasoningFormat),
    /// The prompt has opened them.
    Started(ReasoningFormat),
}

impl ReasoningFormat {
    /// From the chat template's source: one that is for a thinking model removes or writes the closing mark.
    pub(crate) fn detect(template: &str) -> Option<Self> {
        FORMATS.into_iter().find(|format| template.contains(format.close))
    }

    fn at_end_of(self, prompt: &str) -> Thinking {
        let prompt = prompt.trim_end();
        if prompt.ends_with(self.open) {
            Thinking::Started(self)
        } else if prompt.ends_with(self.close) {
            Thinking::Off
        } else {
            Thinking::Possible(self)
        }
    }
}

impl Thinking {
    /// What the rendered prompt leaves to the answer.
    pub(crate) fn after(format: Option<ReasoningFormat>, prompt: &str) -> Self {
        format.map_or(Self::Off, |format| format.at_end_of(prompt))
    }

    pub(super) fn format(self) -> Option<ReasoningFormat> {
        match self {
            Self::Off => None,
            Self::Possible(format) | Self::Started(format) => Some(format),
        }
    }
}
