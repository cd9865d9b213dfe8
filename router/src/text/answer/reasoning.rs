//! The markers around the reasoning that a model may write before its answer.

/// The markers around a model's reasoning.
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

/// Whether an answer contains reasoning, as known from the end of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReasoningState {
    /// The model has no reasoning, or the prompt has closed it.
    Off,
    /// The answer may start with reasoning.
    Possible(ReasoningFormat),
    /// The prompt has opened the reasoning.
    Started(ReasoningFormat),
}

impl ReasoningFormat {
    /// Detects the format from the source of the chat template: a template of a reasoning model contains the closing marker.
    pub(crate) fn detect(template: &str) -> Option<Self> {
        FORMATS.into_iter().find(|format| template.contains(format.close))
    }

    fn at_end_of(self, prompt: &str) -> ReasoningState {
        let prompt = prompt.trim_end();
        if prompt.ends_with(self.open) {
            ReasoningState::Started(self)
        } else if prompt.ends_with(self.close) {
            ReasoningState::Off
        } else {
            ReasoningState::Possible(self)
        }
    }
}

impl ReasoningState {
    /// The state after this rendered prompt.
    pub(crate) fn after(format: Option<ReasoningFormat>, prompt: &str) -> Self {
        format.map_or(Self::Off, |format| format.at_end_of(prompt))
    }

    /// The format of the reasoning, if there can be any.
    pub(super) fn format(self) -> Option<ReasoningFormat> {
        match self {
            Self::Off => None,
            Self::Possible(format) | Self::Started(format) => Some(format),
        }
    }
}
